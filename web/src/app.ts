// The page: follows one model's feed and shows it.
import { Charts, DayChart } from "./charts";
import { Feed, ask, keepToken, token, type Link } from "./feed";
import { bytes, count, element, find, percent, showEmpty } from "./format";
import { HeatMap } from "./heatmap";
import { State } from "./state";
import { WorkerTable } from "./workers";

const CONTRIBUTIONS_MS = 60000, FIRST_CONTRIBUTIONS_MS = 10000;
const THEME_KEY = "kvasir-theme";
const THEMES = ["system", "light", "dark"] as const;

const state = new State();
const map = new HeatMap(state);
const table = new WorkerTable(state);
const charts = new Charts();
const days = new DayChart();
const picker = find<HTMLSelectElement>("model");
let contributions: { from: string; total: number[]; contributors: number; workers: { id: string; pairs: number; bytes: number }[] } | null = null;

// --- what is shown --------------------------------------------------------------------------

function showFigures(): void {
  const sum = state.coverage();
  const away = state.workers.filter((w) => ["lost", "silent", "late"].includes(w.state)).length;
  const figures: [string, string, string][] = [
    ["Experts at their target", sum.experts ? percent(sum.full / sum.experts) : "–", sum.experts ? `${count(sum.full)} of ${count(sum.experts)}` : ""],
    ["Held by nobody", count(sum.none), sum.none ? "left to the backbone" : ""],
    ["Replicas missing", count(sum.missing), ""],
    ["Workers", count(state.workersTotal), away ? `${away} not answering` : ""],
    ["Backbones", count(state.traffic?.backbones ?? 0), ""],
  ];
  find("figures").replaceChildren(
    ...figures.map(([name, value, note]) => {
      const box = element("div");
      box.append(element("dt", name), element("dd", value));
      if (note) box.append(element("dd", note, "fine"));
      return box;
    }),
  );
}

function showLegend(): void {
  const entries = [
    ["full", "at target"],
    ["part", "half or more"],
    ["scarce", "less than half"],
    ["none", "held by nobody"],
    ["promised", "promised"],
  ];
  find("legend").replaceChildren(
    ...entries.map(([kind, text]) => {
      const item = element("li");
      item.append(element("i", "", `swatch ${kind}`), text!);
      return item;
    }),
  );
}

function showModels(): void {
  const hello = state.hello!;
  const names = hello.models.map((m) => m.name);
  if (hello.model && !names.includes(hello.model)) names.push(hello.model);
  if (String([...picker.options].map((o) => o.value)) !== String(names)) {
    picker.replaceChildren(
      ...names.map((name) => {
        const option = element("option", name);
        option.value = name;
        return option;
      }),
    );
  }
  picker.value = hello.model;
  picker.disabled = names.length < 2;
  picker.parentElement!.hidden = names.length === 0;
  find("version").textContent = `kvasir-hub ${hello.version}`;
  document.title = hello.model ? `${hello.model} · Kvasir hub` : "Kvasir hub";
}

function showMap(): void {
  const { known, models, model } = state.hello!;
  find("map").hidden = find("map-help").hidden = find("readout").hidden = find("legend").hidden = !known;
  find("coverage-empty").hidden = known;
  if (known) {
    map.update();
  } else if (models.length === 0) {
    showEmpty("coverage-empty", "This hub has no model. Put a GGUF file into its folder of models; it is found within seconds:", "cp MODEL.gguf /var/lib/kvasir-hub/models/");
  } else {
    showEmpty("coverage-empty", `There is no model '${model}' here any more; pick another one above.`);
  }
}

function showTraffic(): void {
  const backbones = state.traffic?.backbones ?? 0;
  const seen = backbones > 0 || state.samples.some((s) => s.rounds > 0);
  const charted = find("charts");
  find("traffic-empty").hidden = seen;
  if (!seen) {
    charted.hidden = true;
    find("traffic-note").textContent = "";
    showEmpty("traffic-empty", "No backbone has reported yet. To chat with the model over these workers:", `kvasir run ${state.hello?.model || "MODEL"}.gguf --hub ${location.origin} --token-file TOKEN`);
    return;
  }
  const appears = charted.hidden;
  charted.hidden = false;
  find("traffic-note").textContent = `${backbones} ${backbones === 1 ? "backbone reports" : "backbones report"}; the last ten minutes`;
  if (appears) charts.redraw(state);
  else charts.update(state);
}

