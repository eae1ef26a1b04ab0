"""./dev soak [--minutes N] [--seed S]: two llama-servers with four streams each over eight workers, a hub and
its relay. Two of the workers lie. One llama-server is told its four workers, and has every answer
checked (KVASIR_SPOT_CHECK=1); the other follows the hub to four nodes that joined it, two of them reachable
through the relay only, with the default share of checks.

Meanwhile, at random: workers, nodes and the hub are killed and come back, or are stopped for seconds; links are
cut or held; the disk of hub and nodes is full; their clock jumps. Checked all the time: every token is
stock llama.cpp's, no request fails or gets stuck, no process ends by itself. At the end: memory and descriptors of no process
have grown, and no connection or request is open anywhere.

The four streams of a request start in one step, so that stock's own tokens do not depend on timing; stock is
run twice to see that."""

import argparse
import contextlib
import json
import pathlib
import random
import signal
import statistics
import sys
import threading
import time
import urllib.request

import harness
from harness import TINY
from lying_proxy import LyingProxy
from soak_fleet import Clock, Disk, Hub, Node, Slot, enter, resources

PROMPTS = harness.PROMPTS + ["And it came to pass in those days, that"]
N_TOKENS = 64
N_SLOTS = 4
N_LIARS = 2
# Fewer than three copies of the model's 15 MB, which is what the hub asks for: there is work for all.
NODES = {"node0": ("10M", ()), "node1": ("10M", ()), "relayed0": ("10M", ("--relay", "only")), "relayed1": ("10M", ("--relay", "only"))}
LEAST = {"kB resident": 16 << 10, "descriptors": 16}  # growth that is none, beside the tenth
GROWTH_MAX = 1.10  # of the last third over the second
CLOCK_JUMPS_S = [3600, -3600, 86400 * 2, -86400 * 2, 86400 * 800]
SAMPLE_S = 2


class Chaos(threading.Thread):
    """Ends its faults when `done` is set, and itself at `over`: what it started dies with its thread."""

    def __init__(self, slots, nodes, hub, disk, clock, seed):
        super().__init__(daemon=True)
        self.slots, self.nodes, self.hub, self.disk, self.clock = slots, nodes, hub, disk, clock
        self.rng, self.counts, self.error = random.Random(seed), {}, None
        self.done, self.quiet, self.over = threading.Event(), threading.Event(), threading.Event()

    def run(self):
        faults = [self.kill_worker, self.stop_worker, self.cut_link, self.hold_link] * 2 + [
            self.kill_node, self.stop_node, self.kill_hub, self.stop_hub, self.cut_hub, self.hold_hub, self.jump_clock]
        if self.disk.small:
            faults.append(self.fill_disk)
        try:
            while not self.done.wait(self.rng.uniform(0.2, 2)):
                fault = self.rng.choice(faults)
                self.counts[fault.__name__] = self.counts.get(fault.__name__, 0) + 1
                fault()
        except Exception as error:  # the main thread reports it
            self.error = error
        self.quiet.set()
        self.over.wait()

    def _kill(self, daemon):
        daemon.kill()
        self.done.wait(self.rng.uniform(0, 3))
        daemon.start_again()

    def _stop(self, daemon, longest):
        daemon.signal(signal.SIGSTOP)
        self.done.wait(self.rng.uniform(0.05, longest))
        daemon.signal(signal.SIGCONT)

    def kill_worker(self):
        self._kill(self.rng.choice(self.slots))

    def stop_worker(self):
        self._stop(self.rng.choice(self.slots), 5)

    def cut_link(self):
        self.rng.choice(self.slots).link.cut()

    def hold_link(self):
        self.rng.choice(self.slots).link.hold_until = time.monotonic() + self.rng.uniform(0.05, 3)

    def kill_node(self):
        self._kill(self.rng.choice(self.nodes))

    def stop_node(self):
        self._stop(self.rng.choice(self.nodes), 5)

    def kill_hub(self):
        self._kill(self.hub)

    def stop_hub(self):
        self._stop(self.hub, 5)

    def cut_hub(self):
        self.hub.link.cut()

    def hold_hub(self):
        self.hub.link.hold_until = time.monotonic() + self.rng.uniform(0.05, 3)

    def jump_clock(self):
        self.clock.set(self.rng.choice(CLOCK_JUMPS_S))
        self.done.wait(self.rng.uniform(0.5, 8))
        self.clock.set(0)

    def fill_disk(self):
        self.disk.fill()
        self.done.wait(self.rng.uniform(0.5, 5))
        self.disk.empty()


