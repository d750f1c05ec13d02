// The swarm as a map: this node in the middle, the others on a ring, or as the seeds of a sunflower where they are many.

import { called, count, draw, find, make, put, rate } from "./text.js";

const RING_LIMIT = 14;
const GOLDEN = Math.PI * (3 - Math.sqrt(5));
const INNER = 32;
const OUTER = 92;

const SPOKEN = {
  self: "", direct: "reached directly", detour: "reached through others", suspect: "does not answer",
  unlinked: "not reached by this node", gone: "not reached any more",
};

const LABEL_CHARS = 12; // so that neighbours on the ring keep apart

const labelOf = (id) => (called(id).length > LABEL_CHARS ? `${called(id).slice(0, LABEL_CHARS - 1)}…` : called(id));

const slots = new Map(); // peer: its place, kept while others come and go
const drawn = new Map();
let picked = null;
let onPick = () => {};
let onOpen = () => {};
let layers = null;

export function startMap(pick, open) {
  onPick = pick;
  onOpen = open;
  const map = find("map");
  layers = { rings: draw("g"), links: draw("g"), peers: draw("g") };
  for (const radius of [34, 63, 92]) layers.rings.append(draw("circle", { class: "ring", r: radius }));
  map.append(layers.rings, layers.links, layers.peers);
  map.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") return choose(null);
    if (event.key === "Enter" && picked !== null) return onOpen(picked);
    if (!step) return;
    event.preventDefault();
    const order = [...drawn.keys()].sort((a, b) => (slots.get(a) ?? -1) - (slots.get(b) ?? -1));
    const next = (order.indexOf(picked) + step + order.length) % order.length;
    choose(order[picked === null ? 0 : next]);
  });
  map.addEventListener("pointerover", (event) => {
    const peer = event.target.closest?.(".peer")?.dataset.peer;
    if (peer) choose(peer);
  });
  map.addEventListener("click", (event) => {
    const peer = event.target.closest?.(".peer")?.dataset.peer;
    if (peer) onOpen(peer);
  });
  map.addEventListener("pointerleave", () => choose(null));
  map.addEventListener("blur", () => choose(null));
}

function placed(index, places, ring) {
  const angle = ring ? (2 * Math.PI * index) / places - Math.PI / 2 : index * GOLDEN;
  const inner = INNER * INNER;
  const radius = ring ? 68 : Math.sqrt(inner + ((OUTER * OUTER - inner) * (index + 0.5)) / places);
  return [radius * Math.cos(angle) * (ring ? 1.15 : 1.12), radius * Math.sin(angle)];
}

function settle(ids) {
  const present = new Set(ids);
  for (const id of [...slots.keys()]) if (!present.has(id)) slots.delete(id);
  const taken = new Set(slots.values());
  let free = 0;
  for (const id of ids) {
    if (slots.has(id)) continue;
    while (taken.has(free)) free++;
    slots.set(id, free);
    taken.add(free);
  }
}

export function drawMap(peers, me) {
  const others = Object.keys(peers).filter((id) => peers[id].reach !== "self").sort();
  settle(others);
  const highest = Math.max(-1, ...others.map((id) => slots.get(id))) + 1;
  const ring = highest <= RING_LIMIT;
  let places = Math.max(highest, 1);
  if (!ring) for (places = 16; places < highest; places = Math.ceil(places * 1.3)); // room, so that nobody moves often
  const fastest = Math.max(1, ...Object.values(peers).map((peer) => peer.speed));
  const size = ring ? 7 : Math.max(2.3, Math.min(5, 46 / Math.sqrt(places)));
  find("map").classList.toggle("many", others.length > 24);
  const known = new Set(Object.keys(peers));
  for (const [id, parts] of drawn) {
    if (known.has(id)) continue;
    parts.group.remove();
    parts.link?.remove();
    drawn.delete(id);
  }
  for (const id of known) {
    const self = peers[id].reach === "self" || id === me;
    const [x, y] = self ? [0, 0] : placed(slots.get(id), places, ring);
    update(id, peers[id], { x, y, self, radius: self ? 9 : size * (0.8 + 0.5 * Math.sqrt(peers[id].speed / fastest)) });
  }
  if (picked !== null && !known.has(picked)) choose(null);
  else if (picked !== null) tell(peers[picked]);
  find("map-alone").hidden = others.length > 0;
}

