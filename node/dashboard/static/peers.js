// The peers: what they come to in numbers, those that are asked for, a part at a time, and all of one of them.

import { drawHappenings } from "./rounds.js";
import { askPeer, askPeers } from "./store.js";
import { NONE, REACHED, bytes, called, count, find, make, nameThem, plural, put, rate, short } from "./text.js";

const PART = 30; // of one answer, as the node gives them
const RENEW_MS = 2000;
const TYPING_MS = 200;
const STATES = ["training", "joining", "paused", "silent", "left", "gone", "unreached"];
const RISING = ["peer", "state", "reach"];

let wanted = { find: "", group: "", sort: "peer", down: false, first: 0 };
let answers = 0; // questions so far: an answer to an older one is not shown
let askedAt = -RENEW_MS;
let visible = false;
let chosen = null;
let typing = 0;
let rows = new Map();
const chips = new Map();

export function startPeers(pick) {
  for (const button of document.querySelectorAll("#peers thead button")) {
    button.addEventListener("click", () => {
      const sort = button.dataset.sort;
      const down = wanted.sort === sort ? !wanted.down : !RISING.includes(sort);
      for (const head of document.querySelectorAll("#peers thead th")) head.removeAttribute("aria-sort");
      button.closest("th").setAttribute("aria-sort", down ? "descending" : "ascending");
      ask({ sort, down, first: 0 });
    });
  }
  find("find").addEventListener("input", (event) => {
    clearTimeout(typing);
    typing = setTimeout(() => ask({ find: event.target.value.trim(), first: 0 }), TYPING_MS);
  });
  find("peers-before").addEventListener("click", () => ask({ first: Math.max(0, wanted.first - PART) }));
  find("peers-next").addEventListener("click", () => ask({ first: wanted.first + PART }));
  find("peers").addEventListener("pointerover", (event) => pick(event.target.closest("tr")?.dataset.peer ?? null));
  new IntersectionObserver((seen) => {
    visible = seen.at(-1).isIntersecting;
    renewPeers();
  }).observe(find("peers-card"));
}

// -- in numbers ----------------------------------------------------------------------------------------------------

export function drawSummary(summary) {
  const states = summary.states ?? {};
  find("peer-states").replaceChildren(...STATES.filter((name) => states[name]).map((name) => {
    const piece = make("span", { class: `s-${name}` });
    piece.style.flex = states[name];
    return piece;
  }));
  chip("", "all", summary.known);
  for (const name of STATES) chip(name, name, states[name]);
  chip("member", "members", summary.members);
  chip("following", "not members", summary.following);
  chip("behind", "behind", summary.behind);
  const facts = [];
  if (summary.speeds && summary.known > 1) {
    const [low, middle, high] = summary.speeds.map(count);
    facts.push(["Tokens/s of a node", [`${middle} in the middle; one in ten below ${low}, one in ten above ${high}`]]);
  }
  const versions = Object.entries(summary.software ?? {});
  if (versions.length > 1) facts.push(["Software", [versions.map(([name, nodes]) => `${name}: ${plural(nodes, "node")}`).join(", ")]]);
  if (summary.known > PART) facts.push(["Slowest", named(summary.slowest, (value) => `${count(value)} tokens/s`)]);
  if (summary.behind) facts.push(["Most behind", named(summary.most_behind, (value) => plural(value, "round"))]);
  const list = find("peer-facts");
  const focused = [...list.querySelectorAll("button")].indexOf(document.activeElement);
  list.replaceChildren(...facts.flatMap(([name, pieces]) => [make("dt", {}, name), make("dd", {}, ...pieces)]));
  if (focused >= 0) list.querySelectorAll("button")[focused]?.focus();
}

function chip(group, name, nodes = 0) {
  let button = chips.get(group);
  if (!button) {
    button = make("button", { type: "button", "aria-pressed": String(group === wanted.group) });
    button.addEventListener("click", () => {
      for (const [other, known] of chips) known.setAttribute("aria-pressed", String(other === group));
      ask({ group, first: 0 });
    });
    chips.set(group, button);
    find("peer-groups").append(button);
  }
  button.dataset.group = group;
  button.hidden = nodes === 0 && group !== wanted.group;
  put(button, `${name} ${count(nodes)}`);
}

const named = (outliers, told) => outliers.map(({ peer, value }) => {
  const button = make("button", { type: "button", class: "copy", title: peer }, called(peer));
  button.addEventListener("click", () => openPeer(peer));
  return make("span", { class: "outlier" }, button, told(value));
});

// -- those that are asked for --------------------------------------------------------------------------------------

// Ask again for what is on the screen, since something is new; not more often than people read.
export function renewPeers() {
  if (visible && !document.hidden && performance.now() - askedAt >= RENEW_MS) ask({});
}

async function ask(changes) {
  wanted = { ...wanted, ...changes };
  askedAt = performance.now();
  const number = ++answers;
  let found;
  try {
    found = await askPeers(wanted);
  } catch (error) {
    if (number === answers) put("peers-place", error.message);
    return;
  }
  if (number !== answers) return;
  if (found.peers.length === 0 && found.first > 0) return ask({ first: Math.max(0, Math.floor((found.total - 1) / PART) * PART) });
  drawPeers(found);
}

