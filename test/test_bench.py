"""kvasir bench prints what it says it measures: one object a line with --json, a table without."""

import json

import harness
from harness import KVASIR, SystemTest


def lines(*arguments):
    done = harness.run([KVASIR, "bench", *arguments, "--json"])
    return [json.loads(line) for line in done.stdout.splitlines()]


class Bench(SystemTest):
    @classmethod
    def setUpClass(cls):
        if not KVASIR.exists():
            raise AssertionError(f"{KVASIR} is missing; build it first.")

    def test_dispatch_measures_rounds_and_echoes_of_the_same_bytes(self):
        measured = lines("dispatch", "--rounds", 20, "--gap-ms", "0,0.1", "--n-embd", 256, "--top-k", 4)
        self.assertEqual({(m["form"], m["stream"], m["gap_ms"]) for m in measured},
                         {(f, s, g) for f in ("exact", "f16 sums") for s in ("plain", "tls") for g in (0, 0.1)})
        for m in measured:
            self.assertGreater(m["echo_p50_us"], 0)
            self.assertGreaterEqual(m["round_p99_us"], m["round_p50_us"])
            # Four rows come back, or their sum in half the bytes a number.
            rows, row_bytes = (4, 4 * 256) if m["form"] == "exact" else (1, 2 * 256)
            self.assertGreater(m["bytes_back"], rows * row_bytes)
            self.assertLess(m["bytes_back"], rows * row_bytes + 256)
        table = harness.run([KVASIR, "bench", "dispatch", "--rounds", 2, "--gap-ms", 0, "--n-embd", 64]).stdout
        self.assertRegex(table, r"(?m)^f16 sums +tls +0 ")

    def test_worker_compares_with_naive_ggml_and_names_the_plan(self):
        shape = ("--experts", 8, "--top-k", 2, "--n-embd", 512, "--n-ff", 256, "--threads", 1, "--pairs", 1)
        measured = lines("worker", *shape, "--batch", "1,8")
        self.assertEqual([m["batch"] for m in measured], [1, 8])
        for m in measured:
            self.assertGreater(m["ratio"], 0)
            self.assertIn("MUL_MAT", m["plan"])
        exact, = lines("worker", *shape, "--batch", 8, "--numerics", "exact", "--plot", self.folder / "plot.svg")
        self.assertEqual(exact["numerics"], "exact")
        self.assertIn("<svg", (self.folder / "plot.svg").read_text())


if __name__ == "__main__":
    harness.main()
