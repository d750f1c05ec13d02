// The page: draws what the feed says is new, once a frame at most, and asks before it orders anything.

import { BANDWIDTH, LOSS, REWARD, drawChart, joined, redrawCharts, startChart } from "./charts.js";
import { choose, drawMap, startMap } from "./map.js";
import { noticeOf } from "./notice.js";
import { drawBans, drawSummary, markPeer, openPeer, renewPeers, startPeers } from "./peers.js";
import { drawCertificates, drawHappenings, drawHealth, drawRounds } from "./rounds.js";
import { TokenWanted, follow, keepToken, order, state, takeToken } from "./store.js";
import { NONE, at, bytes, called, count, decimal, duration, find, make, percent, plural, put, rate, tell } from "./text.js";

const LOST_MS = 1500;

// -- tiles, the header, this node ---------------------------------------------------------------------------------

const PHASES = { joining: "joining", train: "training", training: "training", plan: "planning", reduce: "reducing", certify: "certifying", decided: "applying", following: "following", paused: "paused", "no quorum": "waiting for a majority", leaving: "leaving", done: "done" };

function drawNode() {
  const { node, summary } = state;
  put("swarm-name", `${node.name} · ${node.strategy} · ${node.workload}`);
  document.title = `${node.name || "Shoal"} · round ${node.round} · ${PHASES[node.phase] ?? node.phase}`;
  put("phase-text", PHASES[node.phase] ?? node.phase);
  find("phase").dataset.state = node.phase === "no quorum" ? "bad" : ["paused", "leaving"].includes(node.phase) ? "warn" : node.phase === "joining" ? "wait" : "ok";
  put("t-round", count(node.round));
  const digest = node.digest ? `state ${node.digest.slice(0, 8)}…` : node.certifies ? "no state yet" : "by this node's count";
  put("t-round-more", node.term === "0.0" ? digest : `term ${node.term} · ${digest}`);
  const rollouts = node.rollouts;
  const heldOut = node.loss != null && node.metric !== "training loss";
  put("t-loss-name", rollouts ? "Reward" : heldOut ? "Held-out loss" : "Training loss");
  find("loss-card").hidden = Boolean(rollouts);
  find("certificates-card").hidden = !node.certifies;
  for (const key of document.querySelectorAll("[data-phase]")) key.hidden = !node.certifies && (Boolean(rollouts) || key.dataset.phase !== "reduce");
  put("t-loss", rollouts ? (rollouts.reward == null ? NONE : rollouts.reward.toFixed(3)) : decimal(node.loss ?? node.train_loss));
  const unit = (heldOut ? node.metric : node.train_metric) || "";
  const named = ["training loss", "held-out loss"].includes(unit) ? "" : unit;
  put("t-loss-more", rollouts ? "mean of own answers" : heldOut ? named : node.train_loss == null ? "not measured yet" : [named, "of this node"].filter(Boolean).join(" · "));
  const gone = summary.states?.gone;
  put("t-nodes", count(summary.alive ?? 0));
  put("t-nodes-more", [plural(node.members, "member"), gone && `${count(gone)} gone`, summary.following && `${count(summary.following)} not`].filter(Boolean).join(" · "));
  put("t-speed-name", rollouts ? "Generated" : "Speed");
  const speed = rollouts ? [count(rollouts.generated_tokens), " tokens"] : [summary.tokens_per_s ? count(Math.round(summary.tokens_per_s)) : NONE, " tokens/s"];
  find("t-speed").replaceChildren(speed[0], make("small", {}, speed[1]));
  put("t-speed-more", rollouts ? "by this node" : node.tokens_per_s == null ? "this node not measured yet" : `this node ${count(Math.round(node.tokens_per_s))}`);
  put("t-traffic", rate((node.upload || 0) + (node.download || 0)));
  put("t-traffic-more", `↑ ${rate(node.upload)} · ↓ ${rate(node.download)}`);
  put("me", called(node.peer));
  find("me").title = node.peer;
  const drawn = Object.keys(state.peers).length;
  put("map-sum", `${plural(summary.known ?? drawn, "node")} known${drawn < summary.known ? `, ${count(drawn)} of them drawn` : ""}`);
  put("loss-unit", [node.metric, node.metric && node.train_metric !== node.metric && "training in a unit of its own"].filter(Boolean).join(" · "));
  put("software", node.software);
  const facts = [
    ["Up for", duration(node.uptime_s)], ["Memory, daemon", bytes(node.memory_bytes)], ["Processor, daemon", `${(node.cpu || 0).toFixed(2)} cores`],
    ["Device", node.device], ["Waiting", percent(node.blocked_fraction, 1)], ["Bytes sent", bytes(node.sent)],
    ["Upload cap", node.max_upload ? rate(node.max_upload) : "none"], ["Download cap", node.max_download ? rate(node.max_download) : "none"],
  ];
  if (node.gave_rounds) facts.push(["It gave", `${count(node.gave_tokens)} tokens in ${plural(node.gave_rounds, "round")} since ${new Date(1000 * node.gave_since).toLocaleDateString()}`, "whole"]);
  find("facts").replaceChildren(...facts.flatMap(([name, value, kind]) => [make("dt", {}, name), make("dd", { title: value, class: kind }, value)]));
  put("pause", node.paused ? "Resume" : "Pause");
  const over = !connected || ["leaving", "done"].includes(node.phase);
  find("pause").disabled = find("leave").disabled = over;
}

