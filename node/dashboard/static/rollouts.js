// Groups of rollouts, to be read. What is shown was written by models of others: it is text and nothing else.

import { called, count, find, make, plural, put, readable } from "./text.js";

let reading = null;

const score = (reward) =>
  make("span", { class: `score ${reward == null ? "" : reward >= 0.7 ? "high" : reward <= 0.2 ? "low" : ""}` }, reward == null ? "not scored here" : reward.toFixed(2));

export function drawRollouts(node, groups) {
  const known = node.rollouts;
  find("rollouts-card").hidden = find("reward-card").hidden = false;
  const refused = Object.values(known.rejected).reduce((sum, value) => sum + value, 0);
  put("rollouts-sum", `${plural(known.made, "group")} made · ${count(known.pulled)} pulled · ${count(known.taken)} taken · ${count(refused)} refused`);
  const rows = groups.toReversed().map((group) => {
    const button = make("button", { type: "button", "aria-pressed": String(group.digest === reading) }, make("span", {}, readable(group.family)), score(group.reward),
      make("small", {}, `${group.own ? "own" : called(group.peer)} · round ${group.round} · ${plural(group.completions, "answer")}`));
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
    parts.push(make("h3", {}, `Answer ${index + 1} · `, score(found.rewards[index] ?? null)), make("pre", {}, readable(text)));
  });
  page.replaceChildren(...parts);
  page.scrollTop = 0;
}
