"""A worker that lies, with real llama.cpp: with every answer checked no token differs; with a share of
them it is found. Class of attack: a replayed or corrupted answer."""

import harness
from harness import TINY, SystemTest
from lying_proxy import KINDS, LyingProxy

PROMPT = harness.PROMPTS[0]
N_TOKENS = 48


class Liars(SystemTest):
    def proxy(self, worker, **kwargs):
        proxy = LyingProxy(worker.port, **kwargs)
        self.addCleanup(proxy.close)
        return proxy

    def generate(self, links, **extra):
        """(token ids, counters, log) of one completion."""
        stats = self.folder / "stats.json"
        server = self.server(TINY, harness.plugin_environment(links, stats=stats, **extra))
        tokens = server.complete(PROMPT, N_TOKENS)
        self.assertEqual(server.stop(), 0, server.describe())
        return tokens, harness.read_stats(stats), "\n".join(server.err)

    def setUp(self):
        super().setUp()
        if not hasattr(Liars, "stock"):
            server = self.server(TINY, harness.clean_environment())
            Liars.stock = server.complete(PROMPT, N_TOKENS)
            server.stop()

    def test_everything_checked_no_token_differs(self):
        for kind in KINDS:
            with self.subTest(kind=kind):
                liar = self.proxy(self.worker(TINY), share=0.05, kinds=(kind,))
                tokens, counters, log = self.generate([liar], KVASIR_SPOT_CHECK=1)
                self.assertEqual(tokens, Liars.stock)
                self.assertGreater(liar.lies, 0)
                if kind == "nan":
                    self.assertGreater(counters["invalid_answers"], 0)
                else:
                    self.assertGreater(counters["spot_wrong"], 0)
                    self.assertRegex(log, rf"kvasir: worker {liar.link} gave a wrong answer in layer \d+, expert \d+: value \d+ is ")
                self.assertEqual(counters["workers_up"], 0)

    def test_without_local_compute_others_judge(self):
        honest = [self.worker(TINY) for _ in range(2)]
        liar = self.proxy(self.worker(TINY), share=0.05)
        tokens, counters, log = self.generate([honest[0], liar, honest[1]], local="never", KVASIR_SPOT_CHECK=1)
        self.assertEqual(tokens, Liars.stock)
        self.assertEqual(counters["pairs_local"], 0)
        if liar.lies > 0:  # the faster replicas may have got all of it
            self.assertGreater(counters["spot_wrong"], 0)
            self.assertEqual(counters["workers_up"], 2)
        for worker in honest:
            self.assertNotIn(f"{worker.link} gave a wrong answer", log)

    def test_honest_workers_are_never_blamed(self):
        workers = self.three_workers(TINY)
        tokens, counters, log = self.generate(workers, KVASIR_SPOT_CHECK=1)
        self.assertEqual(tokens, Liars.stock)
        self.assertEqual(counters["spot_wrong"], 0)
        self.assertEqual(counters["workers_up"], 3)
        # Everything remote was computed twice; the rest (prompt experts on none) not at all.
        self.assertEqual(counters["spot_pairs"], counters["pairs_remote"])
        self.assertGreater(counters["spot_ns_sum"], 0)
        self.assertNotIn("wrong", log)

    def test_default_share_costs_little_and_finds_a_bold_liar(self):
        liar = self.proxy(self.worker(TINY), share=0.5)
        _, counters, log = self.generate([liar])
        self.assertGreater(counters["spot_wrong"], 0)
        self.assertLess(counters["spot_pairs"], counters["pairs_remote"])
        self.assertIn("gave a wrong answer", log)
        self.assertEqual(counters["workers_up"], 0)


if __name__ == "__main__":
    harness.main()
