// The coverage map: a row a layer, a cell an expert. A cell fills from its foot as replicas
// reach the target, so that it can be read without its colour; an empty one is struck through.
import { find } from "./format";
import type { Run, State } from "./state";

const GAP_PX = 1;
const CELL_MIN_PX = 4; // narrower cells cannot be pointed at: a layer then takes several rows
const CELL_MAX_PX = 26;
const HEIGHT_MIN_PX = 9;
const HEIGHT_MAX_PX = 22;
const WRAPPED_HEIGHT_PX = 7;
const GUTTER_PX = 30;
const LAYER_GAP_PX = 2;

interface Layout {
  columns: number; // cells a row
  rows: number; // rows a layer
  width: number; // of a cell with its gap
  height: number;
  pitch: number; // of a layer
}

export const LEVELS = ["full", "part", "scarce", "none"] as const;
export type Level = (typeof LEVELS)[number];

export function levelOf(run: Run): Level {
  if (run.held === 0 && run.target > 0) return "none";
  if (run.held >= run.target) return "full";
  return run.held * 2 >= run.target ? "part" : "scarce";
}

// Of a cell `height` high, the part that replicas fill.
function filled(run: Run, height: number): number {
  return Math.min(1, run.held / Math.max(1, run.target)) * height;
}

export class HeatMap {
  private readonly canvas = find<HTMLCanvasElement>("cells");
  private readonly cursor = find("cursor");
  private readonly readout = find("readout");
  private readonly context = this.canvas.getContext("2d", { alpha: false })!;
  private readonly gaps = document.createElement("canvas");
  private layout: Layout = { columns: 1, rows: 1, width: 1, height: 1, pitch: 1 };
  private at: { layer: number; expert: number } | null = null;
  private colours: Record<string, string> = {};
  private scale = 1;
  private shape = "";

  constructor(private readonly state: State) {
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("focus", () => this.select(this.at ?? this.first()));
    new ResizeObserver(() => this.redraw()).observe(find("map"));
  }

  // Draws the layers that changed; all of them when the shape or the width did.
  update(): void {
    const began = performance.now();
    if (String(this.state.hello?.n_expert) !== this.shape) {
      this.at = null;
      this.cursor.hidden = true;
      this.readout.textContent = "";
      this.redraw();
    } else {
      for (const layer of this.state.changedLayers) this.drawLayer(layer);
    }
    this.state.changedLayers.clear();
    this.describe();
    performance.measure("kvasir:map", { start: began });
  }

  redraw(): void {
    const counts = this.state.hello?.n_expert ?? [];
    this.shape = String(counts);
    const most = Math.max(1, ...counts);
    const width = find("map").clientWidth;
    if (width === 0 || counts.length === 0) return;
    const room = width - GUTTER_PX;
    let rows = 1;
    while (rows < most && Math.floor(room / Math.ceil(most / rows)) < CELL_MIN_PX) ++rows;
    const columns = Math.ceil(most / rows);
    const cell = Math.max(1, Math.min(CELL_MAX_PX, Math.floor(room / columns)));
    const height = rows > 1 ? WRAPPED_HEIGHT_PX : Math.max(HEIGHT_MIN_PX, Math.min(HEIGHT_MAX_PX, cell));
    this.layout = { columns, rows, width: cell, height, pitch: rows * height + (rows > 1 ? 3 : 1) * LAYER_GAP_PX };
    this.scale = window.devicePixelRatio || 1;
    const total = { width: GUTTER_PX + columns * cell, height: counts.length * this.layout.pitch };
    this.canvas.width = Math.round(total.width * this.scale);
    this.canvas.height = Math.round(total.height * this.scale);
    this.canvas.style.width = `${total.width}px`;
    this.canvas.style.height = `${total.height}px`;
    // Where a cell is, for those who look at the picture from outside.
    Object.assign(this.canvas.dataset, { columns, cell, height, pitch: this.layout.pitch, gutter: GUTTER_PX });
    const style = getComputedStyle(document.documentElement);
    for (const name of ["panel", "full", "part", "scarce", "none", "promised", "track", "faint"])
      this.colours[name] = style.getPropertyValue(`--${name}`).trim();
    this.context.fillStyle = this.colours.panel!;
    this.context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    this.makeGaps();
    for (let layer = 0; layer < counts.length; ++layer) this.drawLayer(layer);
    this.place();
  }

  // One row's gaps as a picture: drawing it costs a call a row instead of one a cell.
  private makeGaps(): void {
    const { layout, scale } = this;
    this.gaps.width = Math.round(layout.columns * layout.width * scale);
    this.gaps.height = Math.round(layout.height * scale);
    const c = this.gaps.getContext("2d")!;
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.fillStyle = this.colours.panel!;
    for (let i = 1; i <= layout.columns; ++i) c.fillRect(i * layout.width - GAP_PX, 0, GAP_PX, layout.height);
  }

