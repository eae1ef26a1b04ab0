"""./dev soak [--minutes N] [--seed S]: two llama-servers with four streams each over eight workers,
which are killed, stopped, cut off, slowed down and, two of them, lying, at random. Checked all the time:
every token is stock llama.cpp's, no request fails or gets stuck. At the end: memory and descriptors of
the servers have not grown.

One server has every answer checked (KVASIR_SPOT_CHECK=1) and uses the liars; the other has the
default share and only honest workers. The four streams of a request start in one step, so that stock's own
tokens do not depend on timing; stock is run twice to see that."""

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import sys
import threading
import time

import harness
from harness import TINY
from lying_proxy import LyingProxy

PROMPTS = harness.PROMPTS + ["And it came to pass in those days, that"]
N_TOKENS = 64
N_WORKERS = 8
N_LIARS = 2
RSS_GROWTH_MAX = 1.10  # of the last third over the second, plus…
RSS_SLACK_KB = 16 << 10
FD_SLACK = 16


class Link:
    """A TCP proxy in front of a worker that can cut every connection, or hold the bytes for a while."""

    def __init__(self, port):
        self.port_behind, self.hold_until = port, 0.0
        self._pairs = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                worker = socket.create_connection(("127.0.0.1", self.port_behind), timeout=5)
            except OSError:
                client.close()
                continue
            worker.settimeout(None)
            self._pairs = [p for p in self._pairs if p[0].fileno() >= 0] + [(client, worker)]
            for source, to in ((client, worker), (worker, client)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pump, args=(source, to), daemon=True).start()

    def _pump(self, source, to):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while time.monotonic() < self.hold_until:
                    time.sleep(0.01)
                to.sendall(data)
        self._close(source, to)

    @staticmethod
    def _close(*sockets):
        for s in sockets:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()

    def cut(self):
        for pair in self._pairs:
            self._close(*pair)

    def close(self):
        self._close(self._listener)
        self.cut()


class Slot:
    """A worker that comes back on its port when it was killed."""

    def __init__(self, slice_path):
        self.slice = slice_path
        self.worker = harness.Worker([slice_path])
        self.link = Link(self.worker.port)
        self.stopped = False

    def kill(self):
        self.worker.close()

    def start_again(self):
        self.worker = harness.Worker([self.slice], port=self.link.port_behind)

    def close(self):
        if self.stopped:
            os.kill(self.worker.pid, signal.SIGCONT)
        self.link.close()
        self.worker.close()


class Chaos(threading.Thread):
    def __init__(self, slots, seed):
        super().__init__(daemon=True)
        self.slots, self.rng, self.done, self.counts, self.error = slots, random.Random(seed), threading.Event(), {}, None

    def run(self):
        try:
            while not self.done.wait(self.rng.uniform(0.2, 2)):
                slot = self.rng.choice(self.slots)
                action = self.rng.choice([self.kill, self.stop, self.cut, self.hold])
                self.counts[action.__name__] = self.counts.get(action.__name__, 0) + 1
                action(slot)
        except Exception as error:  # the main thread reports it
            self.error = error

    def kill(self, slot):
        slot.kill()
        self.done.wait(self.rng.uniform(0, 3))
        slot.start_again()

    def stop(self, slot):
        os.kill(slot.worker.pid, signal.SIGSTOP)
        slot.stopped = True
        self.done.wait(self.rng.uniform(0.05, 5))
        os.kill(slot.worker.pid, signal.SIGCONT)
        slot.stopped = False

    def cut(self, slot):
        slot.link.cut()

    def hold(self, slot):
        slot.link.hold_until = time.monotonic() + self.rng.uniform(0.05, 3)


