"""The numeric classes beside exact: what each promises, over real workers.

Invariant: equal bits whoever computes. Fast: near enough to stock llama.cpp that its choices
are the same, in every row type, with as few bytes as it promises.
"""

import array
import math

import harness
from harness import HELD_OUT, TINY, SystemTest

RUN = ["--text", HELD_OUT, "--prompt-tokens", 48, "--ubatch", 512, "--decode", 8, "--fixed", "--threads", 1, "--no-repack"]
# Long enough for hot experts to be picked more than once.
HOT_RUN = ["--text", HELD_OUT, "--prompt-tokens", 600, "--ubatch", 64, "--decode", 100, "--threads", 1, "--no-repack"]
# 1 - cosine of a row of logits, less their mean, with stock's, for experts in f16, whose kernels do
# not quantise the rows. The median: where the router has a near tie, rounding decides which expert
# is used, and that row alone moves by 1e-3.
# A worker's tuned plan takes other kernels than stock does: 1e-8 seen with rows of f32.
MEDIAN_LOSS_MAX = {"f32": 1e-7, "f16": 1e-6, "bf16": 1e-5, "q8": 1e-4}
LOSS_MAX = 0.01
EXPERTS_USED = 4  # of the tiny model


def read_rows(path):
    """The rows of logits that kvasir-logits wrote."""
    data = path.read_bytes()
    width = int.from_bytes(data[8:12], "little")
    values = array.array("f", data[16:])
    return [values[i:i + width] for i in range(0, len(values), width)]


def centred_cosine(a, b):
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    ab = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b))
    return ab / math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))


class Numerics(SystemTest):
    def evaluate(self, model, env, options=RUN):
        """(report, rows of logits)."""
        path = self.folder / "logits"
        return harness.logits(model, env, *options, "--out", path), read_rows(path)

    def test_invariant_is_the_same_bits_over_anybody(self):
        """Three workers, one, and none: the local replica computes in the same class."""
        links = self.three_workers(TINY)
        one = self.worker(TINY)
        envs = [harness.plugin_environment(links, local="never", KVASIR_NUMERICS="invariant"),
                harness.plugin_environment([one], local="never", KVASIR_NUMERICS="invariant"),
                harness.plugin_environment(KVASIR_NUMERICS="invariant")]
        self.assertEqual(len({harness.logits(TINY, env, *RUN)["xxh3"] for env in envs}), 1)

    def check_near(self, rows, expected, median_max):
        self.assertEqual(len(rows), len(expected))
        losses = sorted(1 - centred_cosine(a, b) for a, b in zip(rows, expected))
        self.assertLess(losses[len(losses) // 2], median_max)
        self.assertLess(losses[-1], LOSS_MAX)

    def test_fast_is_near_stock_in_every_row_type(self):
        model = harness.requantized("F16")
        _, expected = self.evaluate(model, harness.clean_environment())
        workers = self.three_workers(model)
        for wire, median_max in MEDIAN_LOSS_MAX.items():
            with self.subTest(wire=wire):
                stats = self.folder / f"{wire}.json"
                env = harness.plugin_environment(workers, local="never", stats=stats, KVASIR_NUMERICS="fast", KVASIR_WIRE=wire)
                report, rows = self.evaluate(model, env)
                self.check_near(rows, expected, median_max)
                self.assertTrue(report["finite"])
                counters = harness.read_stats(stats)
                self.assertEqual(counters["pairs_local"], 0)
                self.assertGreater(counters["pairs_remote"], 0)

    def test_fast_with_a_part_computed_here(self):
        _, expected = self.evaluate(TINY, harness.clean_environment())
        worker = self.worker(harness.make_slice(TINY, self.folder / "half.gguf", "--layers", ":", "--experts", "0:20"))
        stats = self.folder / "stats.json"
        env = harness.plugin_environment([worker], stats=stats, KVASIR_NUMERICS="fast", KVASIR_WIRE="f32")
        _, rows = self.evaluate(TINY, env)
        self.check_near(rows, expected, MEDIAN_LOSS_MAX["f32"])
        counters = harness.read_stats(stats)
        self.assertGreater(counters["pairs_local"], 0)
        self.assertGreater(counters["pairs_remote"], 0)

    def test_auto_measures_and_stays_near(self):
        """On loopback bytes cost little: most rows travel in f32, but the trials in f16 too."""
        model = harness.requantized("F16")
        _, expected = self.evaluate(model, harness.clean_environment())
        worker = self.worker(model)
        env = harness.plugin_environment([worker], local="never", KVASIR_NUMERICS="fast", KVASIR_WIRE="auto")
        _, rows = self.evaluate(model, env)
        self.check_near(rows, expected, MEDIAN_LOSS_MAX["f16"])

    def test_hot_experts_change_no_bit(self):
        stats = self.folder / "stats.json"
        workers = self.three_workers(TINY)
        ours = harness.logits(TINY, harness.plugin_environment(workers, stats=stats, KVASIR_HOT="3M"), *HOT_RUN)
        self.assertEqual(ours["xxh3"], harness.logits(TINY, harness.clean_environment(), *HOT_RUN)["xxh3"])
        counters = harness.read_stats(stats)
        self.assertGreater(counters["hot_bytes"], 0)
        self.assertLessEqual(counters["hot_bytes"], 3 << 20)
        self.assertGreater(counters["pairs_local"], 0)
        self.assertGreater(counters["pairs_remote"], 0)

    def test_sums_take_few_bytes(self):
        """One worker: rows of f16 both ways, one back instead of one for each expert used."""
        worker = self.worker(TINY)
        received = {}
        for numerics, wire in (("exact", None), ("fast", "f16")):
            stats = self.folder / f"{numerics}.json"
            env = harness.plugin_environment([worker], local="never", stats=stats, KVASIR_NUMERICS=numerics, KVASIR_WIRE=wire)
            harness.logits(TINY, env, *RUN)
            received[numerics] = harness.read_stats(stats)["bytes_received"]
        self.assertLess(received["fast"], received["exact"] / EXPERTS_USED)


if __name__ == "__main__":
    harness.main()
