// Groups of rollouts, to be read. What is shown was written by models of others: it is text and nothing else.

import { called, count, find, make, plural, put, readable } from "./text.js";

let reading = null;

const score = (reward) =>
  make("span", { class: `score ${reward == null ? "" : reward >= 0.7 ? "high" : reward <= 0.2 ? "low" : ""}` }, reward == null ? "not scored here" : reward.toFixed(2));

const earned = (reward, groups, whose) => (groups ? `${whose} ${reward.toFixed(2)} in ${plural(groups, "group")}` : "");

// By task, why what was refused, and of whom what was taken came.
function drawFacts(known, sources) {
  const facts = Object.entries(known.tasks).sort().map(([family, task]) => [readable(family), [earned(task.reward, task.own, "own"), earned(task.external_reward, task.external, "others’")].filter(Boolean).join(" · ")]);
  const reasons = Object.entries(known.rejected).sort((one, other) => other[1] - one[1]);
  if (reasons.length) facts.push(["Refused", reasons.map(([reason, times]) => `${reason} ${count(times)}`).join(", ")]);
  if (sources.length) facts.push(["Taken of", sources.map(([peer, groups]) => `${called(peer)} ${count(groups)}`).join(", ")]);
  let list = find("rollout-facts");
  if (!list) find("rollouts-card").querySelector(".reader").before((list = make("dl", { id: "rollout-facts", class: "facts notable" })));
  list.replaceChildren(...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

// A dialogue's text has by turns what a policy said and, marked, what its environment answered.
const turns = (text) => text.split("\x1e", 127).map((part, at) => (at % 2 ? make("b", {}, `\n${readable(part)}\n`) : readable(part)));

const age = (group, now) => (now > group.came ? `${plural(now - group.came, "round")} ago` : "in this round");

export function drawRollouts({ node, groups, sources }) {
  const known = node.rollouts;
  find("rollouts-card").hidden = find("reward-card").hidden = false;
  const refused = Object.values(known.rejected).reduce((sum, value) => sum + value, 0);
  put("rollouts-sum", `${plural(known.made, "group")} made · ${count(known.pulled)} pulled · ${count(known.taken)} taken · ${count(refused)} refused`);
  drawFacts(known, sources);
  const rows = groups.toReversed().map((group) => {
    const button = make("button", { type: "button", "aria-pressed": String(group.digest === reading) }, make("span", {}, readable(group.family)), score(group.reward),
      make("small", {}, `${group.own ? "own" : called(group.peer_id)} · round ${group.round}${group.policy === group.round ? "" : `, policy ${group.policy}`} · ${plural(group.completions, "answer")} · ${age(group, known.round)}`));
    button.addEventListener("click", () => read(group));
    return make("li", {}, button);
  });
  const list = find("groups");
  const focused = [...list.querySelectorAll("button")].indexOf(document.activeElement);
  list.replaceChildren(...rows);
  if (focused >= 0) list.querySelectorAll("button")[focused]?.focus();
  if (reading === null && groups.length > 0) read(groups.at(-1));
}

async function read(group) {
  reading = group.digest;
  for (const button of find("groups").querySelectorAll("button")) button.setAttribute("aria-pressed", "false");
  const page = find("reading");
  let found;
  try {
    const answer = await fetch(`/api/rollouts/${group.digest}`);
    if (!answer.ok) throw new Error(await answer.text());
    found = await answer.json();
  } catch (error) {
    page.replaceChildren(make("p", { class: "empty" }, error.message));
    return;
  }
  if (reading !== group.digest) return;
  const parts = [make("h3", {}, "Question"), make("pre", {}, readable(found.question))];
  found.completions.forEach((text, index) => {
    parts.push(make("h3", {}, `Answer ${index + 1} · `, score(found.rewards[index] ?? null)), make("pre", {}, ...turns(text)));
  });
  page.replaceChildren(...parts);
  page.scrollTop = 0;
}
