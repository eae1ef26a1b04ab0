"""What people watch a hub by: the feed, kvasir top, metrics, logs; and the committed dashboard's age.

The page itself is tried in a browser by `./dev web-test`.
"""

import hashlib
import http.client
import json
import re
import time
import urllib.error
import urllib.request

import harness
from harness import KVASIR, SOURCE, SystemTest
from swarm import Hub

METRIC = re.compile(r"^([a-z_][a-z0-9_]*)(\{[a-z_]+=\"[^\"\\]*\"(,[a-z_]+=\"[^\"\\]*\")*\})? (-?[0-9.e+-]+|NaN|[+-]Inf)$")


def parse_metrics(text):
    """Families by name, strictly by the text form's rules."""
    families, name = {}, None
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in families, f"{name} comes twice"
            families[name] = {"type": None, "samples": {}}
        elif line.startswith("# TYPE "):
            _, _, named, kind = line.split(" ")
            assert named == name and kind in ("counter", "gauge"), line
            assert (kind == "counter") == name.endswith("_total"), line
            families[name]["type"] = kind
        else:
            match = METRIC.match(line)
            assert match and match[1] == name, line
            assert match[2] not in families[name]["samples"], f"{line} comes twice"
            families[name]["samples"][match[2] or ""] = float(match[4])
    assert text.endswith("\n")
    return families


def documented():
    """The names in docs/metrics.md by section."""
    out, section = {}, ""
    for line in (SOURCE / "docs" / "metrics.md").read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif section == "The process" or line.startswith("| `"):
            cell = line.split("|")[1] if line.startswith("|") else line
            out.setdefault(section, set()).update(re.findall(r"`([a-z_]+)`", cell))
    return out


class Feed:
    """Follows the hub's events."""

    def __init__(self, hub, token):
        self.connection = http.client.HTTPConnection("127.0.0.1", hub.port, timeout=60)
        self.connection.request("GET", "/api/view/events", headers={"Authorization": f"Bearer {token}"})
        self.answer = self.connection.getresponse()
        assert self.answer.status == 200

    def next(self, name):
        wanted = False
        while line := self.answer.readline():
            if line.startswith(b"event: "):
                wanted = line[7:].strip() == name.encode()
            elif wanted and line.startswith(b"data: "):
                return json.loads(line[6:])
        raise AssertionError(f"the feed ended before '{name}'")

    def close(self):
        self.connection.close()


