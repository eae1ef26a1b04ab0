"""kvasir join as a process: downloads survive, and what is wrong is said."""

import os
import pathlib
import random
import subprocess
import sys
import time

import harness
from harness import KVASIR, TINY
from swarm import Swarm, ask


POWER = "/sys/class/power_supply"
# Python rather than mount(8), which not every system has.
BIND = ("import ctypes, os, sys; libc = ctypes.CDLL(None, use_errno=True); source, *command = sys.argv[1:]; "
        f"sys.exit(f'no mount: {{os.strerror(ctypes.get_errno())}}') if libc.mount(source.encode(), b'{POWER}', None, 4096, None) else "
        "os.execvp(command[0], command)")


def with_power(folder):
    """A command's prefix: it sees this folder as the machine's power supplies."""
    return ["unshare", "-Urm", sys.executable, "-c", BIND, folder]


def no_power_of_our_own(folder):
    if not os.path.isdir(POWER):
        return f"no {POWER} here"
    done = subprocess.run([str(a) for a in [*with_power(folder), "true"]], capture_output=True, text=True)
    return None if done.returncode == 0 else f"no mount namespaces here: {done.stderr.strip()}"


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

    def test_on_its_battery_a_node_drains_and_comes_back(self):
        """--only-on-ac with a mains adapter that this test plugs in and out."""
        why_not = no_power_of_our_own(self.folder)
        if why_not:
            self.skipTest(why_not)
        supply = self.folder / "power"
        for name, files in {"AC": {"type": "Mains", "online": "1"}, "BAT0": {"type": "Battery", "status": "Discharging"}}.items():
            (supply / name).mkdir(parents=True)
            for file, text in files.items():
                (supply / name / file).write_text(text + "\n")
        hub = self.hub(extra=["--heartbeat", 1])
        node = self.join(hub, "n", "40M", "--only-on-ac", prefix=with_power(supply))

        def serves(wanted=True):
            workers = ask(hub.url, self.backbone_token, "/api/expert-routes?model=tiny")["workers"]
            return wanted == any(w["segments"] and not w["draining"] for w in workers)

        harness.wait_until(serves, f"the node to serve: {node.describe()}", 60)
        stats = self.folder / "stats.json"
        server = self.server(TINY, harness.plugin_environment(local="fallback", stats=stats, KVASIR_HUB=hub.url, KVASIR_TOKEN=self.backbone_token,
                                                              KVASIR_CONNECT_MS=20000))
        prompt = harness.PROMPTS[0]
        tokens = server.complete(prompt, 12)

        def remote():
            try:
                return harness.read_stats(stats)["pairs_remote"]
            except (OSError, ValueError):
                return 0

        harness.wait_until(lambda: remote() > 0, "the node to be used")
        (supply / "AC" / "online").write_text("0\n")
        harness.wait_until(lambda: any("pausing: the machine runs on its battery" in line for line in node.err), node.describe(), 60)
        harness.wait_until(lambda: serves(False), "the hub to know", 60)
        self.assertEqual(server.complete(prompt, 12), tokens)
        (supply / "AC" / "online").write_text("1\n")
        harness.wait_until(serves, f"the node to serve again: {node.describe()}", 60)
        before = remote()
        harness.wait_until(lambda: server.complete(prompt, 12) == tokens and remote() > before, "the node to be used again", 60)
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
