// Rounds as bars of phases with what disturbed them, their certificates, and what happened.

import { NONE, at, byName, called, count, duration, find, make, percent, plural, put } from "./text.js";

const ROUNDS_SHOWN = 24;

const HAPPENED = {
  departed: (peer) => `${peer} has left`,
  died: (peer) => `${peer} is gone`,
  lost: (peer) => `the link to ${peer} broke`,
  linked: (peer) => `a link to ${peer} is up`,
  suspected: (peer) => `${peer} is silent`,
  revived: (peer) => `${peer} is back`,
  detoured: (peer) => `${peer} is slow to answer; others pass on what it says`,
  revoked: (peer) => `the swarm's authority shut ${peer} out`,
  evidence: (peer) => `there is proof against ${peer}`,
  banned: (peer) => `the swarm banned ${peer}`,
  evicted: (peer) => `the round goes on without ${peer}`,
  replanned: () => "the reduce was planned again",
  view_changed: () => "another lead took over",
  rolled_back: () => "the swarm went back",
  rebased: () => "the authority opened another term",
  amended: () => "settings were amended",
  caught_up: () => "the state came from others",
  resumed: () => "training resumed",
  trainer_restarted: () => "the trainer was started again",
  agent_died: () => "the agent died",
  loop_detached: () => "the training loop detached",
  failed: () => "training failed",
  started: () => "this node started",
  left: () => "this node left",
};

export function said(happening) {
  const text = HAPPENED[happening.kind]?.(called(happening.peer)) ?? happening.kind;
  return happening.detail ? `${text}: ${byName(happening.detail)}` : text;
}

// Phases and their seconds, in order. Without a common state a round has fewer: all of it is work, or an exchange.
export function phasesOf(round, now) {
  if (round.state === "shared" || round.state === "skipped") {
    return [[round.state === "shared" ? "train" : "plan", (round.ended ?? now) - round.began]];
  }
  if (round.state === "stepped" && round.planned == null) {
    const trained = round.contributed ?? round.began;
    return [["train", trained - round.began], ["reduce", round.ended - trained]];
  }
  const marks = [["train", round.contributed], ["plan", round.planned], ["reduce", round.reduced], ["certify", round.ended]];
  const phases = [];
  let from = round.began;
  for (const [name, until] of marks) {
    if (until != null && until > from) {
      phases.push([name, until - from]);
      from = until;
    } else if (until == null && round.ended == null) {
      phases.push([name, Math.max(0, now - from)]);
      break;
    }
  }
  return phases;
}

function noteOf(round) {
  const bits = [];
  if (round.faults.length > 0) {
    const worst = round.faults.find((fault) => fault.kind === "died") ?? round.faults[0];
    bits.push(said({ kind: worst.kind, peer: worst.peer }));
    if (round.faults.length > 1) bits.push(`${round.faults.length - 1} more`);
  }
  if (round.state === "stepped") bits.push(round.partner ? `with ${called(round.partner)}` : "alone");
  else if (round.state === "skipped") bits.push("fetched from others");
  else if (round.state === "shared") bits.push(`${count(round.tokens)} tokens`);
  else if (round.contributors != null && round.members) bits.push(`${round.contributors} of ${round.members} contributed`);
  else if (round.members) bits.push(plural(round.members, "member"));
  return bits.join(" · ");
}

