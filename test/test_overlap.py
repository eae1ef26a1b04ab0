"""KVASIR_OVERLAP: a layer's shared expert is computed while the workers' answers are on their way."""

import harness
from harness import SystemTest

# An architecture with a shared expert and a gate of its own, and random weights: a difference in the last bit shows.
MODEL = ["--arch", "qwen2moe", "--layers", 3, "--experts", 24, "--top-k", 4, "--n-embd", 256, "--n-ff", 256, "--seed", 11]


class Overlap(SystemTest):
    def run_once(self, env, *options):
        return harness.logits(harness.synthetic("shared", *MODEL), env, "--threads", 1, "--no-repack", *options)["xxh3"]

    def test_the_bits_are_those_of_llama_cpp_alone(self):
        workers = self.three_workers(harness.synthetic("shared", *MODEL))
        for options in (["--prompt-tokens", 12, "--decode", 12], ["--prompt-tokens", 40, "--decode", 6, "--n-seq", 3]):
            expected = self.run_once(harness.clean_environment(), *options)
            for local in (None, "never"):
                stats = self.folder / "stats.json"
                env = harness.plugin_environment(workers, stats=stats, local=local, KVASIR_OVERLAP=1)
                self.assertEqual(self.run_once(env, *options), expected)
                counters = harness.read_stats(stats)
                self.assertGreater(counters["rounds_overlapped"], 0)
                self.assertEqual((counters["splits_local"], counters["pairs_local"]), (0, 0))

    def test_off_means_off(self):
        stats = self.folder / "stats.json"
        workers = self.three_workers(harness.synthetic("shared", *MODEL))
        self.run_once(harness.plugin_environment(workers, stats=stats), "--prompt-tokens", 12, "--decode", 4)
        self.assertEqual(harness.read_stats(stats)["rounds_overlapped"], 0)

    def test_a_lost_worker_changes_no_bit(self):
        model = harness.synthetic("shared", *MODEL)
        worker = self.worker(model)
        options = ["--model", model, "--prompt-tokens", 12, "--decode", 20, "--threads", 1, "--no-repack"]
        expected = harness.logits(model, harness.clean_environment(), *options[2:])["xxh3"]
        env = harness.plugin_environment([worker], KVASIR_OVERLAP=1)
        process = self.start(harness.Process([harness.LOGITS, *options, "--pause-before", 10], env=env, interactive=True))
        process.next_line("^paused 10$")
        worker.kill()
        process.tell("go on")
        self.assertIn(expected, process.next_line(r"^\{"))


if __name__ == "__main__":
    harness.main()
