"""Exact numerics: every logit over workers equals, bit for bit, the one computed locally.

Compared are files' hashes from kvasir-logits: workers, KVASIR_LOCAL=only, and llama.cpp
without the plugin (--no-repack). Workers are killed, stopped and replaced between two decode
steps, so that what happens is the same in every run.
"""

import json
import os
import signal

import harness
from harness import HELD_OUT, LOGITS, TINY, SystemTest

LONG_PROMPT = ["--text", HELD_OUT, "--prompt-tokens", 200, "--ubatch", 512, "--decode", 32, "--threads", 1, "--no-repack"]
FOUR_SEQUENCES = ["--text", HELD_OUT, "--prompt-tokens", 37, "--n-seq", 4, "--decode", 16, "--threads", 1, "--no-repack"]


class Logits(SystemTest):
    def check_all_equal(self, model, options):
        workers = self.three_workers(model)
        stats_path = self.folder / "stats.json"
        over_workers = harness.logits(model, harness.plugin_environment(workers, local="never", stats=stats_path), *options)
        local = harness.logits(model, harness.plugin_environment(local="only"), *options)
        replica = harness.logits(model, harness.plugin_environment(), *options)  # the fallback's own way, for every pair
        stock = harness.logits(model, harness.clean_environment(), *options)
        self.assertEqual(over_workers["xxh3"], local["xxh3"])
        self.assertEqual(over_workers["xxh3"], replica["xxh3"])
        self.assertEqual(over_workers["xxh3"], stock["xxh3"])
        self.assertEqual(over_workers["tokens"], stock["tokens"])
        self.assertTrue(stock["finite"])
        stats = harness.read_stats(stats_path)
        self.assertEqual(stats["pairs_local"], 0)
        self.assertGreater(stats["pairs_remote"], stock["rows"])

    def test_prompt_of_200_and_decode(self):
        self.check_all_equal(TINY, LONG_PROMPT)

    def test_two_threads(self):
        self.check_all_equal(TINY, ["--text", HELD_OUT, "--prompt-tokens", 40, "--decode", 4, "--threads", 2, "--no-repack"])

    def test_prompt_in_small_batches(self):
        self.check_all_equal(TINY, ["--text", HELD_OUT, "--prompt-tokens", 200, "--ubatch", 64, "--decode", 8, "--threads", 1, "--no-repack"])

    def test_four_sequences_in_a_batch(self):
        self.check_all_equal(TINY, FOUR_SEQUENCES)

    def test_q8_0(self):
        self.check_all_equal(harness.requantized("Q8_0"), LONG_PROMPT)

    def test_f16(self):
        self.check_all_equal(harness.requantized("F16"), LONG_PROMPT)

    def test_random_weights(self):
        self.check_all_equal(harness.random_model(), ["--prompt-tokens", 200, "--decode", 32, "--threads", 1, "--no-repack"])

    def test_threads_of_the_worker_change_nothing(self):
        one = [w.link for w in self.three_workers(TINY)]
        two = [w.link for w in self.three_workers(TINY, threads=2)]
        hashes = {harness.logits(TINY, harness.plugin_environment(links, local="never"), *LONG_PROMPT)["xxh3"] for links in (one, two)}
        self.assertEqual(len(hashes), 1)

    def test_replica_in_memory(self):
        ram = harness.logits(TINY, harness.plugin_environment(local="only", KVASIR_REPLICA="ram"), *LONG_PROMPT)
        mmap = harness.logits(TINY, harness.plugin_environment(local="only", KVASIR_REPLICA="mmap"), *LONG_PROMPT)
        self.assertEqual(ram["xxh3"], mmap["xxh3"])

    def test_repacked_buffers_are_another_reference(self):
        """The hash sees a difference: stock's repacked kernels give other bits."""
        repacked = harness.logits(TINY, harness.clean_environment(), *[o for o in LONG_PROMPT if o != "--no-repack"])
        plain = harness.logits(TINY, harness.clean_environment(), *LONG_PROMPT)
        if repacked["xxh3"] == plain["xxh3"]:
            self.skipTest("this CPU has no repacked kernels for these types")
        self.assertNotEqual(repacked["xxh3"], plain["xxh3"])