class Dashboard(SystemTest):
    def setUp(self):
        super().setUp()
        self.tokens = {scope: Hub.token(self.folder, scope) for scope in ("worker", "backbone", "viewer")}

    def join(self, hub, name, memory, *extra, token=None):
        args = [KVASIR, "join", hub.url, "--memory", memory, "--threads", 1, "--data", self.folder / name,
                "--cache", self.folder / name / "slices", *extra]
        return self.start(harness.Process(args, env=harness.clean_environment(KVASIR_TOKEN=token or self.tokens["worker"])))

    def get(self, url, token=None):
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.read().decode()

    def test_the_committed_page_is_of_these_sources(self):
        web = SOURCE / "web"
        digest = hashlib.sha256()
        for path in sorted((web / "src").iterdir(), key=lambda p: p.name):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        for name in ("build.mjs", "package.json", "package-lock.json"):
            digest.update((web / name).read_bytes())
        built = (web / "dist" / "app.js").read_text()[:200]
        self.assertIn(digest.hexdigest(), built, "web/src has changed: run ./dev web and commit web/dist")

    def test_a_killed_worker_is_missed_at_once(self):
        hub = self.start(Hub(self.folder))
        node = self.join(hub, "n", "40M")
        feed = Feed(hub, self.tokens["viewer"])
        self.addCleanup(feed.close)
        while not any(w["state"] == "serving" for w in feed.next("workers")["workers"]):
            pass
        # The line is opened when the hub has had the first heartbeat.
        harness.wait_until(lambda: "kvasir_hub_lines 1\n" in self.get(hub.url + "/metrics", self.tokens["viewer"]), "the line")
        node.kill()
        began = time.monotonic()
        while not all(run[2] == 0 for layer in feed.next("coverage")["layers"] for run in layer[1]):
            pass
        took = time.monotonic() - began
        print(f"missed {took:.2f} s after the kill")
        self.assertLess(took, 10)  # 2 s on an idle machine; heartbeats alone would take 30

    def test_a_hub_that_restarts_loses_nobody(self):
        hub = self.start(Hub(self.folder))
        self.join(hub, "n", "40M")
        serving = lambda: 'state="serving"} 1\n' in self.get(hub.url + "/metrics", self.tokens["viewer"])
        harness.wait_until(serving, "the worker to serve")
        port = hub.port
        hub.kill()
        hub = self.start(Hub(self.folder, port=port))
        harness.wait_until(serving, "the worker to be known again")
        harness.wait_until(lambda: "kvasir_hub_lines 1\n" in self.get(hub.url + "/metrics", self.tokens["viewer"]), "its line")

    def test_top_shows_the_same(self):
        hub = self.start(Hub(self.folder))
        self.join(hub, "n", "40M")
        environment = harness.clean_environment(KVASIR_TOKEN=self.tokens["viewer"])
        once = lambda *args, env=environment, check=True: harness.run([KVASIR, "top", hub.url, "--once", *args], env=env, check=check)
        harness.wait_until(lambda: "serving" in once().stdout, "kvasir top to show the worker")
        picture = once().stdout
        self.assertIn("tiny", picture)
        self.assertIn("held by nobody 0", picture)
        self.assertIn("workers 1", picture)
        self.assertGreaterEqual(picture.count("▄"), 4 * 32)  # one of two replicas
        refused = once(env=harness.clean_environment(), check=False)
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn("asks for a token", refused.stderr)
        unknown = once("--model", "other")
        self.assertIn("other", unknown.stdout)

    def test_metrics_are_as_documented(self):
        hub = self.start(Hub(self.folder))
        told = documented()
        process = told["The process"]
        node = self.join(hub, "n", "40M", "--metrics", "0")
        port = int(re.search(r"metrics on port (\d+)", harness.wait_until(
            lambda: next((line for line in node.err if "metrics on port" in line), None), "the port"))[1])
        harness.wait_until(lambda: "kvasir_worker_info" in self.get(f"http://127.0.0.1:{port}/metrics"), "the worker's metrics")
        worker = parse_metrics(self.get(f"http://127.0.0.1:{port}/metrics"))
        self.assertEqual(set(worker), told["Worker"] | process)
        self.assertGreater(worker["kvasir_worker_held_bytes"]["samples"][""], 1e6)

        families = parse_metrics(self.get(hub.url + "/metrics", self.tokens["viewer"]))
        self.assertEqual(set(families), told["Hub"] | process)
        self.assertEqual(families["kvasir_hub_experts"]["samples"], {'{model="tiny"}': 128})
        with self.assertRaises(urllib.error.HTTPError) as refused:
            self.get(hub.url + "/metrics")
        refused.exception.close()

        text = self.folder / "plugin.prom"
        slices = harness.three_slices(harness.TINY, self.folder)
        self.server(harness.TINY, harness.plugin_environment(local="fallback", KVASIR_METRICS_FILE=text)).complete("In", 4)
        plugin = lambda: parse_metrics(text.read_text())
        harness.wait_until(lambda: text.exists() and plugin()["kvasir_backbone_rounds_total"]["samples"][""] > 0, "the plugin's metrics")
        self.assertEqual(set(plugin()), told["Plugin"] | process)

        text = self.folder / "worker.prom"
        self.worker(slices[0], extra=["--metrics", text])
        harness.wait_until(text.exists, "the text file")
        self.assertEqual(set(parse_metrics(text.read_text())), told["Worker"] | process)

        everything = set().union(*told.values())
        graphs = (SOURCE / "packaging" / "grafana" / "kvasir.json").read_text()
        json.loads(graphs)
        for name in re.findall(r"kvasir_[a-z_]+", graphs):
            self.assertIn(name, everything)

    def test_logs_are_json_where_asked_and_hold_no_token(self):
        hub = self.start(Hub(self.folder, extra=["--log", "json"]))
        node = self.join(hub, "n", "40M", "--log", "json")
        harness.wait_until(lambda: any("serving" in line for line in node.err), "the node to serve")
        wrong = self.join(hub, "w", "40M", "--log", "json", token="kvasir_0123456789abcdef_" + "f" * 64)
        wrong.wait()
        quiet = self.join(hub, "q", "40M", "--quiet")
        node.stop()
        harness.wait_until(lambda: 'workers{model="tiny",state="serving"} 1' in self.get(hub.url + "/metrics", self.tokens["viewer"]),
                           "the quiet one to serve")
        quiet.stop()
        self.assertEqual(quiet.err, [])
        hub.stop()
        for process in (hub, node):
            lines = [json.loads(line) for line in process.err]
            self.assertGreater(len(lines), 1)
            for line in lines:
                self.assertEqual(set(line), {"time", "level", "program", "message"})
                self.assertRegex(line["time"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:?\d\d$")
        for process in (hub, node, wrong, quiet):
            text = "\n".join(process.out + process.err)
            for secret in [*self.tokens.values(), "f" * 64]:
                self.assertNotIn(secret.rsplit("_", 1)[-1], text)


if __name__ == "__main__":
    harness.main()
