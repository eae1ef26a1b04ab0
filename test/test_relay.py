"""Workers that can only dial out: reached through the hub's relay, readable by nobody between."""

import json
import re
import socket
import subprocess
import threading
import time
import unittest
import urllib.request

import clients
import harness
import netlab
from harness import KVASIR, TINY, SystemTest

HUB = harness.BUILD / "bin" / "kvasir-hub"
PROMPT = harness.PROMPTS[0]
N = 24


class Hub(harness.Process):
    def __init__(self, folder, listen="127.0.0.1:0", prefix=(), extra=()):
        (folder / "models").mkdir(exist_ok=True)
        super().__init__([*prefix, HUB, "--data", folder / "hub", "--models", folder / "models", "--listen", listen, *extra])
        self.url = self.next_line(r"^https?://")
        self.port = int(self.url.rsplit(":", 1)[1])


def make_token(folder, scope):
    return harness.run([HUB, "token", "create", "--data", folder / "hub", "--scope", scope]).stdout.strip()


class RelayTest(SystemTest):
    """Three slices of the shipped model, each expert at exactly one worker."""

    def setUp(self):
        super().setUp()
        self.worker_token = make_token(self.folder, "worker")
        self.backbone_token = make_token(self.folder, "backbone")
        if not hasattr(RelayTest, "stock"):
            RelayTest.stock = self.server(TINY, harness.clean_environment()).complete(PROMPT, N)

    def relayed_worker(self, hub, slices, name, serve="127.0.0.1:0", prefix=(), extra=(), token=None, env=None, data=None):
        args = [*prefix, KVASIR, "worker", "--serve", serve, "--threads", 1, "--slice", *slices, "--relay", hub.url,
                "--data", self.folder / (data or name), "--relay-name", name, *extra]
        process = harness.Process(args, env=harness.clean_environment(KVASIR_RELAY_TOKEN=token or self.worker_token, **(env or {})))
        self.start(process)
        process.link = process.next_line(r"relay:")
        return process

    def backbone(self, hub, links, local="never", token=None, prefix=(), **extra):
        stats = self.folder / "stats.json"
        settings = {"KVASIR_RELAY": hub.url, "KVASIR_RELAY_TOKEN": token or self.backbone_token, "KVASIR_CONNECT_MS": 20000, **extra}
        env = harness.plugin_environment(links, local=local, stats=stats, **settings)
        server = self.server(TINY, env, prefix=prefix)
        server.stats = stats
        return server

    def check_all_remote(self, server):
        server.stop()
        counters = harness.read_stats(server.stats)
        self.assertGreater(counters["pairs_remote"], 0)
        self.assertEqual(counters["pairs_local"], 0)

    def workers_up(self, server):
        try:
            return harness.read_stats(server.stats)["workers_up"]
        except (OSError, ValueError):
            return -1

    def no_secret_in(self, *processes):
        for process in processes:
            for secret in (self.worker_token, self.backbone_token):
                self.assertNotIn(secret, "\n".join(process.out + process.err))