class Failures(SystemTest):
    """What happens to workers between decode steps changes no bit."""

    def interrupted_run(self, workers, actions, model=TINY, **env):
        """kvasir-logits with `actions` {step: callable}; its report and the plugin's counters."""
        stats_path = self.folder / "stats.json"
        pauses = [str(step) for step in sorted(actions)]
        process = self.start(harness.Process([LOGITS, "--model", model, *LONG_PROMPT, "--pause-before", *pauses],
                                             env=harness.plugin_environment(workers, stats=stats_path, **env), interactive=True))
        for step in sorted(actions):
            process.next_line(f"^paused {step}$", timeout=harness.RUN_S)
            actions[step]()
            process.tell("go on")
        report = json.loads(process.next_line(r"^\{", timeout=harness.RUN_S))
        self.assertEqual(process.wait(), 0, process.describe())
        return report, harness.read_stats(stats_path), process

    def setUp(self):
        super().setUp()
        self.expected = harness.logits(TINY, harness.clean_environment(), *LONG_PROMPT)["xxh3"]

    def test_killed_one_after_another(self):
        workers = self.three_workers(TINY)
        report, stats, process = self.interrupted_run(workers, {4: workers[0].kill, 12: workers[1].kill, 20: workers[2].kill})
        self.assertEqual(report["xxh3"], self.expected)
        self.assertGreater(stats["pairs_remote"], 0)
        self.assertGreater(stats["pairs_local"], 0)
        self.assertGreaterEqual(stats["workers_lost"], 3)
        self.assertEqual(stats["workers_up"], 0)
        self.assertIn("kvasir: ", "\n".join(process.err))

    def test_killed_with_a_replica_elsewhere(self):
        workers = [self.worker(TINY), self.worker(TINY)]
        report, stats, _ = self.interrupted_run(workers, {4: workers[0].kill}, local="never")
        self.assertEqual(report["xxh3"], self.expected)
        self.assertEqual(stats["pairs_local"], 0)
        self.assertGreaterEqual(stats["workers_lost"], 1)

    def test_stopped_but_still_connected(self):
        """A peer that holds its connection open and says nothing delays a round, not the run."""
        workers = self.three_workers(TINY)

        def stall():
            os.kill(workers[0].pid, signal.SIGSTOP)
            self.addCleanup(lambda: workers[0].running() and os.kill(workers[0].pid, signal.SIGCONT))

        report, stats, _ = self.interrupted_run(workers, {4: stall})
        self.assertEqual(report["xxh3"], self.expected)
        self.assertGreater(stats["pairs_local"], 0)
        self.assertLess(max(report["step_ms"]), 60_000)

    def test_lost_and_back_again(self):
        workers = self.three_workers(TINY)
        slices = [self.folder / f"slice{i}.gguf" for i in range(3)]

        def come_back():
            self.worker(slices[0], port=workers[0].port)

        report, stats, _ = self.interrupted_run(workers, {4: workers[0].kill, 8: come_back})
        self.assertEqual(report["xxh3"], self.expected)
        self.assertGreaterEqual(stats["workers_lost"], 1)

    def test_leaves_in_order(self):
        """SIGTERM: the worker drains and ends well; its experts are computed elsewhere."""
        workers = self.three_workers(TINY)
        report, stats, _ = self.interrupted_run(workers, {4: lambda: self.assertEqual(workers[0].stop(), 0)})
        self.assertEqual(report["xxh3"], self.expected)
        self.assertGreater(stats["pairs_local"], 0)


if __name__ == "__main__":
    harness.main()
