"""kvasir join as a process: downloads survive, and what is wrong is said."""

import os
import pathlib
import random
import time

import harness
from harness import KVASIR, TINY
from swarm import Swarm, ask


class Join(Swarm):
    def test_a_download_survives_twenty_kills_and_two_restarts(self):
        hub = self.hub()
        port = hub.port
        chance = random.Random(7)
        for i in range(20):
            node = self.join(hub, "n", "20M", "--rate", "6M", "--once")
            time.sleep(0.15 + chance.random() * 0.4)
            self.assertTrue(node.running() or node.popen.returncode == 0, node.describe())
            node.kill()
            if i in (6, 13):
                hub.kill()
                hub = self.hub(port=port)
        node = self.join(hub, "n", "20M", "--once")
        self.assertEqual(node.wait(), 0, node.describe())
        files = node.out
        self.assertGreater(len(files), 0)
        for file in files:
            harness.run([KVASIR, "slice", TINY, "--verify", file])

    def test_nice_is_for_the_computing_only(self):
        hub = self.hub()
        node = self.join(hub, "n", "6M", "--nice", "15")
        harness.wait_until(lambda: any(w["segments"] for w in ask(hub.url, self.backbone_token, "/api/expert-routes")["workers"]),
                           "the node to serve", 60)

        def niceness():
            return [os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in pathlib.Path(f"/proc/{node.pid}/task").iterdir()]

        usual = os.getpriority(os.PRIO_PROCESS, 0)
        self.assertEqual(set(niceness()), {usual, 15})
        self.assertEqual(niceness().count(usual), 1, "the heartbeat alone keeps its priority")

    def test_a_days_cap_on_data_is_kept(self):
        hub = self.hub()
        node = self.join(hub, "n", "6M", "--data-cap", "1M")
        harness.wait_until(lambda: any("share of data is used up" in line for line in node.err), "the node to say why it waits", 60)
        fetched = sum(f.stat().st_size for f in (self.folder / "n" / "slices").iterdir() if not f.name.startswith("received"))
        self.assertLess(fetched, 2_000_000)
        self.assertEqual(node.stop(), 0)

    def test_what_is_wrong_is_said(self):
        hub = self.hub()
        folder = self.folder / "w"

        def refused(url, *args, token=self.worker_token):
            done = harness.run([KVASIR, "join", url, "--once", "--data", folder, "--cache", folder / "slices", *args],
                               env=harness.clean_environment(KVASIR_TOKEN=token), check=False)
            self.assertNotEqual(done.returncode, 0)
            self.assertNotIn(token, done.stderr)
            return done.stderr

        self.assertIn("too few", refused(hub.url, "--memory", "1k"))
        self.assertIn("no model", refused(hub.url, "--memory", "10M", "--model", "other"))
        self.assertIn("quota", refused(hub.url, "--memory", "10M", "--disk", "100k"))
        self.assertIn("hours", refused(hub.url, "--memory", "10M", "--schedule", "25:00-07:00"))
        self.assertIn("in the clear", refused("http://192.0.2.1:80", "--memory", "10M"))
        self.assertIn("not known here", refused(hub.url, "--memory", "10M", token="kvasir_wrong"))


if __name__ == "__main__":
    harness.main()
