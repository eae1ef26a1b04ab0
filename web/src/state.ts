// What the hub's events say, put together. docs/dashboard.md describes the events.

export interface Run {
  begin: number;
  end: number;
  held: number;
  reserved: number;
  target: number;
  scarcity: number;
}

export interface Worker {
  id: string;
  state: string;
  device: string;
  memory: number;
  experts: number;
  speed: number;
  path: string;
  segments: [layer: number, begin: number, end: number][];
  latency_us?: number;
  url?: string;
}

export interface Rates {
  rounds: number;
  pairs: number;
  local: number;
  sent: number;
  received: number;
  hedges: number;
  round_ms: number;
  tokens?: number;
}

export interface Sample extends Rates {
  n: number;
}

export interface Hello {
  version: string;
  models: { name: string; layers: number; experts: number }[];
  model: string;
  known: boolean;
  n_expert: number[];
  target: number;
  sample_s: number;
}

export const SAMPLES_MAX = 300;

export class State {
  hello: Hello | null = null;
  runs: Run[][] = [];
  workers: Worker[] = [];
  workersTotal = 0;
  traffic: (Rates & { backbones: number }) | null = null;
  samples: Sample[] = [];
  latency: [layer: number, rounds: number, mean_us: number, p99_us: number][] = [];
  changedLayers = new Set<number>();

  apply(event: string, data: any): void {
    switch (event) {
      case "hello": {
        const before = this.hello;
        this.hello = data as Hello;
        const same = before && before.model === data.model && String(before.n_expert) === String(data.n_expert);
        if (same) break;
        this.runs = this.hello.n_expert.map(() => []);
        this.samples = [];
        this.latency = [];
        this.workers = [];
        this.traffic = null;
        break;
      }
      case "coverage":
        for (const [layer, runs] of data.layers as [number, [number, number, number, number, number, number][]][]) {
          this.runs[layer] = runs.map(([begin, end, held, reserved, target, scarcity]) => ({ begin, end, held, reserved, target, scarcity }));
          this.changedLayers.add(layer);
        }
        break;
      case "workers":
        this.workers = data.workers;
        this.workersTotal = data.total;
        break;
      case "traffic":
        this.traffic = "rounds" in data ? data : null;
        break;
      case "samples":
        for (const sample of data.samples as Sample[]) {
          const last = this.samples.at(-1);
          if (!last || sample.n > last.n) this.samples.push(sample);
        }
        this.samples.splice(0, this.samples.length - SAMPLES_MAX);
        break;
      case "latency":
        this.latency = data.layers;
        break;
    }
  }

  runAt(layer: number, expert: number): Run | undefined {
    return this.runs[layer]?.find((run) => expert >= run.begin && expert < run.end);
  }

  holders(layer: number, expert: number): Worker[] {
    return this.workers.filter((w) => w.segments.some(([l, begin, end]) => l === layer && expert >= begin && expert < end));
  }

  coverage(): { experts: number; full: number; none: number; missing: number } {
    const sum = { experts: 0, full: 0, none: 0, missing: 0 };
    for (const runs of this.runs)
      for (const run of runs) {
        const n = run.end - run.begin;
        sum.experts += n;
        if (run.held >= run.target) sum.full += n;
        if (run.held === 0) sum.none += n;
        sum.missing += n * Math.max(0, run.target - run.held);
      }
    return sum;
  }
}