class Backbone(threading.Thread):
    def __init__(self, name, server, stock):
        super().__init__(daemon=True)
        self.label, self.server, self.stock, self.done = name, server, stock, threading.Event()
        self.requests, self.tokens, self.different, self.failures = 0, 0, 0, []
        self.samples = []

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
            with contextlib.suppress(OSError):  # its end is found at the end
                self.samples.append(resources(self.server.pid))

    def problems(self):
        out = list(self.failures)
        if self.different:
            out.append(f"{self.different} of {self.requests} answers have other tokens than stock's")
        if self.requests == 0:
            out.append("no request was answered")
        return [f"{self.label}: {problem}" for problem in out + growth(self.samples)]

    def open_requests(self):
        try:
            status, slots = self.server.request("GET", "/slots")
        except OSError as error:  # how it ended is said beside it
            return [f"{self.label}: no answer to /slots: {error}"]
        if status != 200:
            return [f"{self.label}: /slots says {status}"]
        return [f"{self.label}: slot {slot['id']} is still busy" for slot in slots if slot["is_processing"]]


def growth(samples):
    third, out = len(samples) // 3, []
    if third < 3:
        return out
    for i, (what, slack) in enumerate(LEAST.items()):
        before = statistics.median(s[i] for s in samples[third:2 * third])
        after = statistics.median(s[i] for s in samples[2 * third:])
        if after > before * GROWTH_MAX + slack:
            out.append(f"grew from {before:.0f} to {after:.0f} {what}")
    return out


