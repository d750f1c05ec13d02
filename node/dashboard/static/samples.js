// What the model says: the first sample beside the newest. A model wrote it: it is text and nothing else.

import { find, make, readable } from "./text.js";

const saying = (prompt, sample) => make("figure", {}, make("figcaption", { class: "muted" }, `after round ${sample.round}`), make("pre", {}, make("b", {}, readable(prompt)), readable(sample.texts[prompt] ?? "")));

export function drawSamples(samples) {
  const card = find("samples-card");
  card.hidden = samples.length === 0;
  if (card.hidden) return;
  const shown = samples.length > 1 && samples[0].round === samples.at(-1).round ? samples.slice(-1) : samples;
  const says = Object.keys(shown.at(-1).texts).map((prompt) => make("div", { class: "says" }, ...shown.map((sample) => saying(prompt, sample))));
  card.replaceChildren(make("div", { class: "head" }, make("h2", { id: "h-samples" }, "What the model says"), make("p", { class: "muted" }, "in bold what it was given; drawn from the certified state")), ...says);
}
