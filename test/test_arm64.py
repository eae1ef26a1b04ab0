"""The phone's processor: kvasir cross-built for 64-bit ARM, under qemu's emulation.

The slicer must write the bytes it writes here. A worker computes with other kernels, so it
pairs in fast numerics, and the gate judges it against the oracle on the real model's slice.
`./dev arm64` builds and runs this; without a cross-build or qemu it is skipped.
"""

import json
import os
import pathlib
import re
import shutil
import unittest

import harness
from harness import KVASIR, TINY, Process, SystemTest

QEMU = shutil.which("qemu-aarch64")
SYSROOT = os.environ.get("KVASIR_SYSROOT", "")
ARM_KVASIR = pathlib.Path(os.environ.get("KVASIR_ARM64_BUILD", harness.SOURCE / "build-arm64")) / "bin" / "kvasir"
# Cores of phones, with the instructions that choose among ggml's builds: none, dot products,
# and matrix products with SVE2.
CORES = ["cortex-a53", "cortex-a76", "cortex-a710"]
# Emulation is some twenty times slower than the machine.
EMULATED_S = 900


@unittest.skipUnless(QEMU and SYSROOT and ARM_KVASIR.exists(), "no cross-build, sysroot or qemu-aarch64: ./dev arm64 makes them")
class Arm64(SystemTest):
    @staticmethod
    def emulated(core=CORES[1]):
        return [QEMU, "-cpu", core, "-L", SYSROOT, ARM_KVASIR]

    def test_the_slicer_writes_the_same_bytes(self):
        for layers, experts in (("0:4", "0:32"), ("1:3", "3,7,9:20")):
            paths = [self.folder / "here.gguf", self.folder / "arm.gguf"]
            for program, path in zip(([KVASIR], self.emulated()), paths):
                harness.run([*program, "slice", TINY, "--layers", layers, "--experts", experts, "-o", path], timeout=EMULATED_S)
            self.assertEqual(paths[0].read_bytes(), paths[1].read_bytes())

    def test_the_gate_judges_a_worker(self):
        phone = harness.make_slice(TINY, self.folder / "phone.gguf", "--layers", "1:3", "--experts", "0:24")
        for core in CORES:
            with self.subTest(core):
                self.judge(core, phone)

    def judge(self, core, phone):
        worker = self.start(Process([*self.emulated(core), "worker", "--serve", "127.0.0.1:0", "--insecure", "--threads", 1, "--slice", phone]))
        link = re.search(r"127\.0\.0\.1:\d+", worker.next_line(r"127\.0\.0\.1:\d+", timeout=EMULATED_S)).group(0)
        done = harness.run([KVASIR, "verify", TINY, "--workers", link, "--n-prompts", 2, "--tokens", 8, "--json"], check=False,
                           timeout=EMULATED_S)
        worker.kill()
        self.assertIn(done.returncode, (0, 2), done.stderr)  # a verdict, whichever
        report = json.loads(done.stdout)
        (subject,) = report["subjects"]
        tokens = report["tokens"]
        print(f"\n{core}: {report['verdict']}; greedy {tokens['greedy_same']}/{tokens['greedy']}, argmax {tokens['argmax_same']}/{tokens['places']}, "
              f"logit cosine {tokens['logit_cosine_min']:.9f}; pairs {tokens['pairs_remote']} there, {tokens['pairs_local']} here")
        for layer in subject["layers"]:
            print(f"  layer {layer['layer']}: cosine {layer['subject']['cosine']:.9f}, this CPU {layer['cpu']['cosine']:.9f}, "
                  f"max|d| {layer['subject']['max_abs']:.3g}")
        self.assertFalse(subject["exact"])
        self.assertEqual([(layer["layer"], layer["experts"]) for layer in subject["layers"]], [(1, 24), (2, 24)])
        for layer in subject["layers"]:
            self.assertTrue(layer["gate"], layer)
            self.assertEqual(layer["bad"], [])
        self.assertGreater(tokens["pairs_remote"], 0)
        same = tokens["greedy_same"] == tokens["greedy"] and tokens["argmax_same"] == tokens["places"]
        self.assertEqual(report["verdict"], "accepted" if same else "refused")


if __name__ == "__main__":
    harness.main()
