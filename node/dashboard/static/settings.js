// What the node runs with, and the line that another machine joins with, with its code for a camera.

import { asked, order } from "./store.js";
import { draw, find, make, readable } from "./text.js";

const SECRET = "Whoever has this line may join. It stands here because you asked for it.";
let pass = null;

function noteOf(joining) {
  if (joining.admission === "allowlist") return "It lets in nobody by itself: the swarm’s manifest names who may join.";
  if (!joining.admits) return "It lets in nobody by itself: the swarm admits by invite. shoal invite makes one, where the authority’s key is.";
  if (joining.secret) return SECRET;
  if (joining.workload === "own-loop") return "Nodes here train loops of their own: join(model, optimizer, 'shoal:…') takes the part between the quotes.";
  if (joining.workload.includes(":")) return `Whoever joins has to have the code of ${joining.workload}, and runs it.`;
  return "Type it on another machine, or take it there with a camera.";
}

function codeOf({ size, path }) {
  const code = draw("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": "The line as a QR code", class: "qr", "shape-rendering": "crispEdges" });
  code.append(draw("path", { d: `M0 0h${size}v${size}h-${size}z`, fill: "#fff" }), draw("path", { d: path }));
  return code;
}

function drawJoining(joining) {
  const place = find("joining");
  if (joining.line === null) {
    const show = make("button", { type: "button", id: "show-secret" }, "Show the line");
    show.addEventListener("click", reveal);
    place.replaceChildren(make("p", {}, "This swarm’s line holds an invite for whoever has it. Keep it from other eyes."), make("p", {}, show));
    return;
  }
  const copy = make("button", { type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(joining.line).catch(() => getSelection().selectAllChildren(find("join-line")));
    copy.textContent = "Copied";
  });
  place.replaceChildren(...(joining.qr ? [codeOf(joining.qr)] : []), make("div", {}, make("code", { id: "join-line" }, readable(joining.line)), make("p", { class: "muted" }, noteOf(joining)), copy));
}

async function reveal() {
  try {
    drawJoining(await (await pass(() => order("joining"))).json());
  } catch (error) {
    find("joining").append(make("p", {}, error.message));
  }
}

const table = (title, rows, mark) => make("div", {}, make("h3", {}, title), make("dl", { class: "facts notable" }, ...rows.flatMap((row) => [make("dt", {}, readable(row.name)), make("dd", row.changed ? { class: "changed", title: mark } : {}, readable(row.value) || "yes")])));

// Ask the node anew. withToken: carries an order out, asking for the token where it is wanted.
export async function openSettings(withToken) {
  pass = withToken;
  try {
    const [joining, settings] = await Promise.all([asked("/api/joining"), asked("/api/settings")]);
    drawJoining(joining);
    find("settings").replaceChildren(table("This node: options of shoal run", settings.node, "not the default"), table("The swarm: keys of swarm.toml", settings.swarm, "amended since the swarm began"));
  } catch (error) {
    find("settings").replaceChildren(make("p", { class: "empty" }, error.message));
  }
}
