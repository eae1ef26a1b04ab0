"""A build with sanitizers: the plugin is loaded by the stock llama.cpp with the sanitizer in its process, and what any
process finds fails the test that started it."""

import os
import pathlib
import subprocess

import harness
import sanitizers
from harness import PLUGIN, PROMPTS, TINY, SystemTest

N_TOKENS = 32
BUGS = {"libasan": {"overrun": "heap-buffer-overflow", "leak": "LeakSanitizer", "shift": "AddressSanitizer: ABRT"},
        "libtsan": {"race": "data race"}}


class Sanitizers(SystemTest):
    def test_the_plugin_in_the_stock_llama_server(self):
        workers = self.three_workers(TINY)
        stats = self.folder / "stats.json"
        server = self.server(TINY, harness.plugin_environment(workers, stats=stats), parallel=4)
        maps = pathlib.Path(f"/proc/{server.pid}/maps").read_text()
        self.assertIn(os.path.realpath(sanitizers.library(PLUGIN)), maps)
        self.assertIn(os.path.realpath(PLUGIN), maps)
        status, ours = server.stream_together(PROMPTS, N_TOKENS)
        self.assertEqual(status, 200, ours)
        workers[0].kill()  # its share is computed by others, or here
        again = server.complete(PROMPTS[0], N_TOKENS)
        self.assertEqual(server.stop(), 0, server.describe())

        stock = self.server(TINY, harness.clean_environment(), parallel=4)
        self.assertEqual((200, ours), stock.stream_together(PROMPTS, N_TOKENS))
        self.assertEqual(again, stock.complete(PROMPTS[0], N_TOKENS))
        counters = harness.read_stats(stats)
        self.assertGreater(counters["pairs_remote"], 0)
        self.assertEqual(counters["invalid_answers"], 0)

    def test_a_finding_is_not_missed(self):
        """By a program with a bug for each sanitizer, whose exit status nobody looks at."""
        program = harness.BUILD / "test-bin" / "sanitizer_canary"
        for bug, expected in BUGS[pathlib.Path(sanitizers.library(program)).name.split(".")[0]].items():
            with self.subTest(bug=bug):
                subprocess.run([program, bug], stdin=subprocess.DEVNULL, capture_output=True, timeout=harness.RUN_S)
                self.assertRegex(sanitizers.take_reports(), expected)
                subprocess.run([program, "none"], stdin=subprocess.DEVNULL, capture_output=True, timeout=harness.RUN_S)
                self.assertEqual(sanitizers.take_reports(), "")


if __name__ == "__main__":
    harness.main()