export function drawRounds(rounds) {
  const now = Date.now() / 1000;
  const shown = rounds.slice(-ROUNDS_SHOWN).reverse();
  const lengths = shown.map((round) => (round.ended ?? now) - round.began);
  const newest = shown[0];
  const ended = lengths.filter((length, index) => shown[index].ended != null);
  const longest = Math.max(0.1, ...(ended.length ? ended : lengths));
  find("rounds-empty").hidden = shown.length > 0;
  const rows = shown.map((round, index) => {
    const length = lengths[index];
    const open = round.ended == null && round === newest;
    const bar = make("div", { class: "bar" });
    bar.style.width = `${Math.min(100, Math.max(2, (100 * length) / longest))}%`;
    const phases = round.ended == null && !open ? phasesOf({ ...round, ended: round.reduced ?? round.planned ?? round.contributed ?? round.began }, now) : phasesOf(round, now);
    for (const [name, seconds] of phases) {
      const piece = make("span", { class: `p-${name}`, title: `${name} ${duration(seconds)}` });
      piece.style.flex = `${Math.max(1000 * seconds, 1)} 0 0`; // shares that add up to less than 1 would not fill the bar
      bar.append(piece);
    }
    for (const fault of round.faults) {
      const mark = make("i", { class: `mark ${fault.kind === "died" ? "" : "warn"}`, title: `${at(fault.at)} ${said(fault)}` });
      mark.style.left = `${Math.min(100, Math.max(0, (100 * (fault.at - round.began)) / Math.max(length, 0.001)))}%`;
      bar.append(mark);
    }
    const took = open ? "under way" : round.ended == null ? NONE : duration(length);
    const told = phases.map(([name, seconds]) => `${name} ${duration(seconds)}`).join(", ");
    const note = noteOf(round);
    return make(
      "li",
      { class: `${open ? "open" : ""} ${round.faults.length ? "faulty" : ""}`, "aria-label": `Round ${round.round}, ${took}: ${told}. ${note}` },
      make("span", { class: "n" }, String(round.round)),
      bar,
      make("span", { class: "took" }, took),
      make("span", { class: "note", title: note }, note),
    );
  });
  find("rounds").replaceChildren(...rows);
}

export function drawCertificates(certificates) {
  find("certificates-empty").hidden = certificates.length > 0;
  const rows = certificates.toReversed().map((known) => {
    const copy = make("button", { type: "button", class: "copy", title: `${known.digest}\nClick to copy`, "aria-label": `Copy the digest ${known.digest}` }, `${known.digest.slice(0, 24)}…`);
    copy.addEventListener("click", () => copied(copy, known.digest));
    const cell = (text) => make("td", { class: "num" }, text);
    return make(
      "tr",
      {},
      cell(known.term === "0.0" ? String(known.round) : `${known.round} (term ${known.term})`),
      make("td", {}, copy),
      cell(`${known.contributors} of ${known.members}`),
      cell(percent(known.coverage, known.coverage === 1 ? 0 : 1)),
      cell(count(known.tokens)),
      cell(String(known.view)),
      cell(duration(known.seconds)),
      cell(at(known.at)),
    );
  });
  find("certificates").tBodies[0].replaceChildren(...rows);
}

async function copied(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    button.textContent = text; // no clipboard without a secure origin: show it whole, to be selected
    return;
  }
  setTimeout(() => (button.textContent = before), 1200);
}

export function drawHappenings(happenings, id = "happenings") {
  const rows = happenings.toReversed().map((known) =>
    make("li", { class: known.severity }, make("time", {}, at(known.at)), make("i", { "aria-hidden": "true" }), make("span", {}, said(known) + (known.more ? `, and ${plural(known.more, "other")} likewise` : ""))),
  );
  if (rows.length === 0) rows.push(make("li", {}, make("span", { class: "muted" }, NONE)));
  find(id).replaceChildren(...rows);
}

export const drawHealth = (checks) => {
  const signs = { ok: "✓", warn: "!", bad: "×" };
  const words = { ok: "well", warn: "warning", bad: "trouble" };
  const rows = checks.map((check) => {
    const row = make(
      "li",
      { class: check.state },
      make("span", { class: "sign", role: "img", "aria-label": words[check.state] }, signs[check.state]),
      make("b", {}, check.name),
      make("span", {}, check.detail),
    );
    if (check.remedy) row.append(make("span", { class: "remedy" }, check.remedy));
    return row;
  });
  find("health").replaceChildren(...rows);
  put("h-health", "This node");
};
