// What the page knows, kept like the node's own model: a snapshot, then deltas, each one after the other.

import { nameThem } from "./text.js";

const LIMITS = { rounds: 60, certificates: 60, happenings: 100, bandwidth: 300, groups: 24, points: 2048 };
const SILENCE_MS = 6000;
const RETRY_MS = [500, 1000, 2000, 4000];

export const state = {
  seq: 0, node: null, summary: {}, health: [], peers: {}, rounds: [], certificates: [], happenings: [], curves: {}, bandwidth: [], groups: [], samples: [], sources: [],
};

const append = (name, items, limit = LIMITS[name]) => {
  state[name] = [...state[name], ...items].slice(-limit);
};

const merge = {
  node: (fields) => Object.assign(state.node, fields),
  summary: (fields) => Object.assign(state.summary, fields),
  health: (checks) => (state.health = checks),
  peers: (changes) => {
    nameThem(changes);
    for (const [id, fields] of Object.entries(changes)) {
      if (fields === null) delete state.peers[id];
      else state.peers[id] = { ...state.peers[id], ...fields };
    }
  },
  rounds: (changed) => {
    const known = new Map(state.rounds.map((round) => [round.key, round]));
    for (const round of changed) known.set(round.key, round);
    state.rounds = [...known.values()].slice(-LIMITS.rounds);
  },
  certificates: (items) => append("certificates", items),
  happenings: (items) => append("happenings", items),
  bandwidth: (items) => append("bandwidth", items),
  groups: (items) => append("groups", items),
  samples: (known) => (state.samples = known),
  sources: (known) => (state.sources = known),
  curves: (redone) => Object.assign(state.curves, redone),
  points: (news) => {
    for (const [name, points] of Object.entries(news)) {
      state.curves[name] = [...(state.curves[name] || []), ...points].slice(-LIMITS.points);
    }
  },
};

// Follow the node's feed for ever. `changed` hears which parts are new, `heard` whether there is word from the node.
export function follow(changed, heard) {
  let source = null;
  let last = 0;
  let failures = 0;
  let timer = 0;

  const lost = () => {
    source?.close();
    source = null;
    heard(false);
    clearTimeout(timer);
    timer = setTimeout(open, RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]);
  };
  const word = () => {
    last = performance.now();
    failures = 0;
    heard(true);
  };
  const open = () => {
    last = performance.now();
    source = new EventSource("/api/feed");
    source.addEventListener("snapshot", (event) => {
      Object.assign(state, JSON.parse(event.data));
      nameThem(state.peers);
      word();
      changed(new Set(["all"]));
    });
    source.addEventListener("delta", (event) => {
      const delta = JSON.parse(event.data);
      if (delta.seq !== state.seq + 1 && !(delta.seq <= state.seq)) return lost();
      if (delta.seq <= state.seq) return;
      state.seq = delta.seq;
      for (const [part, news] of Object.entries(delta)) merge[part]?.(news);
      word();
      changed(new Set(Object.keys(delta)));
    });
    source.onerror = lost;
  };
  setInterval(() => {
    if (source !== null && performance.now() - last > SILENCE_MS) lost();
  }, 1000);
  addEventListener("pagehide", () => source?.close());
  addEventListener("pageshow", (event) => event.persisted && lost());
  open();
}

// The token with which this node obeys: from the link that `shoal status` prints, or typed in; kept for this tab.
const TOKEN = "shoal-token";
let token = null;

export function keepToken(given) {
  token = given;
  try {
    sessionStorage.setItem(TOKEN, given);
  } catch {
    // It lasts as long as the page, then.
  }
}

export function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    history.replaceState(null, "", location.pathname);
    return keepToken(given);
  }
  try {
    token = sessionStorage.getItem(TOKEN);
  } catch {
    token = null;
  }
}

export class TokenWanted extends Error {}

export async function order(op) {
  const headers = { "x-shoal-order": "1", ...(token && { authorization: `Bearer ${token}` }) };
  const answer = await fetch(`/api/${op}`, { method: "POST", headers });
  if (answer.status === 401) throw new TokenWanted("It takes the page’s token.");
  if (!answer.ok) throw new Error((await answer.text()) || `the node answers ${answer.status}`);
  return answer;
}

export async function asked(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error((await answer.text()) || `the node answers ${answer.status}`);
  return answer.json();
}

// A part of all peers that the node knows: those that match, in order; and all that it knows of one.
export const askPeers = (wanted) => asked(`/api/peers?${new URLSearchParams(wanted)}`);
export const askPeer = (id) => asked(`/api/peers/${encodeURIComponent(id)}`);
