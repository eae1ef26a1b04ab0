"""Strangers throw random bytes at the ports of worker, node and hub while a decode runs beside: nothing but closed
connections comes of it, not one token changes, and the logs stay short. KVASIR_SCAN_S: how long."""

import os
import random
import re
import socket
import statistics
import threading
import time

import harness
from harness import KVASIR, TINY
from swarm import Swarm

SCAN_S = float(os.environ.get("KVASIR_SCAN_S", "6"))
PIECES = [b"GET / HTTP/1.1\r\n\r\n", b"KVSR\x01\x00\x01\x00", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\xff" * 24, b"\x00" * 64,
          b"POST /api/expert-coverage HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b"SSH-2.0-scan\r\n",
          b"GET /api/expert-relay?session=a HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
          b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"]
LINES_AT_ONCE, LINES_A_SECOND = 60, 1  # base/log_limit.h


class Scanner(threading.Thread):
    def __init__(self, port, seed):
        super().__init__(daemon=True)
        self.port, self.rng, self.done, self.connections = port, random.Random(seed), threading.Event(), 0

    def run(self):
        while not self.done.is_set():
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=2) as s:
                    self.connections += 1
                    s.settimeout(self.rng.choice([0.01, 0.05, 0.2]))
                    for _ in range(self.rng.randrange(1, 4)):
                        if self.rng.random() < 0.5:
                            s.sendall(self.rng.choice(PIECES))
                        s.sendall(self.rng.randbytes(self.rng.randrange(0, 4096)))
                        s.recv(4096)
            except OSError:
                time.sleep(0.01)  # closed, refused for a moment, or silent: all fine


class PortScan(Swarm):
    def decode(self, server, want, seconds):
        """Seconds a decode took, by decode."""
        took, end = [], time.monotonic() + seconds
        while time.monotonic() < end or not took:
            began = time.monotonic()
            self.assertEqual(server.complete(harness.PROMPTS[0], 64), want)
            took.append(time.monotonic() - began)
        return took

    def test_random_bytes(self):
        env = harness.clean_environment(XDG_DATA_HOME=self.folder / "data")
        plain = self.worker(TINY)
        encrypted = self.start(harness.Process([KVASIR, "worker", "--serve", "127.0.0.1:0", "--tls", "--threads", 1, "--slice", TINY], env=env))
        encrypted_link = encrypted.next_line(r"127\.0\.0\.1:\d+#")
        hub = self.hub()
        node = self.join(hub, "node", "40M")
        node_port = harness.wait_until(lambda: next((m for line in node.err if (m := re.search(r"serving .* on port (\d+)", line))), None),
                                       f"the node to serve: {node.describe()}").group(1)
        stock = self.server(TINY, harness.clean_environment())
        want = stock.complete(harness.PROMPTS[0], 64)
        stock.stop()
        server = self.server(TINY, harness.plugin_environment([plain, encrypted_link]))

        quiet = self.decode(server, want, min(SCAN_S, 20))
        began = time.monotonic()
        ports = [plain.port, int(encrypted_link.split("#")[0].split(":")[1]), hub.port, int(node_port)]
        scanners = [Scanner(port, seed) for seed, port in enumerate(ports * 2)]
        for scanner in scanners:
            scanner.start()
        beside = self.decode(server, want, SCAN_S)
        for scanner in scanners:
            scanner.done.set()
            scanner.join(harness.STOP_S)
            self.assertGreater(scanner.connections, 5)
        print(f"{sum(s.connections for s in scanners)} connections of random bytes in {time.monotonic() - began:.0f} s; 64 tokens took "
              f"{statistics.median(quiet):.2f} s before and {statistics.median(beside):.2f} s beside them ({len(beside)} times)")
        # All are alive, serve, stop in order, and have not written a line for each.
        for process in (plain, encrypted, hub, node):
            self.assertTrue(process.running(), process.describe())
        self.assertEqual(server.complete(harness.PROMPTS[1], 16), server.complete(harness.PROMPTS[1], 16))
        for process in (server, plain, encrypted, node, hub):
            self.assertEqual(process.stop(), 0, process.describe())
        lines_max = LINES_AT_ONCE + LINES_A_SECOND * (time.monotonic() - began) + 40  # and their own
        for process in (plain, encrypted, node, hub):
            self.assertLess(len(process.err), lines_max, process.describe())


if __name__ == "__main__":
    harness.main()