function drawPeers({ total, first, peers }) {
  nameThem(Object.fromEntries(peers.map((peer) => [peer.peer, peer])));
  const body = find("peers").tBodies[0];
  const kept = new Map();
  peers.forEach((peer, index) => {
    const row = rows.get(peer.peer) ?? fresh(peer.peer);
    fill(row, peer);
    kept.set(peer.peer, row);
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
  });
  while (body.rows.length > peers.length) body.lastElementChild.remove();
  rows = kept;
  find("peers-before").hidden = first === 0;
  find("peers-next").hidden = first + peers.length >= total;
  put("peers-place", total === 0 ? "none" : `${count(first + 1)} to ${count(first + peers.length)} of ${count(total)}`);
}

function fresh(id) {
  const row = make("tr", {});
  row.dataset.peer = id;
  for (let i = 0; i < 8; i++) row.append(make("td", i >= 3 ? { class: "num" } : {}));
  const name = make("button", { type: "button", class: "copy", title: id });
  name.addEventListener("click", () => openPeer(id));
  row.cells[0].append(name, make("small", { class: "mono muted" }));
  row.cells[1].append(make("span", { class: "badge" }));
  return row;
}

const standing = (peer) => [
  peer.state,
  peer.member || ["joining", "left", "gone", "unreached"].includes(peer.state) ? "" : "no member",
  peer.behind ? `${plural(peer.behind, "round")} behind` : "",
].filter(Boolean).join(" · ");

function fill(row, peer) {
  const kind = `${peer.state}${chosen === peer.peer ? " picked" : ""}`;
  if (row.className !== kind) row.className = kind;
  const badge = row.cells[1].firstChild;
  badge.className = `badge ${peer.state}`;
  put(badge, standing(peer));
  const self = peer.reach === "self";
  put(row.cells[0].firstChild, self ? `${called(peer.peer)} (this node)` : called(peer.peer));
  put(row.cells[0].lastChild, called(peer.peer).endsWith(short(peer.peer)) ? "" : short(peer.peer));
  const cells = [
    REACHED[peer.reach] ?? peer.reach, count(peer.round), peer.speed ? count(peer.speed) : NONE,
    self ? NONE : rate(peer.up), self ? NONE : rate(peer.down), self ? NONE : bytes(peer.sent + peer.received),
  ];
  cells.forEach((text, index) => put(row.cells[index + 2], text));
}

export function markPeer(id) {
  rows.get(chosen)?.classList.remove("picked");
  chosen = id;
  rows.get(id)?.classList.add("picked");
}

// -- one of them ---------------------------------------------------------------------------------------------------

export async function openPeer(id) {
  put("peer-title", called(id));
  put("peer-name", id);
  put("peer-more", "…");
  find("peer-happenings").replaceChildren();
  if (!find("peer").open) find("peer").showModal();
  let peer;
  try {
    peer = await askPeer(id);
  } catch (error) {
    if (find("peer-name").textContent === id) put("peer-more", error.message);
    return;
  }
  if (find("peer-name").textContent !== id) return;
  const { record } = peer;
  const facts = [
    ["State", standing(peer)], ["Reached", REACHED[peer.reach] ?? peer.reach], ["Round", count(peer.round)],
    ["Tokens/s", peer.speed ? count(peer.speed) : NONE], ["Sent to it", `${bytes(peer.sent)}, ${rate(peer.up)}`],
    ["Received from it", `${bytes(peer.received)}, ${rate(peer.down)}`], ["Software", peer.software || NONE],
  ];
  if (record) {
    facts.push(
      ["Addresses", record.control_addresses.join(" ") || NONE], ["Of lanes", record.lane_addresses.join(" ") || NONE],
      ["Term", record.term], ["Started", plural(record.boot, "time")], ["Can", record.capabilities.join(", ") || NONE],
      ["Limits", `up ${record.upload_bytes_per_s ? rate(record.upload_bytes_per_s) : "none"}, down ${record.download_bytes_per_s ? rate(record.download_bytes_per_s) : "none"}`],
    );
  }
  find("peer-more").replaceChildren(...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
  drawHappenings(peer.happenings, "peer-happenings");
}

// -- bans ----------------------------------------------------------------------------------------------------------

export function drawBans(bans, me) {
  find("bans-card").hidden = bans.length === 0;
  const rows = bans.map((ban) => {
    const name = ban.peer === me ? `${called(ban.peer)} (this node)` : called(ban.peer);
    return make(
      "tr",
      {},
      make("td", { class: "mono", title: ban.peer }, name),
      make("td", { class: "num" }, count(ban.round)),
      make("td", { class: "num" }, ban.until == null ? "for ever" : `round ${count(ban.until)}`),
      make("td", { class: "mono", title: ban.evidence }, `${ban.evidence.slice(0, 12)}…`),
    );
  });
  find("bans").tBodies[0].replaceChildren(...rows);
}
