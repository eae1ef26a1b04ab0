// Small time charts of the last ten minutes, the times of each layer's rounds, and the
// contributions by day; drawn by uPlot.
import uPlot from "uplot";
import { bytes, count, digits, element, find, milliseconds, percent } from "./format";
import { SAMPLES_MAX, type Rates, type State } from "./state";

interface Line {
  name: string;
  of: (rates: Rates) => number | undefined;
}

interface Chart {
  title: string;
  lines: Line[];
  text: (value: number) => string;
  axis?: (value: number) => string; // where it differs
  max?: number;
  least: number; // top of the axis while all values are smaller, so that its labels differ
}

const CHARTS: Chart[] = [
  { title: "Tokens a second", lines: [{ name: "tokens", of: (r) => r.tokens }], text: digits, least: 1 },
  { title: "Rounds a second", lines: [{ name: "rounds", of: (r) => r.rounds }], text: count, least: 2 },
  { title: "Time of a round", lines: [{ name: "round", of: (r) => r.round_ms }], text: (v) => `${digits(v)} ms`, least: 0.1 },
  { title: "Bytes a second", lines: [{ name: "sent", of: (r) => r.sent }, { name: "received", of: (r) => r.received }], text: bytes, least: 1000 },
  { title: "Computed at the backbone", lines: [{ name: "local share", of: (r) => r.local }], text: percent, axis: (v) => `${Math.round(100 * v)} %`, max: 1, least: 1 },
  { title: "Hedges a second", lines: [{ name: "hedges", of: (r) => r.hedges }], text: digits, least: 1 },
];

const HEIGHT_PX = 120;

function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function axis(text: (value: number) => string, size: number): uPlot.Axis {
  return {
    stroke: colour("faint"),
    font: "11px system-ui, sans-serif",
    grid: { stroke: colour("grid"), width: 1 },
    ticks: { show: false },
    size,
    gap: 4,
    values: (_, values) => values.map((v) => (v === null ? "" : text(v))),
  };
}

// A scale that does not jump about near zero.
function range(least: number, max?: number): uPlot.Range.Function {
  return (_, __, high) => [0, max ?? Math.max(high ? high * 1.1 : 0, least)];
}

class TimeChart {
  private plot: uPlot | null = null;
  private readonly box = element("div", "", "plot");
  private readonly figure = element("p", "", "now");
  private readonly card = element("div", "", "chart");

  constructor(private readonly chart: Chart, parent: HTMLElement) {
    this.card.append(element("h3", chart.title), this.figure, this.box);
    parent.append(this.card);
  }

  update(state: State): void {
    const { chart } = this;
    const now = chart.lines.map((line) => (state.traffic ? line.of(state.traffic) : undefined));
    // The hub cannot count tokens of a model it has no file of.
    this.card.hidden = now.every((v) => v === undefined);
    if (this.card.hidden) return;
    this.figure.textContent = now.map((v, i) => (v === undefined ? "–" : chart.text(v)) + (now.length > 1 ? ` ${chart.lines[i]!.name}` : "")).join(" · ");
    const last = state.samples.at(-1)?.n ?? 0;
    const seconds = state.hello?.sample_s ?? 1;
    const xs = state.samples.map((s) => (s.n - last) * seconds);
    const data: uPlot.AlignedData = [xs, ...chart.lines.map((line) => state.samples.map((s) => line.of(s) ?? null))];
    if (this.plot) this.plot.setData(data);
    else this.make(data, (SAMPLES_MAX - 1) * seconds);
  }

  private make(data: uPlot.AlignedData, span_s: number): void {
    const width = this.box.clientWidth;
    if (width === 0) return;
    const strokes = [colour("line"), colour("line2")];
    this.plot = new uPlot(
      {
        width,
        height: HEIGHT_PX,
        legend: { show: false },
        cursor: { show: false },
        padding: [6, 16, 0, 0],
        scales: { x: { time: false, range: [-span_s, 0] }, y: { range: range(this.chart.least, this.chart.max) } },
        axes: [
          { ...axis((v) => (v === 0 ? "now" : `${Math.round(v / 60)} min`), 22), splits: () => [-480, -240, 0] },
          { ...axis(this.chart.axis ?? this.chart.text, 54), space: 28 },
        ],
        // Told apart by the dash too.
        series: [{}, ...this.chart.lines.map((_, i) => ({ stroke: strokes[i]!, width: 1.5, dash: i ? [5, 3] : [], points: { show: false } }))],
      },
      data,
      this.box,
    );
  }

