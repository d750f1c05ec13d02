// Numbers, times and names as people read them, and small pieces of the page. Text is only ever set as text.

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

export const NONE = "–";
export const short = (peer) => (peer ? `…${peer.slice(-6)}` : NONE);
export const count = (value) => (Math.abs(value) < 10000 ? plain.format(value) : compact.format(value));
export const at = (seconds) => clock.format(new Date(seconds * 1000));
export const percent = (value, digits = 0) => (value == null ? NONE : `${(100 * value).toFixed(digits)}%`);
export const plural = (number, one, many = `${one}s`) => `${plain.format(number)} ${number === 1 ? one : many}`;

// Names by PeerId, as the node gives them: no two peers have the same. Who is gone for long keeps the one it had.
const names = new Map();

export function nameThem(peers) {
  for (const [id, fields] of Object.entries(peers)) if (fields?.name) names.set(id, fields.name);
}

export const called = (peer) => names.get(peer) ?? short(peer);

// PeerIds that stand alone, by name; those in addresses stay.
export const byName = (text) => text.replace(/(?<![/\w])12D3Koo\w{45}(?!\w)/g, called);

// Text of others' models with what cannot be seen made visible, line breaks and tabs apart.
export const readable = (text) => text.replace(/(?![\n\t])[\p{C}\p{Zl}\p{Zp}]/gu, "\ufffd");

// The four digits that matter.
export function decimal(value) {
  if (value == null) return NONE;
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(2);
  return Math.abs(value) >= 1000 ? plain.format(value) : value.toPrecision(4);
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit++) value /= 1000;
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export const rate = (value) => `${bytes(value || 0)}/s`;

export function duration(seconds) {
  if (seconds == null || seconds < 0) return NONE;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export const find = (id) => document.getElementById(id);

export function put(id, text) {
  const element = typeof id === "string" ? find(id) : id;
  if (element.textContent !== text) element.textContent = text;
}

export function make(tag, fields = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (value == null) continue;
    if (name === "class") element.className = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Text of which what is between backquotes is typed, and peers are called by name elsewhere.
export const pieces = (text) => text.split("`").map((piece, index) => (index % 2 ? make("code", {}, piece) : byName(piece)));

export const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

// A sentence that stands out and more beside it.
export function tell(element, first, rest = "") {
  const said = byName(`${first}\n${rest}`);
  if (element.dataset.said === said) return;
  element.dataset.said = said;
  element.replaceChildren(make("strong", {}, ...pieces(first)), ...(rest ? [" ", ...pieces(rest)] : []));
}

export function draw(tag, fields = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(fields)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Of states and ways, how people call them; a state is its own word.
export const REACHED = {
  self: "this node", direct: "directly", detour: "through others", suspect: "no answer", unlinked: "not yet", gone: "not any more",
};
