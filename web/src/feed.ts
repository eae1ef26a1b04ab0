// The hub's events over fetch: unlike EventSource it can send the token in a header, so that
// the token is in no address that anybody logs.

const TOKEN_KEY = "kvasir-token";
const RETRY_MS = [500, 1000, 2000, 5000, 10000];
// The hub sends a comment every 15 s; longer silence means that the line is dead.
const SILENCE_MS = 40000;

export type Link = { state: "live" } | { state: "connecting" } | { state: "waiting"; seconds: number; why: string } | { state: "token"; why: string };

export interface FeedEvents {
  events(batch: [event: string, data: unknown][]): void;
  link(link: Link): void;
}

export function token(): string {
  return sessionStorage.getItem(TOKEN_KEY) ?? "";
}

export function keepToken(text: string): void {
  if (text) sessionStorage.setItem(TOKEN_KEY, text);
  else sessionStorage.removeItem(TOKEN_KEY);
}

export function ask(path: string, signal?: AbortSignal): Promise<Response> {
  const headers: Record<string, string> = token() ? { Authorization: `Bearer ${token()}` } : {};
  return fetch(path, { headers, signal: signal ?? null, cache: "no-store", credentials: "omit", redirect: "error" });
}

async function sentence(response: Response): Promise<string> {
  try {
    return (await response.json()).error ?? `the hub answered ${response.status}`;
  } catch {
    return `the hub answered ${response.status}`;
  }
}

export class Feed {
  private stop = new AbortController();
  private failures = 0;

  constructor(private readonly to: FeedEvents) {}

  follow(model: string): void {
    this.stop.abort();
    this.stop = new AbortController();
    this.failures = 0;
    void this.run(model, this.stop.signal);
  }

  end(): void {
    this.stop.abort();
  }

  private async run(model: string, stop: AbortSignal): Promise<void> {
    while (!stop.aborted) {
      this.to.link({ state: "connecting" });
      let why = "the hub cannot be reached";
      try {
        const response = await ask("/api/view/events" + (model ? `?model=${encodeURIComponent(model)}` : ""), stop);
        if (response.status === 401 || response.status === 403) {
          this.to.link({ state: "token", why: token() ? await sentence(response) : "" });
          return;
        }
        if (response.ok && response.body) {
          await this.read(response.body, stop);
          why = "the hub closed the line";
        } else {
          why = await sentence(response);
        }
      } catch {
        // Reported below.
      }
      if (stop.aborted) return;
      const wait = RETRY_MS[Math.min(this.failures++, RETRY_MS.length - 1)]!;
      this.to.link({ state: "waiting", seconds: wait / 1000, why });
      await new Promise((done) => setTimeout(done, wait * (0.8 + 0.4 * Math.random())));
    }
  }

  private async read(body: ReadableStream<Uint8Array>, stop: AbortSignal): Promise<void> {
    const reader = body.getReader();
    stop.addEventListener("abort", () => void reader.cancel().catch(() => undefined));
    const decoder = new TextDecoder();
    let text = "";
    for (;;) {
      let alarm = 0;
      const silence = new Promise<never>((_, fail) => (alarm = window.setTimeout(() => fail(new Error("silent")), SILENCE_MS)));
      const { done, value } = await Promise.race([reader.read(), silence]).finally(() => clearTimeout(alarm));
      if (done) return;
      this.failures = 0;
      this.to.link({ state: "live" });
      text += decoder.decode(value, { stream: true });
      const batch: [string, unknown][] = [];
      for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
        const lines = text.slice(0, end).split("\n");
        text = text.slice(end + 2);
        const name = lines.find((line) => line.startsWith("event: "))?.slice(7);
        const data = lines.find((line) => line.startsWith("data: "))?.slice(6);
        if (name && data) batch.push([name, JSON.parse(data)]);
      }
      if (batch.length) this.to.events(batch);
    }
  }
}