class Loopback(RelayTest):
    def test_tokens_are_identical_and_the_ledger_knows(self):
        hub = self.start(Hub(self.folder))
        workers = [self.relayed_worker(hub, [path], f"w{i}") for i, path in enumerate(harness.three_slices(TINY, self.folder))]
        server = self.backbone(hub, [w.link for w in workers])
        self.assertEqual(server.complete(PROMPT, N), self.stock)
        self.check_all_remote(server)

        def carried(hub):
            request = urllib.request.Request(hub.url + "/api/contributions", headers={"Authorization": f"Bearer {self.backbone_token}"})
            with urllib.request.urlopen(request, timeout=20) as answer:
                return {(e["worker_id"], e["side"]): e["bytes"] for e in json.load(answer)["entries"]}

        def settled(hub):
            before = carried(hub)
            time.sleep(6)  # longer than the relay keeps what it has counted to itself
            return before if len(before) == 6 and before == carried(hub) else None

        metered = harness.wait_until(lambda: settled(hub), "six directions in the ledger", 60)
        for i in range(3):
            self.assertGreater(metered[f"w{i}", "relay_to_worker"], 10_000)
            self.assertGreater(metered[f"w{i}", "relay_to_backbone"], 10_000)
        # What was metered survives a hub that dies.
        hub.kill()
        self.no_secret_in(hub, server, *workers)
        again = carried(self.start(Hub(self.folder)))
        self.assertTrue(all(again[key] >= n for key, n in metered.items()), (metered, again))

    def test_a_node_that_joined(self):
        """kvasir join --relay only: it opens no port to others, and the hub's table says how it is reached."""
        (self.folder / "models").mkdir()
        (self.folder / "models" / "tiny.gguf").symlink_to(TINY)
        hub = self.start(Hub(self.folder))
        node = self.start(harness.Process([KVASIR, "join", hub.url, "--memory", "40M", "--threads", 1, "--relay", "only",
                                           "--data", self.folder / "node", "--cache", self.folder / "node" / "slices"],
                                          env=harness.clean_environment(KVASIR_TOKEN=self.worker_token)))

        def route():
            request = urllib.request.Request(hub.url + "/api/expert-routes?model=tiny", headers={"Authorization": f"Bearer {self.backbone_token}"})
            with urllib.request.urlopen(request, timeout=20) as answer:
                return next(iter(json.load(answer)["workers"]), None)

        worker = harness.wait_until(route, f"the node to be counted: {node.describe()}")
        self.assertRegex(worker["url"], r"^relay:")
        server = self.backbone(hub, [worker["url"] + "#" + worker["fingerprint"]], KVASIR_TOKEN=worker["ticket"], local="fallback")
        self.assertEqual(server.complete(PROMPT, N), self.stock)
        server.stop()
        self.assertGreater(harness.read_stats(server.stats)["pairs_remote"], 0)
        self.no_secret_in(hub, node, server)

    def test_a_backbone_by_hub_over_relayed_nodes(self):
        """KVASIR_HUB alone: the table, the relay, grants and the ledger are the hub's; no node opens a port to others."""
        (self.folder / "models").mkdir()
        (self.folder / "models" / "tiny.gguf").symlink_to(TINY)
        hub = self.start(Hub(self.folder, extra=["--target", 1, "--heartbeat", 1]))
        nodes = [self.start(harness.Process([KVASIR, "join", hub.url, "--memory", "20M", "--threads", 1, "--relay", "only",
                                             "--data", self.folder / name, "--cache", self.folder / name / "slices"],
                                            env=harness.clean_environment(KVASIR_TOKEN=self.worker_token))) for name in ("n1", "n2", "n3")]

        def get(path, token=self.backbone_token):
            request = urllib.request.Request(hub.url + path, headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.load(answer)

        def covered():
            return all(s["replicas"] - s["reserved"] >= s["target"] for s in get("/api/expert-demand?model=tiny")["segments"])

        harness.wait_until(covered, f"the model to be covered: {[n.describe() for n in nodes]}", 90)
        workers = get("/api/expert-routes?model=tiny")["workers"]
        self.assertTrue(all(w["url"].startswith("relay:") for w in workers), workers)
        stats = self.folder / "stats.json"
        env = harness.plugin_environment(local="never", stats=stats, KVASIR_HUB=hub.url, KVASIR_TOKEN=self.backbone_token, KVASIR_CONNECT_MS=20000)
        server = self.server(TINY, env)
        server.stats = stats
        self.assertEqual(server.complete(PROMPT, N), self.stock)
        self.check_all_remote(server)
        # What the backbone received, what its workers served, in all and to it: a pair that was asked twice counts where it was computed.
        backbone_id = self.backbone_token.split("_")[1]

        def sides():
            pairs = dict.fromkeys(("backbone", "worker", "served_to"), 0)
            for entry in get("/api/contributions")["entries"]:
                if entry["side"] in pairs:
                    pairs[entry["side"]] += entry["pairs"]
                    self.assertTrue(entry["side"] == "worker" or entry["reporter"] == backbone_id, entry)
            return pairs

        received = harness.read_stats(stats)["pairs_remote"]
        harness.wait_until(lambda: sides()["backbone"] >= received and sides()["served_to"] >= received, f"both sides in the ledger: {sides()}")
        self.assertEqual(sides()["worker"], sides()["served_to"])  # nobody else was served
        self.no_secret_in(hub, server, *nodes)

    def test_plain_sessions_of_older_clients(self):
        """--relay-plain: the older framing in binary messages, the token in the address; the same bits as at the worker's port."""
        hub = self.start(Hub(self.folder))
        slice_ = harness.make_slice(TINY, self.folder / "one.gguf", "--layers", 1)
        worker = self.relayed_worker(hub, [slice_], "older", extra=["--relay-plain", "--layer", 1])
        self.assertEqual(worker.link, "relay:older")
        plain = self.worker(slice_)
        rows = [[((7 * i + t) % 13 - 6) / 8 for i in range(256)] for t in range(40)]
        selection = [[(t + k) % 32 for k in range(4)] for t in range(40)]
        relayed = clients.RelayedSocket(hub.port, "older", self.backbone_token)
        self.assertEqual(relayed.status, 101)
        with clients.RawClient(0, sock=relayed) as through_relay, clients.RawClient(plain.port) as direct:
            for n in (1, 40):  # the larger one in frames of more than 64 KiB
                answer = through_relay.compute(256, rows[:n], selection[:n])
                self.assertEqual(answer, direct.compute(256, rows[:n], selection[:n]))
        stranger = clients.RelayedSocket(hub.port, "older", "kvasir_wrong")
        self.addCleanup(stranger.close)
        self.assertEqual(stranger.status, 401)
        self.no_secret_in(hub, worker)

    def test_relay_killed_in_mid_generation(self):
        hub = self.start(Hub(self.folder))
        workers = [self.relayed_worker(hub, [path], f"w{i}") for i, path in enumerate(harness.three_slices(TINY, self.folder))]
        server = self.backbone(hub, [w.link for w in workers], local="fallback")
        status, tokens = server.stream_together([PROMPT], N, at_token=6, action=hub.kill)
        self.assertEqual((status, tokens[0]), (200, self.stock))
        harness.wait_until(lambda: self.workers_up(server) == 0, "the workers to be missed")
        time.sleep(2)
        back = self.start(Hub(self.folder, listen=f"127.0.0.1:{hub.port}"))
        began = time.monotonic()
        harness.wait_until(lambda: self.workers_up(server) == 3, "the workers to be back")
        print(f"all three workers were back {time.monotonic() - began:.1f} s after the relay")
        self.assertEqual(server.complete(PROMPT, N), self.stock)
        self.assertTrue(all(w.running() for w in workers))
        self.no_secret_in(hub, back, server, *workers)

    def test_refusals_are_said_and_the_run_goes_on(self):
        hub = self.start(Hub(self.folder))
        worker = self.relayed_worker(hub, [TINY], "w")
        other = self.worker(TINY)  # holds the same experts, and is reached directly
        address, fingerprint = worker.link.split("#")
        wrong = fingerprint[:-1] + ("0" if fingerprint[-1] != "0" else "1")

        def goes_on(links, pattern, **kwargs):
            server = self.backbone(hub, links, local="fallback", **{"KVASIR_CONNECT_MS": 1000, **kwargs})
            self.assertEqual(server.complete(PROMPT, N), self.stock)
            harness.wait_until(lambda: any(re.search(pattern, line) for line in server.err), f"a line like {pattern}: {server.describe()}")
            self.assertEqual(harness.read_stats(server.stats)["pairs_remote"], 0)
            self.no_secret_in(server, worker, hub)
            server.stop()
            # With another worker beside it nothing is computed here.
            server = self.backbone(hub, [*links, other.link], **{"KVASIR_CONNECT_MS": 1000, **kwargs})
            harness.wait_until(lambda: self.workers_up(server) == 1, f"the other worker: {server.describe()}")
            self.assertEqual(server.complete(PROMPT, N), self.stock)
            self.no_secret_in(server, worker, hub)
            self.check_all_remote(server)

        with self.subTest("a wrong fingerprint"):
            goes_on([f"{address}#{wrong}"], "not the pinned")
        with self.subTest("a token that is none"):
            goes_on([worker.link], "not known here", token="kvasir_" + "0" * 16 + "_" + "0" * 64)
        with self.subTest("a name that nobody has"):
            goes_on(["relay:nobody#" + fingerprint], "no worker waits")
        with self.subTest("a downgrade: the worker behind the fingerprint speaks plain text"):
            plain = self.worker(TINY)
            goes_on([f"{plain.link}#{fingerprint}"], "TLS")
        with self.subTest("another node's token"):
            thief = self.relayed_worker(hub, [TINY], "w", data="thief", token=make_token(self.folder, "worker"))
            harness.wait_until(lambda: any("belongs to another token" in line for line in thief.err), "the refusal")
            self.assertTrue(thief.running())
        with self.subTest("no fingerprint"):
            env = harness.plugin_environment([address], KVASIR_RELAY=hub.url, KVASIR_RELAY_TOKEN=self.backbone_token)
            done = harness.run([harness.LOGITS, "--model", TINY, "--prompt-tokens", 4, "--decode", 1, "--threads", 1, "--no-repack"], env=env)
            self.assertRegex(done.stderr, "kvasir: not loaded: .*fingerprint")
        with self.subTest("the token in the clear"):
            done = harness.run([KVASIR, "worker", "--serve", "0", "--slice", TINY, "--relay", "http://192.0.2.1", "--data", self.folder / "x"],
                               env=harness.clean_environment(KVASIR_RELAY_TOKEN=self.worker_token), check=False)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("in the clear", done.stderr)
            self.assertNotIn(self.worker_token, done.stderr)

    def test_through_a_proxy(self):
        """https_proxy: both ends dial the hub by CONNECT, under a name that only the proxy knows, and check the
        certificate behind it."""
        certificate, key = netlab.certificate(self.folder, "DNS:relay.example")
        hub = self.start(Hub(self.folder, extra=["--cert", certificate, "--key", key]))
        asked = []
        with socket.create_server(("127.0.0.1", 0)) as proxy:
            threading.Thread(target=serve_proxy, args=(proxy, hub.port, asked), daemon=True).start()
            hub.url = "https://relay.example"
            through = {"https_proxy": f"http://127.0.0.1:{proxy.getsockname()[1]}", "no_proxy": ""}
            worker = self.relayed_worker(hub, [TINY], "w", extra=["--relay-ca", certificate], env=through)
            server = self.backbone(hub, [worker.link], KVASIR_RELAY_CA=certificate, **through)
            self.assertEqual(server.complete(PROMPT, N), self.stock)
            self.check_all_remote(server)
            self.assertEqual(set(asked), {"CONNECT relay.example:443 HTTP/1.1"})
            # A certificate that no authority here vouches for.
            server = self.backbone(hub, [worker.link], local="fallback", **{**through, "KVASIR_CONNECT_MS": 1000})
            harness.wait_until(lambda: server.complete(PROMPT, 1) and any("cannot be verified" in line for line in server.err),
                               "the sentence about the certificate")
            proxy.shutdown(socket.SHUT_RDWR)


@unittest.skipUnless(netlab.inside(), "needs network namespaces and nft")
class Namespaces(RelayTest):
    """Backbone, hub and two workers on machines of their own; at the workers nothing comes in, and only 443 goes out."""

    def setUp(self):
        super().setUp()
        self.lan = netlab.Lan()
        self.addCleanup(self.lan.close)
        self.hub_host, self.backbone_host, *self.worker_hosts = [
            self.lan.host(name, f"10.9.0.{i + 1}") for i, name in enumerate(["hub", "backbone", "w1", "w2"])]
        certificate, key = netlab.certificate(self.folder, f"IP:{self.hub_host.address}")
        self.ca = certificate
        self.hub = self.start(Hub(self.folder, listen=f"{self.hub_host.address}:443", prefix=self.hub_host.command(),
                                  extra=["--cert", certificate, "--key", key]))
        halves = [harness.make_slice(TINY, self.folder / f"half{i}.gguf", "--experts", r) for i, r in enumerate(["0:16", "16:32"])]
        for host in self.worker_hosts:
            host.behind_nat()
        self.workers = [self.relayed_worker(self.hub, [half], host.name, serve=f"{host.address}:7070", prefix=host.command(),
                                            extra=["--relay-ca", certificate])
                        for host, half in zip(self.worker_hosts, halves)]

    def in_backbone(self, **kwargs):
        return self.backbone(self.hub, [w.link for w in self.workers], prefix=self.backbone_host.command(),
                             KVASIR_RELAY_CA=self.ca, **kwargs)

    def test_the_model_generates_and_nobody_reads_along(self):
        for host in self.worker_hosts:  # the wall is one
            done = subprocess.run(self.backbone_host.command("python3", "-c", "import socket,sys; socket.create_connection((sys.argv[1], 7070), 1)",
                                                             host.address), capture_output=True, text=True)
            self.assertIn("timed out", done.stderr)
        secrets = self.rows_in_the_clear()
        tap = netlab.Tap()
        server = self.in_backbone()
        self.assertEqual(server.complete(PROMPT, N), self.stock)
        self.check_all_remote(server)
        tap.close()
        self.assertGreater(tap.size(), 1_000_000)
        for secret in [b"KVSR", PROMPT.encode(), self.worker_token.encode(), self.backbone_token.encode(), *secrets]:
            self.assertFalse(tap.holds(secret), f"{secret[:40]!r} was on the wire")
        self.no_secret_in(self.hub, server, *self.workers)

    def rows_in_the_clear(self):
        """Pieces of rows and results as they would look; seen on the wire where a worker is plain."""
        plain = self.start(harness.Process([*self.hub_host.command(KVASIR, "worker", "--serve", f"{self.hub_host.address}:7071", "--insecure",
                                            "--insecure-anywhere", "--threads", 1, "--slice", TINY)]))
        link = plain.next_line(r":7071")
        tap = netlab.Tap()
        env = harness.plugin_environment([link], local="never", KVASIR_CONNECT_MS=20000)
        server = self.server(TINY, env, prefix=self.backbone_host.command())
        self.assertEqual(server.complete(PROMPT, N), self.stock)
        server.stop()
        tap.close()
        plain.stop()
        self.assertTrue(tap.holds(b"KVSR"))
        # The tails of full packets: the middles of rows, on their way there and back.
        full = [packet[-64:] for packet in tap.packets if len(packet) > 1400]
        self.assertGreater(len(full), 100)
        return [piece for piece in full if len(set(piece)) > 32][::50]

    def test_a_relayed_worker_moves_to_direct_when_that_is_possible(self):
        server = self.in_backbone()
        self.assertEqual(server.complete(PROMPT, N), self.stock)
        self.assertFalse(any("directly now" in line for line in server.err))
        for host in self.worker_hosts:
            host.open_up()
        harness.wait_until(lambda: sum("directly now" in line for line in server.err) == 2, f"both to be reached directly: {server.describe()}", 90)
        self.assertEqual(server.complete(PROMPT, N), self.stock)
        tap = netlab.Tap()  # now nothing passes the hub but what its waiting sockets say
        self.assertEqual(server.complete(PROMPT, N), self.stock)
        tap.close()
        through_hub = sum(len(p) for p in tap.packets if socket.inet_aton(self.hub_host.address) in p[26:34])
        self.assertLess(through_hub, tap.size() / 20)
        self.check_all_remote(server)

    def test_a_host_that_vanishes_is_noticed(self):
        server = self.in_backbone(local="fallback")
        self.assertEqual(server.complete(PROMPT, N), self.stock)
        began = time.monotonic()
        netlab.ip("link", "set", self.worker_hosts[0].outer, "down")
        self.assertEqual(server.complete(PROMPT, N), self.stock)
        harness.wait_until(lambda: any("the worker of session 'w1' is gone" in line for line in self.hub.err), "the relay to notice")
        print(f"a machine without a network was noticed by the relay in {time.monotonic() - began:.1f} s")
        netlab.ip("link", "set", self.worker_hosts[0].outer, "up")
        harness.wait_until(lambda: self.workers_up(server) == 2, "the worker to be back", 90)
        self.assertEqual(server.complete(PROMPT, N), self.stock)


def serve_proxy(listener, port, asked):
    """An HTTP proxy that knows CONNECT, to the hub whatever name it is asked for."""

    def pass_on(a, b):
        try:
            while data := a.recv(65536):
                b.sendall(data)
        except OSError:
            pass
        finally:
            for s in (a, b):
                try:
                    s.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        head = b""
        while b"\r\n\r\n" not in head and (data := client.recv(4096)):
            head += data
        asked.append(head.split(b"\r\n", 1)[0].decode())
        hub = socket.create_connection(("127.0.0.1", port))
        client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        threading.Thread(target=pass_on, args=(client, hub), daemon=True).start()
        threading.Thread(target=pass_on, args=(hub, client), daemon=True).start()


if __name__ == "__main__":
    netlab.enter()
    harness.main()
