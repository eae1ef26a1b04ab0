// The table of workers; its headings sort it.
import { bytesInColumn, count, element, find, milliseconds, showEmpty } from "./format";
import type { State, Worker } from "./state";

interface Column {
  title: string;
  key: (worker: Worker) => string | number;
  text: (worker: Worker) => string;
  number?: boolean;
}

// What needs somebody's attention comes first.
const STATES = ["lost", "silent", "late", "draining", "moving", "proving", "fetching", "serving"];
const MARKS: Record<string, string> = { serving: "●", fetching: "◔", proving: "◑", moving: "◒", draining: "◌", late: "▲", silent: "◇", lost: "✕" };
const WORDS: Record<string, string> = { silent: "not answering" };
const MEANINGS: Record<string, string> = {
  serving: "answers backbones",
  fetching: "has been given experts and fetches them",
  proving: "the hub checks that it has what it says",
  moving: "was asked to take scarcer experts",
  draining: "finishes what it has begun and takes nothing new",
  late: "a heartbeat is overdue",
  silent: "a backbone gets no answer from it, though the hub still hears of it",
  lost: "its line to the hub has ended; it counts for nothing until it is heard of again",
};

const COLUMNS: Column[] = [
  { title: "Name", key: (w) => w.id, text: (w) => w.id },
  { title: "State", key: (w) => STATES.indexOf(w.state), text: (w) => `${MARKS[w.state] ?? "?"} ${WORDS[w.state] ?? w.state}` },
  { title: "Device", key: (w) => w.device, text: (w) => w.device || "–" },
  { title: "Memory", key: (w) => w.memory, text: (w) => (w.memory ? bytesInColumn(w.memory) : "–"), number: true },
  { title: "Experts", key: (w) => w.experts, text: (w) => count(w.experts), number: true },
  { title: "Speed", key: (w) => w.speed, text: (w) => (w.speed ? `${count(Math.round(w.speed))} rows/s` : "–"), number: true },
  { title: "Latency", key: (w) => w.latency_us ?? Infinity, text: (w) => (w.latency_us ? milliseconds(w.latency_us) : "–"), number: true },
  { title: "Path", key: (w) => w.path, text: (w) => (w.path === "none" ? "–" : w.path === "both" ? "direct or relayed" : w.path) + (w.url ? ` ${w.url}` : "") },
];

export class WorkerTable {
  private by = 1;
  private descending = false;

  constructor(private readonly state: State) {
    const head = find("workers-head");
    COLUMNS.forEach((column, i) => {
      const cell = element("th", "", column.number ? "number" : "");
      cell.scope = "col";
      const button = element("button", column.title);
      button.type = "button";
      button.addEventListener("click", () => {
        this.descending = this.by === i && !this.descending;
        this.by = i;
        this.update();
      });
      cell.append(button);
      head.append(cell);
    });
  }

  update(): void {
    const { workers, workersTotal } = this.state;
    find("workers-scroll").hidden = workers.length === 0;
    if (workers.length === 0) {
      showEmpty("workers-empty", "No worker yet. On any machine that can spare memory:", `kvasir join ${location.origin} --token-file TOKEN --memory 4G`);
      find("workers-note").textContent = "";
      return;
    }
    find("workers-empty").hidden = true;
    const serving = workers.filter((w) => w.state === "serving").length;
    const more = workersTotal > workers.length ? `; the first ${workers.length} of ${workersTotal} are shown` : "";
    find("workers-note").textContent = `${serving} of ${workersTotal} serving${more}`;
    const { key } = COLUMNS[this.by]!;
    const sorted = [...workers].sort((a, b) => {
      const x = key(a), y = key(b);
      const order = x < y ? -1 : x > y ? 1 : a.id < b.id ? -1 : 1;
      return this.descending ? -order : order;
    });
    find("workers-rows").replaceChildren(
      ...sorted.map((worker) => {
        const row = element("tr");
        row.dataset.state = worker.state;
        COLUMNS.forEach((column, i) => {
          const cell = element(i === 0 ? "th" : "td", column.text(worker), column.number ? "number" : "");
          if (i === 0) (cell as HTMLTableCellElement).scope = "row";
          if (column.title === "State") {
            cell.className = "state";
            cell.title = MEANINGS[worker.state] ?? "";
          }
          cell.dataset.title = column.title;
          row.append(cell);
        });
        return row;
      }),
    );
    find("workers-head").querySelectorAll("th").forEach((cell, i) => {
      if (i === this.by) cell.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  }
}
