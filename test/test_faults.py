"""Things that are wrong from the start: each costs one sentence, and where it can, the run goes on."""

import json
import re
import socket
import struct
import threading

import harness
from harness import LOGITS, PLUGIN, TINY, SystemTest

PROMPT = harness.PROMPTS[0]


OPTIONS = ["--prompt-tokens", 16, "--decode", 4, "--threads", 1, "--no-repack"]


class Faults(SystemTest):
    def evaluate(self, env, check=True):
        """kvasir-logits to its end: (hash of all logits, what it and the plugin logged)."""
        done = harness.run([LOGITS, "--model", TINY, *OPTIONS], env=env, check=check)
        return json.loads(done.stdout)["xxh3"] if done.returncode == 0 else None, done.stderr

    def setUp(self):
        super().setUp()
        if not hasattr(Faults, "stock"):
            Faults.stock = self.evaluate(harness.clean_environment())[0]

    def check_goes_on(self, env, sentence):
        ours, log = self.evaluate(env)
        self.assertEqual(ours, Faults.stock)
        self.assertRegex(log, sentence)
        return log

    def test_worker_unreachable(self):
        stats = self.folder / "stats.json"
        link = f"127.0.0.1:{harness.unused_port()}"
        env = harness.plugin_environment([link], stats=stats, KVASIR_CONNECT_MS=300)
        self.check_goes_on(env, rf"kvasir: .*{link}")
        counters = harness.read_stats(stats)
        self.assertGreater(counters["pairs_local"], 0)
        self.assertEqual(counters["pairs_remote"], 0)

    def test_worker_unreachable_and_no_replica(self):
        link = f"127.0.0.1:{harness.unused_port()}"
        env = harness.plugin_environment([link], local="never", KVASIR_CONNECT_MS=100)
        ours, log = self.evaluate(env, check=False)
        self.assertIsNone(ours)
        self.assertRegex(log, rf"kvasir: .*{link}")
        self.assertIn("llama_decode failed", log)

    def test_slice_of_another_model(self):
        other = harness.make_slice(harness.random_model(), self.folder / "other.gguf")
        stats = self.folder / "stats.json"
        worker = self.worker(other)
        server = self.server(TINY, harness.plugin_environment([worker], stats=stats, KVASIR_CONNECT_MS=1000))
        tokens = server.complete(PROMPT, 16)
        # Said some seconds after the first round: a worker may hold layers not seen yet.
        harness.wait_until(lambda: any(re.search(rf"kvasir: .*{worker.link}.*model", line) for line in server.err),
                           f"the sentence about {worker.link}")
        server.stop()
        counters = harness.read_stats(stats)
        self.assertEqual(counters["pairs_remote"], 0)
        self.assertGreater(counters["pairs_local"], 0)
        self.assertEqual(tokens, self.server(TINY, harness.clean_environment()).complete(PROMPT, 16))

    def test_same_shape_other_weights(self):
        """A model of the same geometry is told apart by its weights, never used by mistake."""
        one = harness.synthetic("twin1", "--layers", 2, "--experts", 8, "--n-embd", 256, "--n-ff", 256, "--seed", 1)
        two = harness.synthetic("twin2", "--layers", 2, "--experts", 8, "--n-embd", 256, "--n-ff", 256, "--seed", 2)
        stats = self.folder / "stats.json"
        worker = self.worker(two)
        ours = harness.logits(one, harness.plugin_environment([worker], stats=stats, KVASIR_CONNECT_MS=1000), *OPTIONS)
        self.assertEqual(ours["xxh3"], harness.logits(one, harness.clean_environment(), *OPTIONS)["xxh3"])
        self.assertEqual(harness.read_stats(stats)["pairs_remote"], 0)

    def test_experts_that_no_worker_holds(self):
        half = harness.make_slice(TINY, self.folder / "half.gguf", "--layers", "1:3", "--experts", "0:16")
        stats = self.folder / "stats.json"
        worker = self.worker(half)
        ours, _ = self.evaluate(harness.plugin_environment([worker], stats=stats))
        self.assertEqual(ours, Faults.stock)
        counters = harness.read_stats(stats)
        self.assertGreater(counters["pairs_remote"], 0)
        self.assertGreater(counters["pairs_local"], 0)

    def test_tools_of_llama_cpp(self):
        """The plugin is loaded by llama.cpp's own tools, without a flag."""
        stats = self.folder / "stats.json"
        worker = self.worker(TINY)
        done = harness.run(["llama-completion", "-m", TINY, "-p", PROMPT, "-n", 8, "--temp", 0, "-no-cnv", "--no-repack", "-t", 1, "-c", 256],
                           env=harness.plugin_environment([worker], local="never", stats=stats))
        self.assertIn(PROMPT, done.stdout)
        counters = harness.read_stats(stats)
        self.assertGreater(counters["pairs_remote"], 0)
        self.assertEqual(counters["pairs_local"], 0)

    def test_no_workers_named(self):
        ours, _ = self.evaluate(harness.plugin_environment())
        self.assertEqual(ours, Faults.stock)

    def test_worker_of_another_protocol_version(self):
        """A peer that answers HELLO in version 999: refused in words, the run goes on."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            link = f"127.0.0.1:{listener.getsockname()[1]}"

            def answer():
                while True:
                    try:
                        connection, _ = listener.accept()
                    except OSError:
                        return
                    with connection:
                        connection.recv(65536)
                        connection.sendall(struct.pack("<4sHBBQII", b"KVSR", 999, 1, 0, 0, 0, 0))

            threading.Thread(target=answer, daemon=True).start()
            self.check_goes_on(harness.plugin_environment([link], KVASIR_CONNECT_MS=500), r"kvasir: .*version.*999|kvasir: .*999.*version")
            listener.shutdown(socket.SHUT_RDWR)

    def test_peer_that_is_no_worker(self):
        """An HTTP server, say, or a peer that accepts and says nothing."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            link = f"127.0.0.1:{listener.getsockname()[1]}"
            ours, _ = self.evaluate(harness.plugin_environment([link], KVASIR_CONNECT_MS=300))
            self.assertEqual(ours, Faults.stock)

    def test_unknown_ggml(self):
        env = harness.plugin_environment(libraries=["another_ggml_version"])
        log = self.check_goes_on(env, r"kvasir: not loaded: this plugin knows ggml 0\.27")
        self.assertIn("9.99.0", log)

    def test_unknown_variable(self):
        self.check_goes_on(harness.plugin_environment(KVASIR_WORKER="127.0.0.1:1"), r"kvasir: the variable KVASIR_WORKER is not known")

    def test_bad_values(self):
        for name, value, sentence in [
                ("KVASIR_LOCAL", "sometimes", r"KVASIR_LOCAL=sometimes is not known; use one of: fallback, never, only"),
                ("KVASIR_REPLICA", "tape", r"KVASIR_REPLICA=tape is not known"),
                ("KVASIR_NUMERICS", "loose", r"KVASIR_NUMERICS=loose is not known"),
                ("KVASIR_CONNECT_MS", "soon", r"KVASIR_CONNECT_MS=soon is not a number"),
                ("KVASIR_WORKERS", "127.0.0.1", r"'127\.0\.0\.1' is not an address"),
                ("KVASIR_WORKERS", "host:99999", r"99999"),
                ("KVASIR_CONFIG", "/nonexistent.json", r"cannot read the settings file"),
                ("KVASIR_LOCAL", "never", r"KVASIR_LOCAL=never needs workers")]:
            with self.subTest(name=name, value=value):
                env = harness.plugin_environment(**{name: value})
                self.check_goes_on(env, r"kvasir: not loaded: .*" + sentence)

    def test_settings_file(self):
        config = self.folder / "kvasir.json"
        stats = self.folder / "stats.json"
        config.write_text(f'{{"KVASIR_LOCAL": "only", "KVASIR_STATS_FILE": "{stats}"}}')
        ours, _ = self.evaluate(harness.plugin_environment(KVASIR_CONFIG=config))
        self.assertEqual(ours, Faults.stock)
        self.assertGreater(harness.read_stats(stats)["splits_local"], 0)

        config.write_text('{"KVASIR_LOCALE": "only"}')
        self.check_goes_on(harness.plugin_environment(KVASIR_CONFIG=config), r"unknown name 'KVASIR_LOCALE'")

    def test_port_in_use(self):
        first = self.worker(TINY)
        done = harness.run([harness.KVASIR, "worker", "--serve", str(first.port), "--insecure", "--slice", TINY], check=False)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, rf"{first.port}.*in use|in use.*{first.port}")
        self.assertTrue(first.running())


if __name__ == "__main__":
    harness.main()
