"""What backbones tell a hub, through the real plugin, and how machines that vanish are missed."""

import http.client
import json
import ssl
import threading
import unittest

import harness
import netlab
from harness import KVASIR, TINY
from swarm import HUB, Hub, Swarm

# So far apart that nothing below is noticed by heartbeats.
RARE_HEARTBEATS = ("--heartbeat", "60")


class Feed:
    """Follows a hub's events on a thread; `last` has the newest of each name."""

    def __init__(self, connection, token):
        self.last = {}
        connection.request("GET", "/api/view/events", headers={"Authorization": f"Bearer {token}"})
        self.answer = connection.getresponse()
        assert self.answer.status == 200
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        name = None
        try:
            for line in self.answer:
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    self.last[name] = json.loads(line[6:])
        except (OSError, http.client.HTTPException, ValueError):
            pass  # the hub was stopped

    def states(self):
        return {w["id"]: w["state"] for w in self.last.get("workers", {}).get("workers", [])}

    def wait_for(self, what, condition):
        return harness.wait_until(condition, what, 240)


class Traffic(Swarm):
    def feed(self, hub):
        connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=600)
        self.addCleanup(connection.close)
        return Feed(connection, Hub.token(self.folder, "viewer"))

    def backbone(self, hub, **kwargs):
        # Its experts come from the hub's workers, and from itself where one is missing.
        env = harness.plugin_environment(local="fallback", KVASIR_HUB=hub.url, KVASIR_TOKEN=self.backbone_token,
                                         **kwargs)
        return self.server(TINY, env)

    def test_a_running_backbone_shows_its_traffic(self):
        hub = self.hub()
        self.join(hub, "n", "40M")
        harness.wait_until(lambda: self.links(hub), "the node to serve", 240)
        feed = self.feed(hub)
        self.assertEqual(feed.last.get("traffic", {}).get("rounds", 0), 0)
        server = self.backbone(hub)
        stop = threading.Event()

        def generate():
            while not stop.is_set():
                server.complete("In the beginning", 64)

        writer = threading.Thread(target=generate)
        writer.start()
        try:
            traffic = feed.wait_for("figures while text is written", lambda: (
                t := feed.last.get("traffic", {})) and t["rounds"] > 0 and t["local"] < 0.5 and t)
            self.assertEqual(traffic["backbones"], 1)
            for name in ("tokens", "round_ms", "sent", "received", "pairs"):
                self.assertGreater(traffic[name], 0, name)
            layers = feed.wait_for("the time of each layer", lambda: feed.last.get("latency", {}).get("layers"))
            self.assertEqual([entry[0] for entry in layers], [0, 1, 2, 3])
            for _, rounds, mean_us, p99_us in layers:
                self.assertGreater(rounds, 0)
                self.assertGreater(mean_us, 0)
                self.assertGreater(p99_us, 0)
            feed.wait_for("the worker's latency",
                          lambda: any(w.get("latency_us", 0) > 0 for w in feed.last["workers"]["workers"]))
        finally:
            stop.set()
            writer.join()
        feed.wait_for("the figures to end with the text", lambda: feed.last["traffic"]["rounds"] == 0)

    def test_a_worker_that_stops_answering_is_shown(self):
        """Its machine keeps the line to the hub open, and the next heartbeat is far away."""
        hub = self.hub(extra=RARE_HEARTBEATS)
        node = self.join(hub, "n", "40M")
        harness.wait_until(lambda: self.links(hub), "the node to serve", 240)
        feed = self.feed(hub)
        server = self.backbone(hub)
        server.complete("In", 4)
        feed.wait_for("the worker to serve", lambda: "serving" in feed.states().values())
        node.pause()
        feed.wait_for("the silence to show", lambda: "silent" in feed.states().values())
        node.resume()
        feed.wait_for("the worker to serve again", lambda: "serving" in feed.states().values())


@unittest.skipUnless(netlab.inside(), f"needs network namespaces: {netlab.why_not()}")
class CutCable(Swarm):
    def test_a_cut_cable_turns_the_cells_before_any_heartbeat_is_missed(self):
        lan = netlab.Lan()
        self.addCleanup(lan.close)
        home, away = lan.host("hub", "192.0.2.1"), lan.host("node", "192.0.2.2")
        netlab.ip("addr", "add", "192.0.2.9/24", "dev", netlab.BRIDGE)
        certificate, key = netlab.certificate(self.folder, "IP:192.0.2.1")
        (self.folder / "models").mkdir()
        (self.folder / "models" / "tiny.gguf").symlink_to(TINY)
        hub = self.start(harness.Process(home.command(
            HUB, "--data", self.folder / "hub", "--models", self.folder / "models", "--listen", "192.0.2.1:8443",
            "--cert", certificate, "--key", key, *RARE_HEARTBEATS)))
        url = hub.next_line(r"^https://")
        self.start(harness.Process(away.command(
            KVASIR, "join", url, "--ca-file", certificate, "--memory", "40M", "--threads", 1,
            "--advertise", "192.0.2.2", "--data", self.folder / "n", "--cache", self.folder / "n" / "slices"),
            env=harness.clean_environment(KVASIR_TOKEN=self.worker_token)))
        context = ssl.create_default_context(cafile=certificate)
        connection = http.client.HTTPSConnection("192.0.2.1", 8443, timeout=600, context=context)
        self.addCleanup(connection.close)
        viewer = Hub.token(self.folder, "viewer")
        feed = Feed(connection, viewer)
        feed.wait_for("the node to serve", lambda: "serving" in feed.states().values())

        def lines():
            asking = http.client.HTTPSConnection("192.0.2.1", 8443, timeout=20, context=context)
            asking.request("GET", "/metrics", headers={"Authorization": f"Bearer {viewer}"})
            text = asking.getresponse().read().decode()
            asking.close()
            return "kvasir_hub_lines 1\n" in text

        harness.wait_until(lines, "the node's line", 240)
        netlab.ip("link", "set", away.outer, "down")
        feed.wait_for("the cable to be missed", lambda: "lost" in feed.states().values())
        feed.wait_for("the cells to turn", lambda: all(
            run[2] == 0 for layer in feed.last["coverage"]["layers"] for run in layer[1]))
        netlab.ip("link", "set", away.outer, "up")
        feed.wait_for("the node to be back", lambda: "serving" in feed.states().values())


if __name__ == "__main__":
    netlab.enter()
    harness.main()