  private drawLayer(layer: number): void {
    const { context: c, layout, scale } = this;
    const n = this.state.hello?.n_expert[layer];
    if (n === undefined) return;
    const top = layer * layout.pitch;
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.fillStyle = this.colours.panel!;
    c.fillRect(0, top, this.canvas.width / scale, layout.pitch);
    // With thin rows only every fourth number has room.
    const every = layout.pitch >= 13 ? 1 : 4;
    if (layer % every === 0) {
      c.fillStyle = this.colours.faint!;
      c.font = "10px system-ui, sans-serif";
      c.textAlign = "right";
      c.textBaseline = "middle";
      c.fillText(String(layer), GUTTER_PX - 6, top + Math.max(layout.height, 9) / 2 + 0.5);
    }
    const inner = layout.height - GAP_PX;
    c.fillStyle = this.colours.track!;
    for (let row = 0; row < layout.rows; ++row)
      c.fillRect(GUTTER_PX, top + row * layout.height, Math.min(layout.columns, n - row * layout.columns) * layout.width, inner);
    // Colour by colour: changing it costs more than a rectangle.
    const runs = this.state.runs[layer] ?? [];
    for (const level of LEVELS) {
      c.fillStyle = this.colours[level]!;
      for (const run of runs) {
        if (levelOf(run) !== level) continue;
        if (level === "none") this.bar(run, top, inner / 2 - 1, 2);  // through the middle
        else this.bar(run, top, inner - filled(run, inner), filled(run, inner));
      }
    }
    c.fillStyle = this.colours.promised!;
    for (const run of runs) {
      if (run.reserved === 0) continue;
      const held = filled(run, inner), promised = Math.min(inner - held, (run.reserved / Math.max(1, run.target)) * inner);
      if (promised > 0) this.bar(run, top, inner - held - promised, promised);
    }
    // The gaps between cells, at once for all runs of a row.
    for (let row = 0; row < layout.rows; ++row)
      c.drawImage(this.gaps, GUTTER_PX, top + row * layout.height, layout.columns * layout.width, layout.height);
  }

  // The same stripe of each cell of a run: one rectangle a row.
  private bar(run: Run, top: number, from: number, height: number): void {
    const { context: c, layout } = this;
    for (let expert = run.begin; expert < run.end; ) {
      const row = Math.floor(expert / layout.columns);
      const end = Math.min(run.end, (row + 1) * layout.columns);
      c.fillRect(GUTTER_PX + (expert % layout.columns) * layout.width, top + row * layout.height + from, (end - expert) * layout.width, height);
      expert = end;
    }
  }

  // --- pointing ---------------------------------------------------------------------------

  private first(): { layer: number; expert: number } | null {
    const layer = (this.state.hello?.n_expert ?? []).findIndex((n) => n > 0);
    return layer < 0 ? null : { layer, expert: 0 };
  }

  private point(event: PointerEvent): void {
    const { layout } = this;
    const layer = Math.floor(event.offsetY / layout.pitch);
    const row = Math.min(layout.rows - 1, Math.floor((event.offsetY - layer * layout.pitch) / layout.height));
    const column = Math.floor((event.offsetX - GUTTER_PX) / layout.width);
    const expert = row * layout.columns + column;
    if (column < 0 || column >= layout.columns || expert >= (this.state.hello?.n_expert[layer] ?? 0)) return;
    this.select({ layer, expert });
  }

  private key(event: KeyboardEvent): void {
    const counts = this.state.hello?.n_expert ?? [];
    const at = this.at ?? this.first();
    if (!at) return;
    let { layer, expert } = at;
    const last = (l: number) => (counts[l] ?? 1) - 1;
    // Up and down stay in the layer while it has more rows.
    const step = (by: number) => {
      const moved = expert + by * this.layout.columns;
      if (this.layout.rows > 1 && moved >= 0 && moved <= last(layer)) expert = moved;
      else layer += by;
    };
    if (event.key === "ArrowRight") ++expert;
    else if (event.key === "ArrowLeft") --expert;
    else if (event.key === "ArrowDown") step(1);
    else if (event.key === "ArrowUp") step(-1);
    else if (event.key === "PageDown") layer += 8;
    else if (event.key === "PageUp") layer -= 8;
    else if (event.key === "Home") expert = 0;
    else if (event.key === "End") expert = last(layer);
    else return;
    event.preventDefault();
    layer = Math.max(0, Math.min(counts.length - 1, layer));
    expert = Math.max(0, Math.min(last(layer), expert));
    this.select({ layer, expert });
    this.cursor.scrollIntoView({ block: "nearest" });
  }

  private select(at: { layer: number; expert: number } | null): void {
    this.at = at;
    this.place();
    this.describe();
  }

  private place(): void {
    if (!this.at) return;
    const { layout } = this;
    this.cursor.hidden = false;
    this.cursor.style.left = `${GUTTER_PX + (this.at.expert % layout.columns) * layout.width - 2}px`;
    this.cursor.style.top = `${this.at.layer * layout.pitch + Math.floor(this.at.expert / layout.columns) * layout.height - 2}px`;
    this.cursor.style.width = `${layout.width - GAP_PX + 4}px`;
    this.cursor.style.height = `${layout.height - GAP_PX + 4}px`;
  }

  private describe(): void {
    const sum = this.state.coverage();
    const label = `Coverage of ${this.state.hello?.model ?? ""}: ${sum.full} of ${sum.experts} experts have their replicas, nobody holds ${sum.none}.`;
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
    if (!this.at) return;
    const { layer, expert } = this.at;
    const run = this.state.runAt(layer, expert);
    if (!run) return;
    const names = this.state.holders(layer, expert).map((w) => (w.state === "serving" ? w.id : `${w.id} (${w.state})`));
    const who = names.length === 0 ? "nobody holds it" : `held by ${names.slice(0, 6).join(", ")}${names.length > 6 ? ` and ${names.length - 6} more` : ""}`;
    const promised = run.reserved ? `, ${run.reserved} promised` : "";
    const text = `Layer ${layer}, expert ${expert}: ${run.held} of ${run.target} replicas${promised}, scarcity ${run.scarcity}; ${who}.`;
    if (this.readout.textContent !== text) this.readout.textContent = text;
  }
}
