"""A GPU backbone and a GPU worker, on any CPU: Mesa's llvmpipe is a Vulkan device like others.

The backbone's dense layers run on it while the experts go to workers. The worker on it is no
build of the reference's bits: the gate judges how near it comes to the oracle, and its tokens.
"""

import glob
import json
import re
import unittest

import harness
from harness import KVASIR, PROMPTS, TINY, Process, SystemTest

INSTALLED = glob.glob("/usr/lib/*/ggml/backends*/libggml-vulkan.so") and glob.glob("/usr/share/vulkan/icd.d/lvp_icd*.json")
# ggml leaves out Vulkan devices that are CPUs unless they are asked for by number.
LLVMPIPE = {"GGML_VK_VISIBLE_DEVICES": "0"}


@unittest.skipUnless(INSTALLED, "libggml0-backend-vulkan or mesa-vulkan-drivers is not installed")
class Vulkan(SystemTest):
    def tokens(self, env):
        server = self.server(TINY, env, extra=["-ngl", "99", "--cpu-moe", "-v"])
        tokens = [server.complete(prompt, 32) for prompt in PROMPTS]
        self.assertEqual(server.stop(), 0, server.describe())
        self.assertRegex("\n".join(server.err), r"Vulkan0 model buffer size = +(?!0\.00)")
        return tokens

    def test_gpu_backbone(self):
        stats_path = self.folder / "stats.json"
        over_workers = self.tokens(harness.plugin_environment(self.three_workers(TINY), local="never", stats=stats_path, **LLVMPIPE))
        self.assertEqual(over_workers, self.tokens(harness.clean_environment(**LLVMPIPE)))
        stats = harness.read_stats(stats_path)
        self.assertEqual(stats["pairs_local"], 0)
        self.assertGreater(stats["pairs_remote"], 0)

    def test_gpu_worker(self):
        worker = self.start(Process([KVASIR, "worker", "--serve", "127.0.0.1:0", "--insecure", "--device", "Vulkan0", "--slice", TINY],
                                    env=harness.clean_environment(**LLVMPIPE)))
        # llvmpipe compiles every shader for this CPU first, which takes the longest of all this.
        link = re.search(r"127\.0\.0\.1:\d+", worker.next_line(r"127\.0\.0\.1:\d+", timeout=harness.RUN_S)).group(0)
        done = harness.run([KVASIR, "verify", TINY, "--workers", link, "--n-prompts", 4, "--tokens", 16, "--json"], check=False)
        self.assertIn(done.returncode, (0, 2), done.stderr)  # a verdict, whichever
        report = json.loads(done.stdout)
        (subject,) = report["subjects"]
        self.assertFalse(subject["exact"])
        for layer in subject["layers"]:
            print(f"layer {layer['layer']}: cosine {layer['subject']['cosine']:.9f}, this CPU {layer['cpu']['cosine']:.9f}, "
                  f"max|d| {layer['subject']['max_abs']:.3g}")
            self.assertEqual(layer["experts"], 32)
            self.assertTrue(layer["gate"], layer)
            self.assertEqual(layer["bad"], [])
        print({k: report["tokens"][k] for k in ("greedy", "greedy_same", "places", "argmax_same", "logit_cosine_min")}, report["verdict"])
        self.assertEqual(report["tokens"]["pairs_local"], 0)
        self.assertGreater(report["tokens"]["pairs_remote"], 0)
        # What the verdict has to follow from: the most likely token after each text, near ties or not.
        same = report["tokens"]["argmax_same"] == report["tokens"]["places"]
        self.assertEqual(report["verdict"], "accepted" if same else "refused")


if __name__ == "__main__":
    harness.main()
