"""Layers beside experts: whole layers of experts on one worker each, and the dense layers over
llama.cpp's own RPC servers while the experts go through the plugin. No token changes."""

import glob
import re
import unittest

import harness
from harness import PROMPTS, TINY, Process, SystemTest

RPC_SERVER = glob.glob("/usr/libexec/*/llama/bin/ggml-rpc-server")
RPC_BACKEND = glob.glob("/usr/lib/*/ggml/backends*/libggml-rpc.so")


needs_rpc = unittest.skipUnless(RPC_SERVER and RPC_BACKEND, "libggml0-backend-rpc or llama.cpp-tools-extra is not installed")


class LayerGrain(SystemTest):
    def layer_workers(self, model):
        """Two workers: one has the first layers whole, the other the rest."""
        n_layers = max(entry["layer"] for entry in harness.inspect(model)["layers"]) + 1
        half = n_layers // 2
        return [self.worker(harness.make_slice(model, self.folder / f"layers{i}.gguf", "--layers", layers, "--experts", ":"))
                for i, layers in enumerate((f"0:{half}", f"{half}:{n_layers}"))]

    def rpc_server(self):
        port = harness.unused_port()
        server = self.start(Process([*RPC_SERVER, "-H", "127.0.0.1", "-p", port, "-t", 1], env=harness.clean_environment()))
        harness.wait_until(lambda: any("Starting RPC server" in line for line in [*server.out, *server.err]) or not server.running(),
                           "ggml-rpc-server to start")
        self.assertTrue(server.running(), server.describe())
        return f"127.0.0.1:{port}"

    def tokens(self, model, env, extra):
        server = self.server(model, env, extra=extra)
        tokens = [server.complete(prompt, 48) for prompt in PROMPTS]
        self.assertEqual(server.stop(), 0, server.describe())
        return tokens, server

    def check(self, model, extra):
        stats_path = self.folder / "stats.json"
        env = harness.plugin_environment(self.layer_workers(model), local="never", stats=stats_path)
        over_workers, server = self.tokens(model, env, extra)
        alone, _ = self.tokens(model, harness.clean_environment(), extra)
        self.assertEqual(over_workers, alone)
        stats = harness.read_stats(stats_path)
        self.assertEqual(stats["pairs_local"], 0)
        self.assertGreater(stats["pairs_remote"], 0)
        return server

    def test_whole_layers_on_one_worker_each(self):
        self.check(harness.random_model(), [])

    def check_dense_layers_over_rpc(self, model):
        servers = [self.rpc_server(), self.rpc_server()]
        server = self.check(model, ["--rpc", ",".join(servers), "-ngl", "99", "--cpu-moe", "-v"])
        for address in servers:  # both hold dense layers
            self.assertRegex("\n".join(server.err), rf"RPC\d+\[{re.escape(address)}\] model buffer size = +(?!0\.00)")

    @needs_rpc
    def test_dense_layers_over_rpc(self):
        self.check_dense_layers_over_rpc(TINY)

    @needs_rpc
    def test_dense_layers_over_rpc_of_random_weights(self):
        self.check_dense_layers_over_rpc(harness.random_model())


if __name__ == "__main__":
    harness.main()
