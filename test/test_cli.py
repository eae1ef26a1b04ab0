"""The command line: exit status 1 and one sentence that says what to do."""

import os
import pathlib
import subprocess

import harness
from harness import KVASIR, TINY, SystemTest


class CommandLine(SystemTest):
    def refuse(self, args, sentence, **kwargs):
        done = harness.run([KVASIR, *args], check=False, timeout=60, **kwargs)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr, sentence)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        return done

    def slice(self, *args):
        return ["slice", TINY, *args, "-o", self.folder / "out.gguf"]

    def test_no_such_file(self):
        self.refuse(["inspect", "/nonexistent.gguf"], "/nonexistent.gguf")
        self.refuse(["slice", "/nonexistent.gguf", "-o", self.folder / "out.gguf"], "/nonexistent.gguf")
        self.refuse(["worker", "--serve", "0", "--insecure", "--slice", "/nonexistent.gguf"], "/nonexistent.gguf")

    def test_not_a_gguf(self):
        other = self.folder / "other.gguf"
        other.write_bytes(b"#!/bin/sh\n" * 100)
        self.refuse(["inspect", other], "GGUF")
        self.refuse(["worker", "--serve", "0", "--insecure", "--slice", other], "GGUF")

    def test_nothing_in_the_clear_by_accident(self):
        for host in ("0.0.0.0", "[::]"):
            self.refuse(["worker", "--serve", f"{host}:0", "--insecure", "--slice", TINY, "--data", self.folder / "worker"], "add --insecure-anywhere")

    def test_cut_short(self):
        short = self.folder / "short.gguf"
        short.write_bytes(TINY.read_bytes()[:9_000_000])
        self.refuse(["inspect", short], "short.gguf")

    def test_ranges(self):
        self.refuse(self.slice("--layers", "0:9"), "layer")
        self.refuse(self.slice("--experts", "30:40"), "expert")
        self.refuse(self.slice("--experts", "8:8"), "empty|8:8")
        self.refuse(self.slice("--experts", "9:3"), "9:3")
        self.refuse(self.slice("--experts", "three"), "three")
        self.assertFalse((self.folder / "out.gguf").exists())

    def test_disk_full(self):
        """A file-size limit stands for a full disk: no half-written file is left."""
        done = subprocess.run(["sh", "-c", 'ulimit -f 2000; exec "$0" "$@"', KVASIR, *map(str, self.slice("--layers", ":"))],
                              capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, env=harness.clean_environment())
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(os.listdir(self.folder), [])

    def test_threads_of_a_worker_wait_briefly(self):
        # libgomp reads its settings when it is loaded, before main(): what counts is what the program was started with.
        def started_with(**env):
            environment = harness.clean_environment()
            environment.pop("OMP_WAIT_POLICY", None)
            worker = self.start(harness.Process([KVASIR, "worker", "--serve", "127.0.0.1:0", "--insecure", "--memory", "1M"],
                                                env={**environment, **env}))
            worker.next_line(r"127\.0\.0\.1:\d+")
            return pathlib.Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0")

        self.assertIn(b"GOMP_SPINCOUNT=1000", started_with())
        self.assertFalse([e for e in started_with(OMP_WAIT_POLICY="active") if e.startswith(b"GOMP_SPINCOUNT")])

    def test_worker_address(self):
        self.refuse(["worker", "--serve", "localhost:notaport", "--slice", TINY], "notaport")
        self.refuse(["worker", "--serve", "99999", "--slice", TINY], "99999")
        self.refuse(["worker", "--serve", "0"], "--slice")

    def test_backbone_has_no_experts(self):
        backbone = self.folder / "backbone.gguf"
        harness.run([KVASIR, "slice", TINY, "--backbone", "-o", backbone])
        self.refuse(["slice", backbone, "-o", self.folder / "out.gguf"], "backbone")

    def test_slice_verifies(self):
        path = harness.make_slice(TINY, self.folder / "s.gguf", "--layers", "1:4", "--experts", "0,5:9,31")
        self.assertIn("identical", harness.run([KVASIR, "slice", "--verify", path, TINY]).stdout)
        data = bytearray(path.read_bytes())
        data[-1000] ^= 1
        path.write_bytes(data)
        self.refuse(["slice", "--verify", path, TINY], "s.gguf")

    def test_inspect(self):
        model = harness.inspect(TINY)
        self.assertEqual((model["n_layer"], model["n_expert"], model["n_expert_used"]), (4, 32, 4))
        part = harness.inspect(harness.make_slice(TINY, self.folder / "s.gguf", "--layers", "2", "--experts", "3,7:9"))
        self.assertEqual([(l["layer"], l["held"]) for l in part["layers"]], [(2, [[3, 4], [7, 9]])])
        self.assertEqual(part["layers"][0]["layer_id"], model["layers"][2]["layer_id"])


if __name__ == "__main__":
    harness.main()