  resize(): void {
    this.plot?.destroy();
    this.plot = null;
  }
}

export class Charts {
  private readonly charts: TimeChart[];
  private readonly layers: LayerChart;

  constructor() {
    const parent = find("charts");
    this.charts = CHARTS.map((chart) => new TimeChart(chart, parent));
    this.layers = new LayerChart(parent);
  }

  update(state: State): void {
    for (const chart of this.charts) chart.update(state);
    this.layers.update(state);
  }

  redraw(state: State): void {
    for (const chart of this.charts) chart.resize();
    this.layers.resize();
    this.update(state);
  }
}

class LayerChart {
  private plot: uPlot | null = null;
  private readonly card = element("div", "", "chart wide");
  private readonly box = element("div", "", "plot");
  private readonly figure = element("p", "", "now");

  constructor(parent: HTMLElement) {
    this.card.append(element("h3", "Time of a round, by layer"), this.figure, this.box);
    parent.append(this.card);
  }

  update(state: State): void {
    this.card.hidden = state.latency.length === 0;
    if (this.card.hidden) return;
    const slowest = state.latency.reduce((a, b) => (b[2] > a[2] ? b : a));
    this.figure.textContent = `slowest: layer ${slowest[0]}, ${milliseconds(slowest[2])} on average; 99 of 100 rounds below ${milliseconds(slowest[3])}`;
    const data: uPlot.AlignedData = [state.latency.map((l) => l[0]), state.latency.map((l) => l[3] / 1000), state.latency.map((l) => l[2] / 1000)];
    if (this.plot) {
      this.plot.setData(data);
      return;
    }
    const width = this.box.clientWidth;
    if (width === 0) return;
    const bars = uPlot.paths.bars!({ size: [0.7, 26] });
    this.plot = new uPlot(
      {
        width,
        height: HEIGHT_PX + 20,
        legend: { show: false },
        cursor: { show: false },
        padding: [6, 16, 0, 0],
        scales: { x: { time: false, range: (_, low, high) => [low - 0.6, high + 0.6] }, y: { range: range(0.1) } },
        axes: [{ ...axis(String, 22), incrs: [1, 2, 4, 8, 16, 32, 64] }, { ...axis((v) => `${digits(v)} ms`, 54), space: 28 }],
        series: [
          {},
          { fill: colour("soft"), stroke: colour("soft"), paths: bars, points: { show: false } },
          { fill: colour("line"), stroke: colour("line"), paths: bars, points: { show: false } },
        ],
      },
      data,
      this.box,
    );
  }

  resize(): void {
    this.plot?.destroy();
    this.plot = null;
  }
}

export class DayChart {
  private plot: uPlot | null = null;
  private shown = "";

  update(from: string, total: number[]): void {
    const key = from + String(total);
    if (key === this.shown && this.plot) return;
    const box = find("days");
    const width = box.clientWidth;
    if (width === 0) return;
    this.shown = key;
    this.plot?.destroy();
    const first = Date.parse(from) / 1000;
    const date = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", timeZone: "UTC" });
    this.plot = new uPlot(
      {
        width,
        height: 150,
        legend: { show: false },
        cursor: { show: false },
        padding: [6, 16, 0, 0],
        tzDate: (ts) => uPlot.tzDate(new Date(ts * 1000), "UTC"),
        scales: { x: { time: true, range: (_, low, high) => [low - 50000, high + 50000] }, y: { range: range(1) } },
        axes: [{ ...axis((v) => date.format(v * 1000), 22), space: 70 }, { ...axis(count, 54), space: 28 }],
        series: [{}, { fill: colour("line"), stroke: colour("line"), paths: uPlot.paths.bars!({ size: [0.7, 26] }), points: { show: false } }],
      },
      [total.map((_, i) => first + i * 86400), total.map((n) => n || null)],
      box,
    );
  }

  resize(): void {
    this.shown = "";
  }
}