function drawNotice() {
  if (!connected) return;
  const notice = noticeOf(state.node);
  const banner = find("banner");
  banner.hidden = notice === null;
  if (notice === null) return;
  banner.classList.toggle("soft", notice.soft);
  tell(banner, notice.first, notice.rest);
}

// -- what is drawn when --------------------------------------------------------------------------------------------

const DRAWN = [
  [["node", "summary", "peers"], drawNode],
  [["node"], drawNotice],
  [["node"], () => drawBans(state.node.bans ?? [], state.node.peer)],
  [["peers"], () => drawMap(state.peers, state.node.peer)],
  [["summary"], () => drawSummary(state.summary)],
  [["summary", "peers"], renewPeers],
  [["health"], () => drawHealth(state.health)],
  [["rounds"], () => drawRounds(state.rounds)],
  [["certificates"], () => drawCertificates(state.certificates)],
  [["happenings"], () => drawHappenings(state.happenings)],
  [["curves", "points"], () => drawChart("loss", joined(state.curves.held_out, state.curves.train))],
  [["curves", "points", "node"], () => state.node.rollouts && drawChart("reward", joined(state.curves.reward, state.curves.others_reward))],
  [["bandwidth"], () => drawChart("bandwidth", [0, 1, 2].map((place) => state.bandwidth.map((point) => point[place])))],
  [["groups", "node", "sources"], () => state.node.rollouts && import("./rollouts.js").then((part) => part.drawRollouts(state))],
  [["samples"], () => (state.samples.length || !find("samples-card").hidden) && import("./samples.js").then((part) => part.drawSamples(state.samples))],
];

let news = new Set();
let asked = false;

function changed(parts) {
  for (const part of parts) news.add(part);
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    const parts = news;
    news = new Set();
    if (state.node === null) return;
    for (const [when, drawPart] of DRAWN) if (parts.has("all") || when.some((part) => parts.has(part))) drawPart();
    document.body.dataset.seq = state.seq;
  });
}

// -- word from the node --------------------------------------------------------------------------------------------

let connected = false;
let since = Date.now() / 1000;
let lostTimer = 0;

function heard(word) {
  if (word) {
    since = Date.now() / 1000;
    clearTimeout(lostTimer);
    lostTimer = 0;
    if (connected) return;
    connected = true;
    find("main").classList.remove("stale");
    if (state.node === null) find("banner").hidden = true;
    else drawNotice();
    return;
  }
  if (lostTimer) return;
  lostTimer = setTimeout(() => {
    connected = false;
    const banner = find("banner");
    const left = state.node && ["leaving", "done"].includes(state.node.phase);
    banner.classList.toggle("soft", Boolean(left));
    if (left) tell(banner, "This node has left the swarm and stopped.", "What is below is how it was.");
    else tell(banner, `No word from the node since ${at(since)}.`, "What is below is from then. If it stopped, start it again: `shoal run` with the same `--data-dir`. The page takes it up by itself.");
    banner.hidden = false;
    find("main").classList.add("stale");
    find("phase").dataset.state = "bad";
    put("phase-text", left ? "stopped" : "no word");
    find("pause").disabled = find("leave").disabled = true;
  }, LOST_MS);
}

// -- orders --------------------------------------------------------------------------------------------------------

function confirmed(title, text, yes, dangerous) {
  put("ask-title", title);
  put("ask-text", text);
  put("ask-yes", yes);
  find("ask-yes").classList.toggle("danger", dangerous);
  const dialog = find("ask");
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

find("key-cancel").addEventListener("click", () => find("key").close("no"));

function askForToken() {
  const dialog = find("key");
  find("token").value = "";
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes" && find("token").value.trim()), { once: true }));
}

// What an order comes to; the token is asked for where it is wanted.
async function withToken(give) {
  for (;;) {
    try {
      return await give();
    } catch (error) {
      if (!(error instanceof TokenWanted)) throw error;
      const token = await askForToken();
      if (!token) throw error;
      keepToken(token);
    }
  }
}

async function carryOut(op) {
  try {
    await withToken(() => order(op));
  } catch (error) {
    if (!(error instanceof TokenWanted)) await confirmed("That did not work", error.message, "Close", false);
  }
}

find("pause").addEventListener("click", async () => {
  if (state.node.paused) return carryOut("resume");
  if (await confirmed("Pause this node?", "It stops training after the step under way and stays a member. The others go on without its weight.", "Pause", false)) await carryOut("pause");
});
find("leave").addEventListener("click", async () => {
  if (await confirmed("Leave the swarm?", "This node says goodbye and stops, and this page with it. What it trained in the round under way may not count. Start it again with shoal run.", "Leave", true)) await carryOut("leave");
});

find("setup").addEventListener("toggle", async () => find("setup").open && (await import("./settings.js")).openSettings(withToken));
const unfold = () => location.hash === "#setup-card" && (find("setup").open = true);
addEventListener("hashchange", unfold);
unfold();

// -- light and dark ------------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
find("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("shoal-theme", root.dataset.theme);
  } catch {
    // It lasts as long as the page, then.
  }
  redrawCharts();
});
dark.addEventListener("change", redrawCharts);

// -- start ---------------------------------------------------------------------------------------------------------

takeToken();
addEventListener("hashchange", takeToken);
startMap((id) => markPeer(id), openPeer);
startPeers((id) => choose(id));
startChart("loss", LOSS);
startChart("reward", REWARD);
startChart("bandwidth", BANDWIDTH);
setInterval(() => connected && state.rounds.at(-1)?.ended == null && changed(["rounds"]), 1000);
follow(changed, heard);
