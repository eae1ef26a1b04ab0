"""Empty workers, filled by the plugin (KVASIR_UPLOAD=1): what they compute has the bits of this
machine, and the counters prove that they computed.

llama.cpp's own test-llama-archs builds its models in memory, where no slicer can reach them; here
it runs over three empty workers, one architecture after another, so that each row has counters.
"""

import concurrent.futures
import glob
import re
import sys

import harness
import test_archs
from harness import SystemTest, Worker

# Threads that sleep instead of spin: backbone and workers share the cores.
QUIET = {"OMP_WAIT_POLICY": "passive"}
RUN = ["--prompt-tokens", 12, "--n-seq", 2, "--decode", 4, "--fixed", "--threads", 1, "--no-repack"]

def tool(name):
    found = glob.glob(f"/usr/libexec/*/llama.cpp-tests/{name}")
    if not found:
        raise AssertionError(f"{name} is missing; install llama.cpp-tests.")
    return found[0]


class EmptyWorker(Worker):
    def __init__(self, memory):
        harness.Process.__init__(self, [harness.KVASIR, "worker", "--serve", "127.0.0.1:0", "--insecure", "--threads", 1,
                                        "--memory", memory, "--spin-us", 0], env=harness.clean_environment(**QUIET))
        self.link = re.search(r"127\.0\.0\.1:\d+\S*", self.next_line(r"127\.0\.0\.1:\d+")).group(0)


class Upload(SystemTest):
    def empty_workers(self, memory="64M", n=3):
        return [self.start(EmptyWorker(memory)) for _ in range(n)]

    def environment(self, workers, stats=None, local=None, upload=1, libraries=()):
        return harness.plugin_environment(workers, local=local, stats=stats, libraries=libraries, KVASIR_UPLOAD=upload, **QUIET)

    def logits(self, env):
        return harness.logits(harness.TINY, env, *RUN)["xxh3"]

    def test_a_model_without_slices(self):
        alone = self.logits(harness.plugin_environment(local="only", **QUIET))
        workers = self.empty_workers()
        for again in (False, True):  # the second process finds the experts there
            stats = self.folder / f"{again}.stats"
            self.assertEqual(self.logits(self.environment(workers, stats, local="never")), alone)
            counters = harness.read_stats(stats)
            self.assertGreater(counters["pairs_remote"], 0)
            self.assertEqual(counters["pairs_local"], 0)
            uploaded = counters["bytes_sent"] > 10_000_000
            self.assertEqual(uploaded, not again, counters)

    def test_a_worker_without_room(self):
        alone = self.logits(harness.plugin_environment(local="only", **QUIET))
        for memory in ("1K", "3M"):  # none at all; a few experts, each layer in the place of the last
            stats = self.folder / f"{memory}.stats"
            self.assertEqual(self.logits(self.environment(self.empty_workers(memory, n=1), stats)), alone)
            counters = harness.read_stats(stats)
            self.assertGreater(counters["pairs_local"], 0)
            self.assertEqual(counters["pairs_remote"] > 0, memory == "3M", counters)
            self.assertEqual(counters["workers_lost"], 0)

    def test_without_the_setting_nothing_is_uploaded(self):
        stats = self.folder / "off.stats"
        self.logits(self.environment(self.empty_workers(n=1), stats, upload=None))
        self.assertEqual(harness.read_stats(stats)["pairs_remote"], 0)

    def arch_rows(self, pattern, workers, stats):
        """(rows of the tool's table, the plugin's counters) of the architectures that match."""
        env = self.environment(workers, stats, local="never", libraries=["flush_llama_log"])
        done = harness.run([tool("test-llama-archs"), "-b", "KVASIR0", "-a", pattern, "-s", 20], env=env)
        rows = re.findall(r"^\|\s*(\S+)\|[^|]*\|\s*(MoE|Dense)\|(.*)\|$", re.sub(r"\x1b\[[0-9;]*m", "", done.stdout), re.M)
        rows = [row for row in rows if row[2].count("SKIP") < 3]  # the tool cannot build these on any device
        wrong = [row for row in rows if re.search(r"FAIL|ERROR", row[2]) or row[2].count("OK") == 0]
        self.assertEqual(wrong, [])
        self.assertRegex(done.stdout, r"all [1-9]\d* test\(s\) passed")
        return rows, harness.read_stats(stats)

    def test_every_architecture_built_in_memory(self):
        workers = self.empty_workers()
        names = [path.stem.removesuffix("-moe") for path in test_archs.moe_models()]
        self.assertEqual(len(names), test_archs.MOE_MODELS)
        idle = {name.removesuffix("-moe") for name in test_archs.WITHOUT_EXPERTS | test_archs.EXPERTS_UNUSED}

        def one(name):
            rows, counters = self.arch_rows(f"^{re.escape(name)}$", workers, self.folder / f"{name}.stats")
            kinds = [kind for arch, kind, _ in rows if arch == name]
            return name, kinds, counters

        failures = {}
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for name, kinds, counters in pool.map(one, names):
                remote, local = counters["pairs_remote"], counters["pairs_local"]
                print(f"{name:22} {'+'.join(kinds):10} pairs remote {remote:6} local {local}", file=sys.stderr)
                if "MoE" not in kinds or local != 0 or (remote > 0) == (name in idle) or counters["unknown_shapes"]:
                    failures[name] = (kinds, counters)
        self.assertEqual(failures, {})


if __name__ == "__main__":
    harness.main()
