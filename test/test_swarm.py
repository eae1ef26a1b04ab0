"""A swarm from nothing: an empty hub, nodes that fill it, kvasir run, and everything that may go wrong meanwhile."""

import signal
import time

import harness
from harness import KVASIR, TINY
from swarm import Swarm, ask

PROMPT = harness.PROMPTS[0]
CHAT = {"messages": [{"role": "user", "content": "Tell me of the sea."}], "max_tokens": 24, "temperature": 0, "top_k": 1,
        "cache_prompt": False}


class Run(harness.Process):
    """kvasir run, listening on a unix socket."""

    def __init__(self, model, socket_path, hub, token, stats, extra=()):
        env = harness.launcher_environment(KVASIR_TOKEN=token, KVASIR_STATS_FILE=stats)
        del env["OMP_WAIT_POLICY"]  # kvasir run sees that workers are here
        super().__init__([KVASIR, "run", model, "--hub", hub.url, *extra, "--", "--host", socket_path, "-t", 1, "-np", 1,
                          "-c", 512, "--no-webui", "--offline"], env=env)
        self.socket_path = str(socket_path)
        self.url = self.next_line("^unix:")

    request = harness.Server.request
    complete = harness.Server.complete
    try_complete = harness.Server.try_complete
    _greedy = staticmethod(harness.Server._greedy)
    _connect = harness.Server._connect


class SwarmTest(Swarm):
    def chat(self, server):
        status, answer = server.request("POST", "/v1/chat/completions", CHAT)
        self.assertEqual(status, 200, answer)
        return answer["choices"][0]["message"]["content"], server.complete(PROMPT, 24)

    def test_an_empty_hub_becomes_a_swarm_that_loses_nodes_and_no_token(self):
        stock_server = self.server(TINY, harness.clean_environment())
        stock = self.chat(stock_server)
        stock_server.stop()

        hub = self.hub(extra=["--heartbeat", 2])
        self.assertTrue(all(s["replicas"] == 0 for s in self.demand(hub)))
        began = time.monotonic()
        # 34 MB for two copies of 15 MB: none of the four is superfluous.
        nodes = [self.join(hub, f"n{i}", memory) for i, memory in enumerate(["10M", "10M", "8M", "6M"])]
        harness.wait_until(lambda: self.covered(hub), "coverage to reach its target", 90)
        print(f"covered {time.monotonic() - began:.1f} s after the nodes started")

        stats = self.folder / "stats"
        run = self.start(Run(TINY, self.folder / "run.sock", hub, self.backbone_token, stats, ["--local", "never"]))
        self.assertTrue(any("GOMP_SPINCOUNT=1000" in line for line in run.err), run.describe())
        self.assertEqual(self.chat(run), stock)

        def up(n):
            return lambda: harness.read_stats(stats)["workers_up"] == n

        harness.wait_until(up(4), "the plugin to know all nodes")
        self.assertEqual(self.chat(run), stock)  # the first one may have run before the last node was known
        nodes[0].kill()
        self.assertEqual(self.chat(run), stock)  # at once, and nothing is computed here
        harness.wait_until(lambda: not self.covered(hub), "the hub to miss the node that died", 60)
        began = time.monotonic()
        self.join(hub, "new", "12M")
        harness.wait_until(lambda: self.covered(hub), "the hole to be taken", 60)
        print(f"hole taken {time.monotonic() - began:.1f} s after a node was there to take it")
        harness.wait_until(up(4), "the plugin to know the new node")
        self.assertEqual(self.chat(run), stock)

        port = hub.port
        hub.kill()
        self.assertEqual(self.chat(run), stock)
        hub = self.hub(port=port, extra=["--heartbeat", 2])
        self.assertEqual(self.chat(run), stock)
        harness.wait_until(lambda: self.covered_or_waking(hub), "the nodes to come back to the hub", 60)
        self.assertEqual(self.chat(run), stock)
        harness.wait_until(up(4), "the counters to show all nodes")  # workers_lost, below, tells whether any was dropped meanwhile

        run.popen.send_signal(signal.SIGTERM)
        self.assertEqual(run.wait(), 0, run.describe())
        counters = harness.read_stats(stats)
        self.assertEqual(counters["pairs_local"], 0)
        self.assertLessEqual(counters["workers_lost"], 1, run.describe())
        entries = ask(hub.url, self.backbone_token, "/api/contributions")["entries"]
        # Of two nodes that hold an expert, the slower may never be asked: not all five need have served.
        self.assertGreaterEqual(len({e["worker_id"] for e in entries}), 3, entries)
        # Hedges may have been answered twice.
        self.assertGreaterEqual(sum(e["pairs"] for e in entries), counters["pairs_remote"])

    def covered_or_waking(self, hub):
        try:
            return self.covered(hub)
        except OSError:
            return False


if __name__ == "__main__":
    harness.main()
