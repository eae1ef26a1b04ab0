"""Strangers throw random bytes at the ports of worker and hub while a decode runs beside: nothing but closed
connections comes of it, and not one token changes."""

import os
import random
import socket
import threading
import time

import harness
from harness import KVASIR, TINY, SystemTest

SCAN_S = float(os.environ.get("KVASIR_SCAN_S", "6"))
PIECES = [b"GET / HTTP/1.1\r\n\r\n", b"KVSR\x01\x00\x01\x00", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\xff" * 24, b"\x00" * 64,
          b"POST /api/expert-coverage HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b"SSH-2.0-scan\r\n"]


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


class PortScan(SystemTest):
    def hub_port(self):
        models, data = self.folder / "models", self.folder / "hub"
        models.mkdir()
        (models / "tiny.gguf").symlink_to(TINY)
        hub = self.start(harness.Process([KVASIR.parent / "kvasir-hub", "--listen", "127.0.0.1:0", "--data", data, "--models", models]))
        return hub, int(hub.next_line(r"http://127\.0\.0\.1:\d+").rsplit(":", 1)[1])

    def test_random_bytes(self):
        env = harness.clean_environment(XDG_DATA_HOME=self.folder / "data")
        plain = self.worker(TINY)
        encrypted = self.start(harness.Process([KVASIR, "worker", "--serve", "127.0.0.1:0", "--tls", "--threads", 1, "--slice", TINY], env=env))
        encrypted_link = encrypted.next_line(r"127\.0\.0\.1:\d+#")
        hub, hub_port = self.hub_port()
        stock = self.server(TINY, harness.clean_environment())
        want = stock.complete(harness.PROMPTS[0], 64)
        stock.stop()
        server = self.server(TINY, harness.plugin_environment([plain, encrypted_link]))

        scanners = [Scanner(port, seed) for seed, port in enumerate([plain.port, int(encrypted_link.split("#")[0].split(":")[1]), hub_port] * 2)]
        for scanner in scanners:
            scanner.start()
        end, answers = time.monotonic() + SCAN_S, 0
        while time.monotonic() < end or answers == 0:
            self.assertEqual(server.complete(harness.PROMPTS[0], 64), want)
            answers += 1
        for scanner in scanners:
            scanner.done.set()
            scanner.join(harness.STOP_S)
            self.assertGreater(scanner.connections, 5)
        # All are alive, serve, and stop in order.
        for process in (plain, encrypted, hub):
            self.assertTrue(process.running(), process.describe())
        self.assertEqual(server.complete(harness.PROMPTS[1], 16), server.complete(harness.PROMPTS[1], 16))
        for process in (server, plain, encrypted, hub):
            self.assertEqual(process.stop(), 0, process.describe())


if __name__ == "__main__":
    harness.main()
