"""kvasir verify: accepts workers that compute what llama.cpp computes, refuses one altered slab
and says where it is, and holds shards to the float64 oracle."""

import json

import harness
from harness import KVASIR, TINY, SystemTest

ACCEPTED, FAILED, REFUSED = 0, 1, 2
SHORT = ["--n-prompts", 2, "--tokens", 12, "--threads", 1]


class Verify(SystemTest):
    def verify(self, *args, status):
        done = harness.run([KVASIR, "verify", *args], env=harness.launcher_environment(), check=False)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout

    def verify_json(self, *args, status):
        return json.loads(self.verify(*args, "--json", status=status))

    def alter(self, path, model, layer, expert):
        """Changes one byte of one expert's weights in a slice."""
        alone = harness.make_slice(model, self.folder / "alone.gguf", "--layers", f"{layer}:{layer + 1}", "--experts", f"{expert}:{expert + 1}")
        slab = alone.read_bytes()[-4096:]  # a slice ends with its last weight's slab
        content = bytearray(path.read_bytes())
        self.assertEqual(content.count(slab), 1)
        content[content.index(slab) + 2000] ^= 0x5A
        path.write_bytes(content)

    def test_honest_workers_are_accepted(self):
        links = ",".join(worker.link for worker in self.three_workers(TINY))
        report = self.verify_json(TINY, "--workers", links, *SHORT, status=ACCEPTED)
        self.assertEqual((report["verdict"], report["numerics"]), ("accepted", "exact"))
        tokens = report["tokens"]
        self.assertEqual((tokens["greedy_same"], tokens["argmax_same"]), (2 * 12, 2 * 2))
        self.assertEqual((tokens["logprob_max_abs"], tokens["pairs_local"]), (0, 0))
        self.assertGreater(tokens["pairs_remote"], 0)
        self.assertEqual(sum(layer["experts"] for s in report["subjects"] for layer in s["layers"]), 4 * 32)
        for subject in report["subjects"]:
            for layer in subject["layers"]:
                self.assertEqual(layer["subject"], layer["cpu"])
                self.assertGreater(layer["subject"]["cosine"], 0.999)

    def test_fast_numerics_are_judged_by_nearness(self):
        links = ",".join(worker.link for worker in self.three_workers(TINY))
        report = self.verify_json(TINY, "--workers", links, "--numerics", "fast", "--wire", "f32", *SHORT, status=ACCEPTED)
        self.assertEqual((report["verdict"], report["numerics"]), ("accepted", "fast"))
        self.assertGreater(report["tokens"]["pairs_remote"], 0)
        for wire in ("f16", "bf16"):
            report = self.verify_json(TINY, "--workers", links, "--numerics", "fast", "--wire", wire, "--no-tokens", "--threads", 1, status=ACCEPTED)
            self.assertEqual(report["numerics"], "fast")
            # They did travel narrow: no row is the one that this CPU's exact engine gives.
            layers = [layer for s in report["subjects"] for layer in s["layers"]]
            self.assertTrue(all(layer["subject"] != layer["cpu"] for layer in layers))
            for layer in layers:
                self.assertGreater(layer["rows_alone"]["cosine"], 0.999999 if wire == "f16" else 0.99999)
        # Judged by the most likely token after a given text, not by where a greedy text goes.
        report = self.verify_json(TINY, "--workers", links, "--numerics", "fast", "--wire", "f16", *SHORT, status=ACCEPTED)
        self.assertEqual(report["tokens"]["argmax_same"], report["tokens"]["places"])
        self.verify(TINY, "--workers", links, "--wire", "f16", status=FAILED)

    def test_expanded_weights_come_near_to_the_truth(self):
        # ggml's own kernels round the activations to 8 bits, and stop at a cosine of 0.9999.
        links = ",".join(worker.link for worker in self.three_workers(TINY, extra=["--weights", "f32"]))
        report = self.verify_json(TINY, "--workers", links, "--numerics", "fast", "--no-tokens", "--threads", 1, status=ACCEPTED)
        layers = [layer for subject in report["subjects"] for layer in subject["layers"]]
        self.assertEqual(sum(layer["experts"] for layer in layers), 4 * 32)
        for layer in layers:
            self.assertGreaterEqual(layer["subject"]["cosine"], 0.99995)
            self.assertTrue(layer["subject"]["allclose_1e-3"])
        # They are not stock llama.cpp's bits, so class exact has none of them.
        report = self.verify_json(TINY, "--workers", links, "--no-tokens", "--threads", 1, status=ACCEPTED)
        self.assertEqual([subject["exact"] for subject in report["subjects"]], [False] * 3)

    def test_an_altered_slab_is_refused_and_named(self):
        slices = harness.three_slices(TINY, self.folder)
        held = {entry["layer"]: entry["held"] for entry in harness.inspect(slices[1])["layers"]}
        expert = held[2][0][0]
        self.alter(slices[1], TINY, 2, expert)
        with self.assertRaises(AssertionError):  # its hash betrays it at once
            self.worker(slices[1])
        workers = [self.worker(path, extra=["--no-verify"]) for path in slices]
        args = [TINY, "--workers", ",".join(worker.link for worker in workers), *SHORT]
        report = self.verify_json(*args, status=REFUSED)
        self.assertEqual([s["accepted"] for s in report["subjects"]], [True, False, True])
        bad = [(layer["layer"], b["expert"]) for layer in report["subjects"][1]["layers"] for b in layer["bad"]]
        self.assertEqual(bad, [(2, expert)])
        self.assertRegex(self.verify(*args, "--no-tokens", status=REFUSED), rf"(?s){workers[1].link}.*REFUSED.*layer 2 expert {expert}: ")

    def test_a_device_of_this_machine(self):
        report = self.verify_json(TINY, "--device", "CPU", *SHORT, status=ACCEPTED)
        self.assertGreater(report["tokens"]["pairs_remote"], 0)
        self.assertEqual(report["tokens"]["logprob_max_abs"], 0)
        self.verify(TINY, "--device", "Abacus0", status=FAILED)

    def test_the_oracle_on_the_model_and_on_its_slices(self):
        (own,) = self.verify_json(TINY, "--oracle", "--shards", 4, status=ACCEPTED)["files"]
        (cut,) = self.verify_json(TINY, *harness.three_slices(TINY, self.folder), "--oracle", status=ACCEPTED)["files"]
        for report in (own, cut):
            self.assertEqual(report["max_abs"], 0)
            self.assertLessEqual(report["partial_max_abs"], 3.6e-12)
            self.assertEqual((report["experts_touched"], report["experts"]), (128, 128))

    def test_the_oracle_refuses_a_slice_of_another_model(self):
        other = harness.synthetic("verify-a", "--layers", 1, "--experts", 8, "--seed", 1)
        wrong = harness.synthetic("verify-b", "--layers", 1, "--experts", 8, "--seed", 2)
        slices = harness.three_slices(wrong, self.folder)
        self.verify(other, *slices, "--oracle", status=REFUSED)


if __name__ == "__main__":
    harness.main()