def hub_figures(hub, token):
    request = urllib.request.Request(hub.url + "/metrics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}


def relayed_bytes(hub, token):
    request = urllib.request.Request(hub.url + "/api/contributions", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return sum(e["bytes"] for e in json.load(answer)["entries"] if e["side"].startswith("relay_"))


def left_over(slots, hub, viewer):
    """What is open once nobody asks for anything any more."""
    out = []
    for slot in slots:
        try:
            harness.wait_until(lambda: harness.read_stats(slot.stats)["connections_open"] == 0, "it to be left", harness.STOP_S)
        except (AssertionError, OSError) as error:
            out.append(f"{slot.label}: {error}; {slot.stats.read_text() if slot.stats.exists() else 'no statistics'}")
        if slot.stats.exists() and (queued := harness.read_stats(slot.stats)["queued"]):
            out.append(f"{slot.label}: {queued} requests still wait")
    try:
        harness.wait_until(lambda: hub_figures(hub, viewer)["kvasir_hub_relay_pairs"] == 0, "the relay's pairs to end", 60)
    except (AssertionError, OSError) as error:
        out.append(f"hub: {error}")
    return out


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

    disk, clock = keep(Disk(folder)), Clock(folder)
    if not disk.small:
        print("soak: no small disk can be mounted here, so none is filled", file=sys.stderr)
    slices = harness.three_slices(TINY, folder)
    slots = [keep(Slot(f"worker{i}", (slices + [TINY])[i % 4], folder / f"worker{i}.json")) for i in range(N_SLOTS)]
    hub = keep(Hub(disk, folder, clock))
    tokens = {scope: hub.token(scope) for scope in ("worker", "backbone", "viewer")}
    nodes = [keep(Node(label, hub, tokens["worker"], disk, clock, memory, extra)) for label, (memory, extra) in NODES.items()]
    try:
        harness.wait_until(lambda: hub_figures(hub, tokens["viewer"]).get('kvasir_hub_workers{model="tiny",state="serving"}', 0) == len(nodes),
                           "the nodes to serve")
    except AssertionError as error:
        raise SystemExit("\n".join([str(error), *(d.process.describe() for d in [hub, *nodes])])) from None

    links = [f"127.0.0.1:{slot.link.port}" for slot in slots]
    liars = [keep(LyingProxy(slot.link.port, share=0.01, seed=seed + i)) for i, slot in enumerate(slots[-N_LIARS:])]
    settings = {"all checked, with liars": dict(workers=links[:-N_LIARS] + [liar.link for liar in liars], KVASIR_SPOT_CHECK=1),
                "by the hub": dict(KVASIR_HUB=hub.url, KVASIR_TOKEN=tokens["backbone"])}
    servers = []
    for label, how in settings.items():
        stats = folder / f"{len(servers)}.json"
        server = keep(harness.Server(TINY, folder / f"{len(servers)}.sock", harness.plugin_environment(stats=stats, **how), parallel=4,
                                     extra=["--slots"]))
        servers.append((Backbone(label, server, stock), stats))
    daemons = [*slots, *nodes, hub]
    chaos = Chaos(slots, nodes, hub, disk, clock, seed)
    for thread in [b for b, _ in servers] + [chaos]:
        thread.start()
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end and chaos.error is None and all(b.is_alive() for b, _ in servers):
        time.sleep(SAMPLE_S)
        for daemon in daemons:
            with contextlib.suppress(OSError):  # killed at this moment
                daemon.samples.append(resources(daemon.process.pid))
    chaos.done.set()
    chaos.quiet.wait(3 * harness.STOP_S)
    close.callback(chaos.over.set)
    problems = [] if chaos.error is None else [f"the chaos itself failed: {chaos.error!r}"]
    for backbone, _ in servers:
        backbone.done.set()
    for backbone, stats in servers:
        backbone.join(harness.RUN_S)
        if backbone.is_alive():
            problems.append(f"{backbone.label}: a request is stuck")
        else:
            problems += backbone.open_requests()
        status = backbone.server.stop()
        if status != 0:
            problems.append(f"{backbone.label}: the server ended with {status}\n{backbone.server.describe()}")
        problems += backbone.problems()
        counters = harness.read_stats(stats)
        if counters["pairs_remote"] == 0:
            problems.append(f"{backbone.label}: no worker was used")
        if backbone is servers[0][0] and sum(l.lies for l in liars) > 0 and counters["spot_wrong"] + counters["invalid_answers"] == 0:
            problems.append("lies were told and none was found")
        print(json.dumps({"server": backbone.label, "requests": backbone.requests, "tokens": backbone.tokens,
                          "MB resident": backbone.samples[-1][0] >> 10, "descriptors": backbone.samples[-1][1],
                          **{k: counters[k] for k in ("rounds", "pairs_remote", "pairs_local", "hedges", "workers_lost", "reconnects",
                                                      "spot_pairs", "spot_wrong", "invalid_answers")}}))
    problems += left_over(slots, hub, tokens["viewer"])
    try:
        through_relay = relayed_bytes(hub, tokens["backbone"])
        if through_relay == 0:
            problems.append("nothing went through the relay")
    except (OSError, ValueError) as error:
        through_relay = None
        problems.append(f"the hub does not say what its relay carried: {error!r}; {hub.process.describe()}")
    for daemon in daemons:
        status = daemon.stop()
        if status != 0:
            daemon.ended.append(f"{daemon.label} stopped with {status}: {daemon.process.describe()}")
        problems += daemon.ended + [f"{daemon.label}: {problem}" for problem in growth(daemon.samples)]
    print(json.dumps({"faults": chaos.counts, "lies": sum(l.lies for l in liars), "bytes through the relay": through_relay,
                      "MB resident, descriptors": {d.label: (d.samples[-1][0] >> 10, d.samples[-1][1]) for d in daemons if d.samples}}))
    return problems


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    enter()
    with contextlib.ExitStack() as close:
        folder = pathlib.Path(close.enter_context(harness.tempfile.TemporaryDirectory(prefix="kvasir-soak-")))
        problems = soak(args.minutes, args.seed, folder, close)
    for problem in problems:
        print(problem, file=sys.stderr)
    print("soak: FAILED" if problems else f"soak: {args.minutes:g} minutes, no token differs, nothing grew, nothing stuck")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
