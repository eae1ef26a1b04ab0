"""Hubs and workers announce themselves on a local network, are found there, and tell nothing they should not."""

import json
import socket
import struct
import unittest

import harness
import netlab
from harness import KVASIR, TINY
from swarm import HUB, Swarm

MULTICAST = ("224.0.0.251", 5353)
PATIENCE_S = 240


def read_name(packet, at):
    """(labels, where it ends) of a name in a DNS message."""
    labels, end = [], None
    while length := packet[at]:
        if length >= 0xC0:
            end = end or at + 2
            at = struct.unpack_from("!H", packet, at)[0] & 0x3FFF
        else:
            labels.append(packet[at + 1:at + 1 + length].decode())
            at += 1 + length
    return labels, end or at + 1


def records(packet):
    """(labels, type, data) of each record in an answer."""
    _, _, questions, *counts = struct.unpack_from("!6H", packet)
    at = 12
    for _ in range(questions):
        at = read_name(packet, at)[1] + 4
    for _ in range(sum(counts)):
        name, at = read_name(packet, at)
        kind, _, _, length = struct.unpack_from("!HHIH", packet, at)
        yield name, kind, packet[at + 10:at + 10 + length]
        at += 10 + length


@unittest.skipUnless(netlab.inside(), f"needs network namespaces: {netlab.why_not()}")
class Discovery(Swarm):
    def setUp(self):
        super().setUp()
        self.lan = netlab.Lan()
        self.addCleanup(self.lan.close)
        self.hosts = [self.lan.host(f"m{i}", f"192.0.2.{i}") for i in (1, 2, 3)]
        netlab.ip("addr", "add", "192.0.2.9/24", "dev", netlab.BRIDGE)
        (self.folder / "models").mkdir()
        (self.folder / "models" / "tiny.gguf").symlink_to(TINY)

    def on(self, host, *args, **env):
        return self.start(harness.Process(host.command(*args), env=self.environment(**env)))

    @staticmethod
    def environment(**extra):
        return harness.launcher_environment(**extra) | {"KVASIR_DISCOVERY": "1"}

    def hub_on(self, host, *extra):
        hub = self.on(host, HUB, "--data", self.folder / "hub", "--models", self.folder / "models", "--listen", "0.0.0.0:8443", *extra)
        hub.url = hub.next_line(r"^https://")
        return hub

    def find_from(self, host, seconds=3):
        done = harness.run(host.command(KVASIR, "find", "--json", "--seconds", seconds), env=self.environment())
        return {(found["kind"], found["link"]) for found in map(json.loads, done.stdout.splitlines())}

    def until(self, what, command, said, env=None):
        """Runs it until it says that: on a loaded machine an answer may come after the time in which one is looked for."""
        return harness.wait_until(lambda: (done := harness.run(command, env=env or self.environment(), check=False)) and
                                  said(done) and done, what, PATIENCE_S)

    def texts(self, service):
        """What anybody is told who asks: the key=value pairs of each such service."""
        question = struct.pack("!6H", 7, 0, 1, 0, 0, 0)
        for label in (service, "_tcp", "local", ""):
            question += bytes([len(label)]) + label.encode()
        question += struct.pack("!HH", 12, 1)  # PTR, IN
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("192.0.2.9"))
            asking.settimeout(1)
            for _ in range(20):
                asking.sendto(question, MULTICAST)
                try:
                    packet = asking.recv(65536)
                except TimeoutError:
                    continue
                out = []
                for _, kind, data in records(packet):
                    if kind != 16:  # TXT
                        continue
                    pairs = []
                    while data:
                        pairs.append(data[1:1 + data[0]].decode())
                        data = data[1 + data[0]:]
                    out.append(sorted(pair for pair in pairs if pair))
                return out
        self.fail(f"nobody answers for {service}")

    def test_hub_and_worker_are_found_and_keep_their_secrets(self):
        home, away, third = self.hosts
        tap = netlab.Tap()
        hub = self.hub_on(home)
        self.assertEqual(hub.url, "https://192.0.2.1:8443")
        worker = self.on(away, KVASIR, "worker", "--serve", "0.0.0.0:7070", "--memory", "8M", "--threads", 1, "--data", self.folder / "w",
                         KVASIR_TOKEN=self.worker_token)
        link = worker.next_line(r"^192\.0\.2\.2:7070#")
        both = {("hub", hub.url), ("worker", link)}
        harness.wait_until(lambda: self.find_from(third) == both, "both to be found", PATIENCE_S)

        hub_says, = self.texts("_kvasir-hub")
        self.assertEqual([pair.split("=")[0] for pair in hub_says], ["name", "version"])
        worker_says, = self.texts("_kvasir-worker")
        self.assertEqual([pair.split("=")[0] for pair in worker_says], ["fingerprint", "version"])
        self.assertIn(link.split("#")[1], worker_says[0])

        self.until("doctor to list both", third.command(KVASIR, "doctor", "--json"),
                   lambda done: link in done.stdout and hub.url in done.stdout)
        said = harness.run(third.command(KVASIR, "doctor", "--json", "--no-discovery"), env=self.environment(), check=False)
        self.assertNotIn(link, said.stdout)

        # One that ends takes its word back.
        worker.stop()
        harness.wait_until(lambda: self.find_from(third) == {("hub", hub.url)}, "the worker to be gone", PATIENCE_S)
        tap.close()
        self.assertGreater(tap.size(), 1000)
        for secret in (self.worker_token, self.worker_token.rsplit("_", 1)[-1], str(self.folder)):
            self.assertFalse(tap.holds(secret.encode()))

    def test_a_node_joins_the_hub_whose_certificate_it_has(self):
        home, away, third = self.hosts
        hub = self.hub_on(home)
        def join(*extra):
            return away.command(KVASIR, "join", "--memory", "40M", "--threads", 1, "--once", "--data", self.folder / "n",
                                "--cache", self.folder / "n" / "slices", *extra)

        env = self.environment(KVASIR_TOKEN=self.worker_token)
        # A hub that nobody vouches for is shown, and not told the token.
        refused = self.until("the hub to be shown", join(), lambda done: hub.url in done.stderr, env)
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn("--ca-file", refused.stderr)
        authority = self.folder / "hub" / "hub-ca.pem"
        self.until("a node to join", join("--ca-file", authority), lambda done: done.returncode == 0, env)
        # The same for the backbone.
        self.until("the backbone's hub", third.command(KVASIR, "run", TINY, "--ca-file", authority, "--show"),
                   lambda done: f"KVASIR_HUB={hub.url}" in done.stdout, self.environment(KVASIR_TOKEN=self.backbone_token))
        # An impostor's certificate is another one.
        impostor = self.folder / "other"
        impostor.mkdir()
        netlab.certificate(impostor, "IP:192.0.2.1")
        refused = self.until("the hub to be tried", join("--ca-file", impostor / "hub.pem"), lambda done: hub.url in done.stderr, env)
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn("cannot be verified", refused.stderr)

    def test_who_does_not_want_to_is_not_announced(self):
        home, away, third = self.hosts
        self.hub_on(home, "--no-announce")
        worker = self.on(away, KVASIR, "worker", "--serve", "0.0.0.0:7070", "--memory", "8M", "--threads", 1, "--no-announce",
                         "--data", self.folder / "w")
        worker.next_line(r"^192\.0\.2\.2:7070#")
        seen = self.on(third, KVASIR, "worker", "--serve", "0.0.0.0:7070", "--memory", "8M", "--threads", 1, "--data", self.folder / "v")
        link = seen.next_line(r"^192\.0\.2\.3:7070#")
        harness.wait_until(lambda: self.find_from(third), "the one that does", PATIENCE_S)
        # Those that do not were there before it, and are still not among what is found.
        self.assertLessEqual(self.find_from(third), {("worker", link)})


if __name__ == "__main__":
    netlab.enter()
    harness.main()
