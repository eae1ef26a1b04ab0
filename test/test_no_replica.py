"""KVASIR_REPLICA=none: a backbone that holds no expert, from a file without any."""

import os
import re
import threading
import time

import harness
import sanitizers
from harness import HELD_OUT, LOGITS, TINY, SystemTest

RUN = ["--text", HELD_OUT, "--prompt-tokens", 48, "--decode", 8, "--threads", 1, "--no-repack"]
# Experts of 52 GB in Q4_K, and what one needs beside them.
HUGE = ["--layers", 24, "--experts", 256, "--top-k", 8, "--n-embd", 3072, "--n-ff", 1792, "--vocab", 150000, "--sparse"]
PROMPT = harness.PROMPTS[0]


def resident_bytes(pid):
    with open(f"/proc/{pid}/status") as status:
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read()).group(1)) * 1024


class NoReplica(SystemTest):
    def backbone(self, model=TINY):
        return harness.make_slice(model, self.folder / "backbone.gguf", "--backbone")

    def environment(self, workers, **extra):
        return harness.plugin_environment(workers, KVASIR_REPLICA="none", **extra)

    def test_same_bits_as_the_whole_model(self):
        stats = self.folder / "stats.json"
        workers = self.three_workers(TINY)
        ours = harness.logits(self.backbone(), self.environment(workers, stats=stats), *RUN)
        self.assertEqual(ours["xxh3"], harness.logits(TINY, harness.clean_environment(), *RUN)["xxh3"])
        self.assertEqual(harness.read_stats(stats)["pairs_local"], 0)

    def test_same_bits_whichever_way_the_file_is_read(self):
        worker = self.worker(TINY)
        backbone = self.backbone()
        hashes = {harness.logits(backbone, self.environment([worker]), *RUN, *way)["xxh3"] for way in ([], ["--no-mmap"])}
        self.assertEqual(len(hashes), 1)

    def refused(self, model, env):
        done = harness.run([LOGITS, "--model", model, *RUN], env=env, check=False)
        self.assertNotEqual(done.returncode, 0)
        return done.stderr

    def test_a_backbone_file_computes_nothing_by_itself(self):
        """Its holes must never be taken for weights."""
        worker = self.worker(TINY)
        for env in (harness.plugin_environment([worker]), harness.plugin_environment(local="only"), harness.plugin_environment()):
            self.assertIn("KVASIR_REPLICA=none", self.refused(self.backbone(), env))

    def test_a_whole_model_is_not_what_it_needs(self):
        self.assertIn("kvasir slice MODEL --backbone", self.refused(TINY, self.environment([self.worker(TINY)])))

    def test_waits_fails_in_words_and_recovers(self):
        """Every replica of the experts is gone: the request fails after the wait, the server does not."""
        workers = [self.worker(TINY), self.worker(TINY)]
        server = self.server(self.backbone(), self.environment(workers, KVASIR_NO_REPLICA_MS=1500))
        tokens = server.complete(PROMPT, 16)
        for worker in workers:
            worker.kill()
        start = time.monotonic()
        status, _ = server.try_complete(PROMPT, 16)
        self.assertEqual(status, 500)
        self.assertGreater(time.monotonic() - start, 1.4)
        harness.wait_until(lambda: any(re.search(r"kvasir: .*layer \d+.*expert", line) for line in server.err), "layer and experts in the log")
        # A worker returns within the wait of the next request.
        back = self.worker(TINY, port=workers[0].port)
        harness.wait_until(lambda: server.try_complete(PROMPT, 16)[0] == 200, "the worker's return")
        self.assertEqual(server.complete(PROMPT, 16), tokens)
        self.assertTrue(back.running() and server.running())

    def test_waits_for_a_worker_that_comes_back_in_time(self):
        worker = self.worker(TINY)
        server = self.server(self.backbone(), self.environment([worker], KVASIR_NO_REPLICA_MS=60000))
        tokens = server.complete(PROMPT, 16)
        worker.kill()
        answer = {}
        asking = threading.Thread(target=lambda: answer.update(tokens=server.complete(PROMPT, 16)))
        asking.start()
        time.sleep(0.5)
        self.worker(TINY, port=worker.port)
        asking.join(harness.RUN_S)
        self.assertEqual(answer.get("tokens"), tokens)

    def test_a_huge_backbone_starts_at_once(self):
        """The file of a 60 GB model: its time and memory are those of the dense weights."""
        model = self.folder / "huge.gguf"
        harness.run([harness.KVASIR, "synth", *HUGE, "-o", model])
        size = model.stat().st_size
        self.assertGreater(size, 55e9)
        backbone = self.backbone(model)
        dense = size - harness.inspect(model)["expert_bytes"]
        os.remove(model)
        worker = self.worker(TINY)  # any: no round runs
        start = time.monotonic()
        # Where Mesa's software Vulkan is installed, llama.cpp loads it, and LLVM with it: 60 MB that are no part of this.
        server = self.server(backbone, self.environment([worker], VK_DRIVER_FILES="/nonexistent"), extra=["-lm", "dio"])
        took = time.monotonic() - start
        resident = resident_bytes(server.pid)
        print(f"{size / 1e9:.1f} GB model, backbone file {backbone.stat().st_size / 1e9:.1f} GB, dense {dense / 1e9:.2f} GB: "
              f"ready after {took:.1f} s with {resident / 1e9:.2f} GB at most, {100 * (resident / dense - 1):+.1f} % of dense")
        self.assertLess(took, 30 + 30)  # 30 s on a machine of its own
        if not sanitizers.library(harness.PLUGIN):  # whose own memory this is not about
            self.assertLess(resident, 1.1 * dense)


if __name__ == "__main__":
    harness.main()
