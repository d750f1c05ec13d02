// The peers as a table: the same as on the map, to be sorted, searched, and read aloud.

import { LOOKS, NONE, REACHED, bytes, count, find, looks, make, put, rate, short } from "./text.js";

const SHOWN = 30;

let sort = { key: "id", down: false };
let all = false;
let wanted = "";
let chosen = null;
let rows = new Map();
let last = [{}, null];

const valueOf = {
  id: (id, peer) => [peer.reach !== "self", !peer.member, id],
  phase: (id, peer) => [LOOKS[looks(peer)], id],
  reach: (id, peer) => [REACHED[peer.reach] ?? "", id],
  round: (id, peer) => [peer.round, id],
  speed: (id, peer) => [peer.speed, id],
  up: (id, peer) => [peer.up, id],
  down: (id, peer) => [peer.down, id],
  total: (id, peer) => [peer.sent + peer.received, id],
};

export function startPeers(pick) {
  for (const button of document.querySelectorAll("#peers thead button")) {
    button.addEventListener("click", () => {
      const key = button.dataset.sort;
      const down = sort.key === key ? !sort.down : !["id", "phase", "reach"].includes(key);
      sort = { key, down };
      for (const head of document.querySelectorAll("#peers thead th")) head.removeAttribute("aria-sort");
      button.closest("th").setAttribute("aria-sort", down ? "descending" : "ascending");
      drawPeers(...last);
    });
  }
  find("find").addEventListener("input", (event) => {
    wanted = event.target.value.trim().toLowerCase();
    drawPeers(...last);
  });
  find("all-peers").addEventListener("click", () => {
    all = !all;
    drawPeers(...last);
  });
  find("peers").addEventListener("pointerover", (event) => pick(event.target.closest("tr")?.dataset.peer ?? null));
}

function before(a, b) {
  for (let i = 0; i < a.length; i++) {
    if (a[i] < b[i]) return -1;
    if (a[i] > b[i]) return 1;
  }
  return 0;
}

export function drawPeers(peers, me) {
  last = [peers, me];
  const found = Object.entries(peers)
    .filter(([id, peer]) => !wanted || `${id} ${LOOKS[looks(peer)]} ${REACHED[peer.reach]}`.toLowerCase().includes(wanted))
    .map(([id, peer]) => [id, peer, valueOf[sort.key](id, peer)])
    .sort((a, b) => (sort.down ? -1 : 1) * before(a[2], b[2]));
  const shown = all ? found : found.slice(0, SHOWN);
  const body = find("peers").tBodies[0];
  const kept = new Map();
  shown.forEach(([id, peer], index) => {
    const row = rows.get(id) ?? fresh(id);
    fill(row, id, peer);
    kept.set(id, row);
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
  });
  while (body.rows.length > shown.length) body.lastElementChild.remove();
  rows = kept;
  const button = find("all-peers");
  button.hidden = found.length <= SHOWN;
  put(button, all ? `Show the first ${SHOWN}` : `Show all ${found.length}`);
}

function fresh(id) {
  const row = make("tr", {});
  row.dataset.peer = id;
  for (let i = 0; i < 8; i++) row.append(make("td", i >= 3 ? { class: "num" } : {}));
  row.cells[0].className = "mono";
  row.cells[0].title = id;
  row.cells[1].append(make("span", { class: "badge" }));
  return row;
}

function fill(row, id, peer) {
  const look = looks(peer);
  const kind = `${look}${chosen === id ? " picked" : ""}`;
  if (row.className !== kind) row.className = kind;
  const badge = row.cells[1].firstChild;
  badge.className = `badge ${look}`;
  put(badge, LOOKS[look] + (peer.member || ["joining", "leaving", "gone"].includes(look) ? "" : " · no member yet"));
  const self = peer.reach === "self";
  const cells = [
    self ? `${short(id)} (this node)` : short(id), null, REACHED[peer.reach] ?? peer.reach, count(peer.round),
    peer.speed ? count(peer.speed) : NONE, self ? NONE : rate(peer.up), self ? NONE : rate(peer.down), self ? NONE : bytes(peer.sent + peer.received),
  ];
  cells.forEach((text, index) => text !== null && put(row.cells[index], text));
}

export function drawBans(bans, me) {
  find("bans-card").hidden = bans.length === 0;
  const rows = bans.map((ban) => {
    const name = ban.peer === me ? `${short(ban.peer)} (this node)` : short(ban.peer);
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

export function markPeer(id) {
  rows.get(chosen)?.classList.remove("picked");
  chosen = id;
  rows.get(id)?.classList.add("picked");
}