function update(id, peer, place) {
  let parts = drawn.get(id);
  if (!parts) {
    parts = create(id, place.self);
    drawn.set(id, parts);
  }
  parts.peer = peer;
  put(parts.name, place.self ? "this node" : labelOf(id));
  const look = peer.state;
  const kind = `peer ${look}${place.self ? " self" : ""}${peer.member ? "" : " guest"}${picked === id ? " picked" : ""}`;
  if (parts.kind !== kind) parts.group.setAttribute("class", (parts.kind = kind));
  const spot = `${place.x.toFixed(1)},${place.y.toFixed(1)},${place.radius.toFixed(1)}`;
  if (parts.spot !== spot || parts.look !== look) {
    parts.spot = spot;
    parts.look = look;
    parts.group.style.transform = `translate(${place.x.toFixed(1)}px, ${place.y.toFixed(1)}px)`;
    parts.body.setAttribute("r", place.radius.toFixed(1));
    parts.name.setAttribute("y", place.self ? 23 : (place.radius + 8).toFixed(1));
    const arm = place.radius * 0.42;
    parts.cross.setAttribute("d", look === "gone" ? `M${-arm} ${-arm}L${arm} ${arm}M${arm} ${-arm}L${-arm} ${arm}` : "");
    if (parts.link) {
      parts.link.setAttribute("x2", place.x.toFixed(1));
      parts.link.setAttribute("y2", place.y.toFixed(1));
    }
  }
  if (!parts.link) return;
  const linked = peer.reach === "direct" || peer.reach === "detour";
  parts.link.setAttribute("class", `link ${peer.reach}`);
  const faint = drawn.size > 40 ? 0.5 : 1;
  const busy = Math.min(1, Math.log10(1 + (peer.up || 0) + (peer.down || 0)) / 7);
  parts.link.style.opacity = linked ? (peer.reach === "detour" ? 0.7 : faint * (0.12 + 0.6 * busy)).toFixed(2) : 0;
  parts.link.setAttribute("stroke-width", (0.5 + 1.3 * busy).toFixed(2));
}

function create(id, self) {
  const group = draw("g");
  group.dataset.peer = id;
  const body = draw("circle", { class: "body" });
  const name = draw("text", { class: self ? "" : "name" });
  const cross = draw("path", { class: "cross", d: "" });
  if (self) group.append(draw("circle", { class: "halo", r: 15 }));
  group.append(body, cross, name);
  layers.peers.append(group);
  const link = self ? null : draw("line", { x1: 0, y1: 0 });
  if (link) layers.links.append(link);
  return { group, body, name, cross, link, kind: "", spot: "", look: "" };
}

export function choose(id, scroll = false) {
  if (picked === id) return;
  drawn.get(picked)?.group.classList.remove("picked");
  picked = id;
  const parts = drawn.get(id);
  onPick(id, scroll);
  if (!parts) {
    find("map-more").hidden = true;
    return;
  }
  parts.group.classList.add("picked");
  parts.kind = parts.group.getAttribute("class");
  tell(parts.peer);
}

function tell(peer) {
  const more = find("map-more");
  const parts = drawn.get(picked);
  if (!parts || !peer) return;
  const line = (text) => make("p", {}, text);
  more.replaceChildren(
    make("strong", { class: "mono" }, peer.reach === "self" ? "this node" : called(picked)),
    line(`${peer.state} · round ${count(peer.round)} · ${count(peer.speed)} tokens/s`),
    line([peer.member ? "member" : ["left", "gone", "unreached"].includes(peer.state) ? "" : "not a member yet", SPOKEN[peer.reach] ?? peer.reach].filter(Boolean).join(" · ")),
    line(`↑ ${rate(peer.up)}  ↓ ${rate(peer.down)}`),
  );
  more.hidden = false;
  const stage = more.parentElement.getBoundingClientRect();
  const spot = parts.body.getBoundingClientRect();
  const left = Math.min(Math.max(4, spot.right - stage.left + 10), stage.width - more.offsetWidth - 4);
  const top = Math.min(Math.max(4, spot.top - stage.top - 10), stage.height - more.offsetHeight - 4);
  more.style.transform = `translate(${left}px, ${top}px)`;
}