class Backbone(threading.Thread):
    def __init__(self, name, server, stock):
        super().__init__(daemon=True)
        self.label, self.server, self.stock, self.done = name, server, stock, threading.Event()
        self.requests, self.tokens, self.different, self.failures = 0, 0, 0, []
        self.samples = []  # (kB resident, descriptors)

    def run(self):
        while not self.done.is_set():
            try:
                status, answer = self.server.stream_together(PROMPTS, N_TOKENS)
            except Exception as error:  # a timeout is a stuck request
                self.failures.append(repr(error))
                return
            self.requests += 1
            if status != 200:
                self.failures.append(f"HTTP {status}: {answer}")
                continue
            self.tokens += sum(map(len, answer))
            self.different += answer != self.stock
            self.samples.append(self.sample())

    def sample(self):
        status = pathlib.Path(f"/proc/{self.server.pid}/status").read_text()
        rss = int(status.split("VmRSS:")[1].split()[0])
        return rss, len(os.listdir(f"/proc/{self.server.pid}/fd"))

    def problems(self):
        out = list(self.failures)
        if self.different:
            out.append(f"{self.different} of {self.requests} answers have other tokens than stock's")
        if self.requests == 0:
            out.append("no request was answered")
        third = len(self.samples) // 3
        if third >= 3:
            for i, (what, slack) in enumerate([("kB resident", RSS_SLACK_KB), ("descriptors", FD_SLACK)]):
                before = statistics.median(s[i] for s in self.samples[third:2 * third])
                after = statistics.median(s[i] for s in self.samples[2 * third:])
                if after > before * RSS_GROWTH_MAX + slack:
                    out.append(f"grew from {before:.0f} to {after:.0f} {what}")
        return [f"{self.label}: {problem}" for problem in out]


def soak(minutes, seed, folder, close):
    def keep(thing):
        close.callback(thing.close)
        return thing

    stock_server = harness.Server(TINY, folder / "stock.sock", harness.clean_environment(), parallel=4)
    repetitions = [stock_server.stream_together(PROMPTS, N_TOKENS) for _ in range(2)]
    stock_server.close()
    if repetitions[0] != repetitions[1]:
        raise SystemExit("soak: stock llama.cpp does not agree with itself here; no comparison is possible.")
    stock = repetitions[0][1]

    slices = harness.three_slices(TINY, folder)
    slots = [keep(Slot((slices + [TINY])[i % 4])) for i in range(N_WORKERS)]
    honest = [f"127.0.0.1:{slot.link.port}" for slot in slots]
    # The liars stand in front of the last workers' links; the other server uses those directly.
    liars = [keep(LyingProxy(slot.link.port, share=0.01, seed=seed + i)) for i, slot in enumerate(slots[-N_LIARS:])]
    servers = []
    for name, links, share in (("all checked, with liars", honest[:-N_LIARS] + [l.link for l in liars], 1), ("honest", honest, None)):
        stats = folder / f"{len(servers)}.json"
        server = keep(harness.Server(TINY, folder / f"{len(servers)}.sock",
                                     harness.plugin_environment(links, stats=stats, KVASIR_SPOT_CHECK=share), parallel=4))
        servers.append((Backbone(name, server, stock), stats))
    chaos = Chaos(slots, seed)
    for thread in [b for b, _ in servers] + [chaos]:
        thread.start()
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end and chaos.error is None and all(b.is_alive() for b, _ in servers):
        time.sleep(0.5)
    for thread in [b for b, _ in servers] + [chaos]:
        thread.done.set()
    problems = [] if chaos.error is None else [f"the chaos itself failed: {chaos.error!r}"]
    for backbone, stats in servers:
        backbone.join(harness.RUN_S)
        if backbone.is_alive():
            problems.append(f"{backbone.label}: a request is stuck")
        status = backbone.server.stop()
        if status != 0:
            problems.append(f"{backbone.label}: the server ended with {status}\n{backbone.server.describe()}")
        problems += backbone.problems()
        counters = harness.read_stats(stats)
        if backbone is servers[0][0] and sum(l.lies for l in liars) > 0 and counters["spot_wrong"] + counters["invalid_answers"] == 0:
            problems.append("lies were told and none was found")
        print(json.dumps({"server": backbone.label, "requests": backbone.requests, "tokens": backbone.tokens,
                          **{k: counters[k] for k in ("rounds", "pairs_remote", "pairs_local", "hedges", "workers_lost", "reconnects",
                                                      "spot_pairs", "spot_wrong", "invalid_answers")}}))
    chaos.join(harness.STOP_S)
    print(json.dumps({"faults": chaos.counts, "lies": sum(l.lies for l in liars)}))
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with contextlib.ExitStack() as close:
        folder = pathlib.Path(close.enter_context(harness.tempfile.TemporaryDirectory(prefix="kvasir-soak-")))
        problems = soak(args.minutes, args.seed, folder, close)
    for problem in problems:
        print(problem, file=sys.stderr)
    print("soak: FAILED" if problems else f"soak: {args.minutes:g} minutes, no token differs, nothing grew, nothing stuck")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
