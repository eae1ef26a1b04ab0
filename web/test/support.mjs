// Hub, workers and browser for the page's tests. Everything started here ends with its test.
import assert from "node:assert/strict";
import { spawn, execFileSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

export const top = join(dirname(fileURLToPath(import.meta.url)), "../..");
export const shots = join(top, "build/web-shots");
const bin = join(top, "build/bin");
const model = join(top, "models/tinymoe-en-Q4_K_M.gguf");
mkdirSync(shots, { recursive: true });

export const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

// Generous, so that a busy machine fails no test; nothing waits this long when things work.
export async function until(what, condition, ms = 60000) {
  for (const end = Date.now() + ms; ; await sleep(50)) {
    const value = await condition();
    if (value) return value;
    assert.ok(Date.now() < end, `waited ${ms} ms in vain for ${what}`);
  }
}

// setpriv: the kernel ends the child should this process end without cleaning up.
function start(t, args, env = {}) {
  const child = spawn("setpriv", ["--pdeathsig", "KILL", "--", ...args], {
    env: { PATH: process.env.PATH, HOME: process.env.HOME, OMP_WAIT_POLICY: "passive", ...env },
    stdio: ["ignore", "pipe", "pipe"],
  });
  child.out = child.err = "";
  child.stdout.on("data", (data) => (child.out += data));
  child.stderr.on("data", (data) => (child.err += data));
  child.ended = new Promise((done) => child.on("exit", done));
  t.after(async () => {
    child.kill("SIGKILL");
    await child.ended;
  });
  return child;
}

function unusedPort() {
  return new Promise((done) => {
    const server = createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => done(port));
    });
  });
}

export class Hub {
  constructor(t, options = {}) {
    this.t = t;
    this.folder = mkdtempSync(join(tmpdir(), "kvasir-web-"));
    t.after(() => rmSync(this.folder, { recursive: true, force: true }));
    this.data = join(this.folder, "hub");
    this.models = join(this.folder, "models");
    mkdirSync(this.models);
    if (options.model ?? true) symlinkSync(model, join(this.models, "tiny.gguf"));
    this.options = options;
  }
  token(scope) {
    return execFileSync(join(bin, "kvasir-hub"), ["token", "create", "--data", this.data, "--scope", scope], { encoding: "utf8" }).trim();
  }
  async start() {
    this.process = start(this.t, [join(bin, "kvasir-hub"), "--data", this.data, "--models", this.models, "--listen", `127.0.0.1:${this.port ?? 0}`,
                                  ...(this.options.args ?? [])]);
    this.url = await until("the hub to listen", () => /^http:\/\/\S+/m.exec(this.process.out)?.[0]);
    this.port = Number(new URL(this.url).port);
    return this;
  }
  async ask(path, token, body) {
    const answer = await fetch(this.url + path, {
      method: body ? "POST" : "GET",
      headers: token ? { Authorization: `Bearer ${token}` } : {},
      body: body ? JSON.stringify(body) : undefined,
    });
    assert.equal(answer.status, 200, `${path}: ${await answer.clone().text()}`);
    return answer.json();
  }
  join(name, memory, token) {
    return start(this.t, [join(bin, "kvasir"), "join", this.url, "--memory", memory, "--threads", "1", "--data", join(this.folder, name),
                          "--cache", join(this.folder, name, "slices")], { KVASIR_TOKEN: token });
  }
  // llama.cpp's own server with the plugin, over this hub's workers.
  async backbone(token) {
    const port = await unusedPort();
    const server = start(this.t, ["llama-server", "-m", model, "--host", "127.0.0.1", "--port", String(port), "--no-repack",
                                  "-t", "1", "-c", "512", "-np", "1", "--no-webui", "--no-warmup", "--offline"],
                         { GGML_BACKEND_PATH: join(top, "build/lib/libggml-kvasir.so"), KVASIR_HUB: this.url, KVASIR_TOKEN: token,
                           OMP_WAIT_POLICY: "passive" });
    const url = `http://127.0.0.1:${port}`;
    await until("llama-server to be ready", async () => (await fetch(`${url}/health`).catch(() => null))?.ok, 120000);
    server.complete = async (prompt, n_predict) => {
      const answer = await fetch(`${url}/completion`, { method: "POST", body: JSON.stringify({ prompt, n_predict, temperature: 0, ignore_eos: true }) });
      assert.equal(answer.status, 200, await answer.text());
    };
    return server;
  }
  cpuSeconds() {
    const fields = readFileSync(`/proc/${this.process.pid}/stat`, "utf8").split(") ")[1].split(" ");
    return (Number(fields[11]) + Number(fields[12])) / 100;
  }
}

// A page that fails its test by any error on the console and any request that leaves the hub.
export async function openPage(t, hub, { token, width = 1280, height = 900, dark = false, phone = false, path = "/", tolerate } = {}) {
  const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: ["--no-sandbox", "--disable-gpu"] });
  t.after(() => browser.close());
  const context = await browser.newContext({
    viewport: { width, height },
    colorScheme: dark ? "dark" : "light",
    reducedMotion: "reduce",
    ...(phone ? { deviceScaleFactor: 2, isMobile: true, hasTouch: true } : {}),
  });
  const page = await context.newPage();
  page.complaints = [];
  page.on("console", (message) => {
    const own = /willReadFrequently/.test(message.text());  // readCells' doing
    if (["error", "warning"].includes(message.type()) && !own && !tolerate?.test(message.text())) page.complaints.push(message.text());
  });
  page.on("pageerror", (error) => page.complaints.push(String(error)));
  page.on("request", (request) => {
    if (!request.url().startsWith(hub.url + "/") && !request.url().startsWith("data:")) page.complaints.push(`asks ${request.url()}`);
    if (token && request.url().includes(token)) page.complaints.push("the token is in an address");
  });
  if (token) await page.addInitScript((text) => sessionStorage.setItem("kvasir-token", text), token);
  await page.goto(hub.url + path);
  if (token) await page.locator("#board").waitFor();
  return page;
}

// What the picture shows, cell by cell: the colour's name and the height of the filled part.
export function readCells(page) {
  return page.evaluate(() => {
    const canvas = document.getElementById("cells");
    const { columns, cell, height, pitch, gutter } = Object.fromEntries(Object.entries(canvas.dataset).map(([k, v]) => [k, Number(v)]));
    const scale = canvas.width / canvas.clientWidth;
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const style = getComputedStyle(document.documentElement);
    const names = {};
    for (const name of ["full", "part", "scarce", "none", "promised", "track"]) {
      const hex = style.getPropertyValue(`--${name}`).trim();
      names[[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join()] = name;
    }
    const at = (x, y) => {
      const i = 4 * (Math.floor(y * scale) * canvas.width + Math.floor(x * scale));
      return names[[...pixels.data.slice(i, i + 3)].join()] ?? "?";
    };
    const n_layer = Math.round(canvas.clientHeight / pitch);
    const out = [];
    for (let layer = 0; layer < n_layer; ++layer) {
      out.push([]);
      for (let expert = 0; ; ++expert) {
        const x = gutter + (expert % columns) * cell + (cell - 1) / 2, y = layer * pitch + Math.floor(expert / columns) * height;
        if (y >= layer * pitch + pitch - 2) break;
        const column = [];
        for (let i = 0; i < height - 1; ++i) column.push(at(x, y + i + 0.5));
        if (!column.every((c) => c === "?")) out[layer].push(column);
      }
    }
    return out;
  });
}