function showContributions(): void {
  if (!contributions) return;
  const any = contributions.workers.length > 0;
  find("contributions-body").hidden = !any;
  find("contributions-empty").hidden = any;
  if (!any) {
    showEmpty("contributions-empty", "Nothing has been served in the last 30 days. It appears here once a backbone uses the workers.");
    return;
  }
  find("contributions-note").textContent = "uses of an expert by a token, the last 30 days (UTC)";
  days.update(contributions.from, contributions.total);
  const most = Math.max(1, ...contributions.workers.map((w) => w.pairs));
  find("ranks").replaceChildren(
    ...contributions.workers.slice(0, 10).map((worker) => {
      const item = element("li");
      const bar = element("meter");
      bar.max = most;
      bar.value = worker.pairs;
      item.append(element("span", worker.id, "name"), bar, element("span", `${count(worker.pairs)} · ${bytes(worker.bytes)}`, "figure"));
      bar.setAttribute("aria-label", `${worker.id}: ${count(worker.pairs)}`);
      return item;
    }),
  );
}

async function readContributions(): Promise<void> {
  if (document.hidden || find("board").hidden) return;
  try {
    const response = await ask("/api/view/contributions");
    if (!response.ok) return;
    contributions = await response.json();
    showContributions();
  } catch {
    // The state of the line is shown by the feed.
  }
}

// --- the line -------------------------------------------------------------------------------

function showLink(link: Link): void {
  const live = find("live");
  live.dataset.state = link.state;
  live.textContent = link.state === "waiting" ? `${link.why}; trying again` : link.state === "token" ? "token needed" : link.state;
  if (link.state === "token") {
    find("ask").hidden = false;
    find("board").hidden = true;
    find("ask-error").textContent = link.why;
    find("token").focus();
  } else if (link.state === "live" && !find("ask").hidden) {
    find("ask").hidden = true;
  }
  find("forget").hidden = !token();
}

let due = 0;
const changed = new Set<string>();

// One paint takes whatever has come since the last one.
function show(): void {
  due = 0;
  if (!state.hello) return;
  const board = find("board");
  const appears = board.hidden;
  board.hidden = false;
  if (changed.has("hello")) showModels();
  if (changed.has("hello") || changed.has("coverage") || changed.has("workers")) showMap();
  if (changed.has("hello") || changed.has("workers")) table.update();
  if (["hello", "traffic", "samples", "latency"].some((name) => changed.has(name))) showTraffic();
  showFigures();
  changed.clear();
  if (appears) void readContributions();
}

const feed = new Feed({
  events(batch) {
    for (const [name, data] of batch) {
      state.apply(name, data);
      changed.add(name);
    }
    if (!due) due = requestAnimationFrame(show);
  },
  link: showLink,
});

// --- what can be done -----------------------------------------------------------------------

picker.addEventListener("change", () => {
  history.replaceState(null, "", `#${encodeURIComponent(picker.value)}`);
  feed.follow(picker.value);
});

find("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = find<HTMLInputElement>("token");
  keepToken(field.value.trim());
  field.value = "";
  feed.follow(decodeURIComponent(location.hash.slice(1)));
});

find("forget").addEventListener("click", () => {
  keepToken("");
  feed.end();
  location.reload();
});

function applyTheme(theme: string): void {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  find("theme").textContent = `Theme: ${theme}`;
}

function redrawAll(): void {
  map.redraw();
  charts.redraw(state);
  days.resize();
  showContributions();
}

find("theme").addEventListener("click", () => {
  const now = localStorage.getItem(THEME_KEY) ?? "system";
  const next = THEMES[(THEMES.indexOf(now as (typeof THEMES)[number]) + 1) % THEMES.length]!;
  localStorage.setItem(THEME_KEY, next);
  applyTheme(next);
  redrawAll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

let width = window.innerWidth;
let settled = 0;
window.addEventListener("resize", () => {
  // A phone's address bar changes the height alone.
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  clearTimeout(settled);
  settled = window.setTimeout(redrawAll, 150);
});

applyTheme(localStorage.getItem(THEME_KEY) ?? "system");
showLegend();
feed.follow(decodeURIComponent(location.hash.slice(1)));
let read = Date.now();
setInterval(() => {
  // The first ones should not be long in coming.
  if (contributions?.workers.length && Date.now() - read < CONTRIBUTIONS_MS) return;
  read = Date.now();
  void readContributions();
}, FIRST_CONTRIBUTIONS_MS);
