"""What a worker costs its machine: resident memory by the kernel's own peak (VmHWM), also while it
loads and tunes, and processor time while it has nothing to do."""

import pathlib
import re
import time

import harness
from clients import FramedClient
from harness import SystemTest

MIB = 1 << 20
OVERHEAD = 64 * MIB  # beside the experts: program, graphs, one piece of a long request
N_EMBD, N_FF, N_EXPERT = 1024, 512, 128  # 130 MB: one more copy of any matrix is more than the overhead
ROWS_OF_A_PROMPT = 512


def model():
    return harness.synthetic("memory", "--layers", 1, "--experts", N_EXPERT, "--top-k", 8, "--n-embd", N_EMBD, "--n-ff", N_FF)


def peak_bytes(pid):
    return int(re.search(r"VmHWM:\s+(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text()).group(1)) * 1024


def processor_seconds(pid):
    """Of all threads, to the nanosecond."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in pathlib.Path(f"/proc/{pid}/task").iterdir()) / 1e9


class Cost(SystemTest):
    def slice(self):
        path = self.folder / "slice.gguf"
        harness.make_slice(model(), path, "--experts", f"0:{N_EXPERT}")
        return path

    def start_worker(self, *extra):
        worker = self.start(harness.Process([harness.KVASIR, "worker", "--serve", "127.0.0.1:0", "--insecure", "--threads", 1, "--slice",
                                             self.path, "--data", self.folder / "data", *extra],
                                            env=harness.clean_environment(OMP_WAIT_POLICY="passive")))
        self.port = int(re.search(r"127\.0\.0\.1:(\d+)", worker.next_line(r"127\.0\.0\.1:\d+")).group(1))
        harness.wait_until(lambda: self.serving_line(worker), "the worker to say what it serves")
        return worker

    @staticmethod
    def serving_line(worker):
        return next((line for line in worker.err if "serving" in line), None)

    def ask(self, n_rows):
        """Every row through eight experts; an expert's pairs follow each other, as a backbone sends them."""
        with FramedClient(self.port) as client:
            rows = [[(r + c) % 7 - 3.0 for c in range(N_EMBD)] for r in range(n_rows)]
            selection = [[(r % 8) * 8 + k for k in range(8)] for r in range(n_rows)]
            return client.compute(0, N_FF, rows, selection, by_expert=True)

    def setUp(self):
        super().setUp()
        self.path = self.slice()
        self.bytes = self.path.stat().st_size

    def test_memory_stays_within_slice_and_overhead(self):
        for extra in ([], ["--numerics", "exact"], ["--memory", str(self.bytes + 4 * MIB)]):
            worker = self.start_worker(*extra)
            self.assertLess(peak_bytes(worker.pid), self.bytes + OVERHEAD, f"after loading, {extra}")
            for n_rows in (1, ROWS_OF_A_PROMPT):
                self.ask(n_rows)
            self.assertLess(peak_bytes(worker.pid), self.bytes + OVERHEAD, f"after a prompt, {extra}")
            worker.stop()

    def test_a_second_copy_is_stated_and_stays_within_memory(self):
        worker = self.start_worker("--memory", str(4 * self.bytes))
        copy = re.search(r"\(([\d.]+) MB, ([\d.]+) MB of them rearranged", self.serving_line(worker))
        stated = float(copy.group(1)) * 1e6 if copy else self.bytes  # some CPUs have no such kernels
        self.ask(ROWS_OF_A_PROMPT)
        self.assertLess(peak_bytes(worker.pid), stated * 1.01 + OVERHEAD)

    def test_a_rearranged_slice_needs_no_second_copy_while_it_loads(self):
        worker = self.start_worker("--numerics", "fast", "--memory", str(self.bytes + 4 * MIB))
        self.assertLess(peak_bytes(worker.pid), self.bytes + OVERHEAD)

    def test_uploads_stay_within_memory(self):
        memory = int(2.2 * self.bytes)  # an upload lies there twice: as it comes, and loaded
        worker = self.start(harness.Process([harness.KVASIR, "worker", "--serve", "127.0.0.1:0", "--insecure", "--threads", 1,
                                             "--memory", memory], env=harness.clean_environment(OMP_WAIT_POLICY="passive")))
        link = re.search(r"127\.0\.0\.1:\d+", worker.next_line(r"127\.0\.0\.1:\d+")).group(0)
        stats = self.folder / "stats"
        harness.logits(model(), harness.plugin_environment([link], local="never", stats=stats, KVASIR_UPLOAD=1),
                       "--prompt-tokens", 8, "--decode", 2, "--threads", 1, "--no-repack")
        self.assertGreater(harness.read_stats(stats)["pairs_remote"], 0)
        self.assertLess(peak_bytes(worker.pid), memory + OVERHEAD)

    def test_an_idle_worker_uses_less_than_half_a_percent_of_a_core(self):
        worker = self.start_worker()
        with FramedClient(self.port):
            self.ask(1)
            time.sleep(0.5)  # its short look for more is over
            before, start = processor_seconds(worker.pid), time.monotonic()
            time.sleep(4)
            used = (processor_seconds(worker.pid) - before) / (time.monotonic() - start)
        self.assertLess(used, 0.005)


if __name__ == "__main__":
    harness.main()
