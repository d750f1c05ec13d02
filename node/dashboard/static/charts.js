// Curves, drawn by uPlot. Colours are the page's own, so a chart is made anew when the theme changes.

import { NONE, at, decimal, find, rate } from "./text.js";

const charts = new Map();

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The newest value of a line: what the legend says while nobody points at a place.
const newest = (self, line) => self.data[line].findLast((value) => value != null);

export function startChart(id, options) {
  charts.set(id, { id, options, plot: null, data: null });
  new ResizeObserver(() => fit(id)).observe(find(id));
}

const height = () => (innerWidth < 640 ? 200 : 240);

function fit(id) {
  const chart = charts.get(id);
  const width = find(id).clientWidth;
  if (chart.plot && width > 0) chart.plot.setSize({ width, height: height() });
}

export function drawChart(id, data) {
  const chart = charts.get(id);
  const some = data[0].length > 0;
  find(`${id}-empty`).hidden = some;
  find(id).hidden = !some;
  if (!some) return;
  chart.data = data;
  if (chart.plot) chart.plot.setData(data);
  else chart.plot = plot(chart);
}

export function redrawCharts() {
  for (const chart of charts.values()) {
    if (!chart.plot) continue;
    chart.plot.destroy();
    chart.plot = plot(chart);
  }
}

function plot({ id, options, data }) {
  const [line, muted] = [colour("--line"), colour("--muted")];
  const axis = { stroke: muted, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 5 }, font: "12px system-ui" };
  const value = options.value;
  const size = (self, values) => 14 + 7 * Math.max(0, ...(values || []).map((text) => String(text).length));
  return new uPlot(
    {
      width: find(id).clientWidth,
      height: height(),
      scales: { x: { time: options.time }, y: { range: options.range } },
      cursor: { points: { size: 7 }, drag: { x: true, y: false } },
      axes: [
        { ...axis, values: (self, ticks) => ticks.map((tick) => (options.time ? at(tick) : Number.isInteger(tick) ? String(tick) : "")), size: 32, space: options.time ? 90 : 50 },
        { ...axis, values: (self, ticks) => ticks.map(options.tick ?? value), size },
      ],
      series: [
        { label: options.time ? "Time" : "Round", value: (self, x) => (options.time ? at(x ?? newest(self, 0)) : String(Math.round(x ?? newest(self, 0)))) },
        ...options.series.map((series) => ({
          label: series.label,
          stroke: colour(series.colour),
          width: series.width ?? 2,
          fill: series.fill ? `${colour(series.colour)}22` : undefined,
          points: { show: (self) => self.data[0].length < 24, size: 5, fill: colour(series.colour) },
          spanGaps: true,
          value: (self, y, line, place) => ((y = place == null ? newest(self, line) : y) == null ? NONE : value(y)),
        })),
      ],
    },
    data,
    find(id),
  );
}

// Curves with places of their own, as one table.
export function joined(...curves) {
  const known = curves.map((curve) => curve || []);
  if (known.every((curve) => curve.length === 0)) return [[], ...known.map(() => [])];
  return uPlot.join(known.map((curve) => [curve.map((point) => point[0]), curve.map((point) => point[1])]));
}

export const LOSS = {
  time: false, value: decimal, tick: (value) => Number(value.toPrecision(4)).toString(),
  series: [{ label: "held out", colour: "--accent", width: 2.5 }, { label: "this node, training", colour: "--plan", width: 1.3 }],
};
export const REWARD = {
  time: false, value: (value) => value.toFixed(3), tick: (value) => value.toFixed(1), range: [0, 1],
  series: [{ label: "own", colour: "--accent", width: 2.5 }, { label: "of others, judged here", colour: "--certify", width: 1.6 }],
};
export const BANDWIDTH = {
  time: true, value: rate, range: (self, low, high) => [0, Math.max(1000, high * 1.1)],
  series: [{ label: "up", colour: "--reduce", fill: true }, { label: "down", colour: "--train", fill: true }],
};
