"""Worker, node and hub run confined, all their threads, and say so; they serve all the same."""

import pathlib
import re
import unittest

import harness
import sanitizers
from harness import KVASIR, TINY
from swarm import Swarm

PROMPT = harness.PROMPTS[0]
LINE = r"confined: no core dumps, no new privileges, (files, )?system calls"


class Confine(Swarm):
    def field(self, status, name):
        return int(re.search(rf"^{name}:\s+(\d+)$", status.read_text(), re.M).group(1))

    def check(self, process, confined=True):
        harness.wait_until(lambda: any(re.search(LINE if confined else "not confined", line) for line in process.err),
                           f"its line: {process.describe()}")
        # Left out, it is as confined as this test is: containers confine what runs in them.
        own = pathlib.Path("/proc/self/status")
        for task in pathlib.Path(f"/proc/{process.pid}/task").iterdir():
            self.assertEqual(self.field(task / "status", "Seccomp"), 2 if confined else self.field(own, "Seccomp"))
            self.assertEqual(self.field(task / "status", "NoNewPrivs"), 1 if confined else self.field(own, "NoNewPrivs"))
        cores = re.search(r"Max core file size\s+(\S+)\s+(\S+)", pathlib.Path(f"/proc/{process.pid}/limits").read_text())
        if confined:
            self.assertEqual(cores.groups(), ("0", "0"))

    @unittest.skipIf(sanitizers.library(harness.PLUGIN), "a build with a sanitizer is not confined")
    def test_they_serve_confined(self):
        stock = self.server(TINY, harness.clean_environment()).complete(PROMPT, 16)
        hub = self.hub(extra=["--heartbeat", 1])
        node = self.join(hub, "node", "40M")
        worker = self.worker(TINY, extra=["--stats-file", self.folder / "stats"])
        harness.wait_until(lambda: self.links(hub), f"the node to be counted: {node.describe()}")
        for env in (harness.plugin_environment([worker], stats=self.folder / "0"),
                    harness.plugin_environment(KVASIR_HUB=hub.url, KVASIR_TOKEN=self.backbone_token, stats=self.folder / "1")):
            server = self.server(TINY, env)
            self.assertEqual(server.complete(PROMPT, 16), stock)
            server.stop()
        for i in range(2):
            self.assertGreater(harness.read_stats(self.folder / str(i))["pairs_remote"], 0)
        harness.wait_until(lambda: harness.read_stats(self.folder / "stats")["pairs"] > 0, "the worker's statistics")
        for process in (hub, node, worker):
            self.check(process)

    def test_the_flag_leaves_it_out(self):
        hub = self.hub(extra=["--no-confine"])
        worker = self.worker(TINY, extra=["--no-confine"])
        node = self.start(harness.Process([KVASIR, "join", hub.url, "--memory", "40M", "--no-confine", "--data", self.folder / "node",
                                           "--cache", self.folder / "node" / "slices"],
                                          env=harness.clean_environment(KVASIR_TOKEN=self.worker_token)))
        for process in (hub, worker, node):
            self.check(process, confined=False)


if __name__ == "__main__":
    harness.main()
