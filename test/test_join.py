"""kvasir-hub and kvasir join as processes: an empty hub fills itself, holes are taken, downloads survive."""

import json
import random
import time
import urllib.request

import harness
from harness import BUILD, KVASIR, TINY, SystemTest

HUB = BUILD / "bin" / "kvasir-hub"
PROMPT = harness.PROMPTS[0]


class Hub(harness.Process):
    def __init__(self, folder, port=0, extra=()):
        self.data = folder / "hub"
        self.models = folder / "models"
        self.models.mkdir(exist_ok=True)
        link = self.models / "tiny.gguf"
        if not link.exists():
            link.symlink_to(TINY)
        super().__init__([HUB, "--data", self.data, "--models", self.models, "--listen", f"127.0.0.1:{port}", *extra])
        self.url = self.next_line(r"^http://")
        self.port = int(self.url.rsplit(":", 1)[1])

    @staticmethod
    def token(folder, scope):
        return harness.run([HUB, "token", "create", "--data", folder / "hub", "--scope", scope]).stdout.strip()


def ask(url, token, path, body=None):
    request = urllib.request.Request(url + path, data=None if body is None else json.dumps(body).encode(),
                                     headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


class Join(SystemTest):
    def setUp(self):
        super().setUp()
        self.worker_token = Hub.token(self.folder, "worker")
        self.backbone_token = Hub.token(self.folder, "backbone")

    def hub(self, **kwargs):
        return self.start(Hub(self.folder, **kwargs))

    def join(self, hub, name, memory, *extra):
        args = [KVASIR, "join", hub.url, "--memory", memory, "--threads", 1, "--data", self.folder / name,
                "--cache", self.folder / name / "slices", *extra]
        return self.start(harness.Process(args, env=harness.clean_environment(KVASIR_TOKEN=self.worker_token)))

    def demand(self, hub):
        return ask(hub.url, self.backbone_token, "/api/expert-demand?model=tiny")["segments"]

    def covered(self, hub):
        """Held, not only promised."""
        return all(s["replicas"] - s["reserved"] >= s["target"] for s in self.demand(hub))

    def links(self, hub):
        return [w["url"] for w in ask(hub.url, self.backbone_token, "/api/expert-routes?model=tiny")["workers"]]

    def test_an_empty_hub_fills_itself_and_holes_are_taken(self):
        stock = self.server(TINY, harness.clean_environment()).complete(PROMPT, 24)
        hub = self.hub()
        self.assertTrue(all(s["replicas"] == 0 for s in self.demand(hub)))
        nodes = [self.join(hub, f"n{i}", memory) for i, memory in enumerate(["12M", "12M", "9M", "6M"])]
        harness.wait_until(lambda: self.covered(hub), "coverage to reach its target", 90)

        def complete(stats_name):
            stats = self.folder / stats_name
            env = harness.plugin_environment(self.links(hub), local="never", stats=stats, KVASIR_CONNECT_MS=3000)
            server = self.server(TINY, env)
            tokens = server.complete(PROMPT, 24)
            server.stop()
            counters = harness.read_stats(stats)
            self.assertGreater(counters["pairs_remote"], 0)
            self.assertEqual(counters["pairs_local"], 0)
            return tokens

        self.assertEqual(complete("before"), stock)
        nodes[0].kill()
        harness.wait_until(lambda: not self.covered(hub), "the hub to miss the node that died", 60)
        began = time.monotonic()
        self.join(hub, "new", "12M")
        harness.wait_until(lambda: self.covered(hub), "the hole to be taken", 60)
        print(f"hole taken {time.monotonic() - began:.1f} s after a node was there to take it")
        self.assertEqual(complete("after"), stock)

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
