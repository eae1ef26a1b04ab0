"""Greedy tokens over three workers are stock llama.cpp's, for every weight type and on random weights.

The workers hold unequal sets with gaps, different in every layer. KVASIR_LOCAL=never makes
sure of where the experts ran: nothing can be computed on the backbone's side.
"""

import unittest

import harness
from harness import PROMPTS, TINY, SystemTest

N_TOKENS = 64


class Tokens(SystemTest):
    def check(self, model, local):
        workers = self.three_workers(model)
        stats_path = self.folder / "stats.json"
        server = self.server(model, harness.plugin_environment(workers, local=local, stats=stats_path))
        ours = [server.complete(p, N_TOKENS) for p in PROMPTS]
        self.assertEqual(server.stop(), 0, server.describe())
        stock = self.server(model, harness.clean_environment())
        theirs = [stock.complete(p, N_TOKENS) for p in PROMPTS]

        self.assertEqual([len(t) for t in ours], [N_TOKENS] * len(PROMPTS))
        self.assertEqual(ours, theirs)
        stats = harness.read_stats(stats_path)
        self.assertGreater(stats["pairs_remote"], 0)
        self.assertEqual(stats["pairs_local"], 0, stats)
        self.assertEqual(stats["invalid_answers"], 0)
        self.assertEqual(stats["workers_lost"], 0)
        self.assertEqual(stats["unknown_shapes"], [])
        self.assertEqual(stats["workers_up"], 3)

    def test_q4_k_m(self):
        self.check(TINY, local=None)

    def test_q8_0(self):
        self.check(harness.requantized("Q8_0"), local="never")

    def test_f16(self):
        self.check(harness.requantized("F16"), local="never")

    def test_random_weights(self):
        self.check(harness.random_model(), local="never")

    def test_prompts_differ(self):
        """The comparison means something: other prompts give other tokens."""
        stock = self.server(TINY, harness.clean_environment())
        tokens = [tuple(stock.complete(p, 16)) for p in PROMPTS]
        self.assertEqual(len(set(tokens)), len(PROMPTS))


if __name__ == "__main__":
    harness.main()
