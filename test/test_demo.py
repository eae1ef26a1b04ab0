"""kvasir demo: its exit status is a judgement, and nothing of it is left behind."""

import os
import pathlib
import signal

import harness
from harness import KVASIR, SystemTest


def descendants(pid):
    """Pids of all children and theirs."""
    out = []
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            out += [child, *descendants(child)]
    return out


def alive(pid):
    try:
        return "Z" not in pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


class Demo(SystemTest):
    def environment(self):
        return harness.launcher_environment(TMPDIR=self.folder)

    def test_identical(self):
        done = harness.run([KVASIR, "demo", "--tokens", 32], env=self.environment())
        self.assertIn("32/32  32/32  32/32", done.stdout)
        self.assertIn("Every token is the same", done.stdout)
        self.assertEqual(os.listdir(self.folder), [])

    def test_no_model(self):
        done = harness.run([KVASIR, "demo", "--model", "/nonexistent.gguf"], check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("/nonexistent.gguf", done.stderr)

    def test_interrupted(self):
        demo = self.start(harness.Process([KVASIR, "demo", "--tokens", 400], env=self.environment()))
        demo.next_line(r"worker 3")
        children = harness.wait_until(lambda: (d := descendants(demo.pid)) if len(descendants(demo.pid)) >= 4 else None,
                                      "the demo's children")
        os.kill(demo.pid, signal.SIGINT)
        self.assertEqual(demo.wait(harness.STOP_S), 1)
        self.assertEqual([pid for pid in children if alive(pid)], [])
        self.assertEqual(os.listdir(self.folder), [])

    def test_killed(self):
        """Even SIGKILL leaves no process behind (the folder stays: nobody is there to remove it)."""
        demo = self.start(harness.Process([KVASIR, "demo", "--tokens", 400], env=self.environment()))
        demo.next_line(r"worker 3")
        children = harness.wait_until(lambda: (d := descendants(demo.pid)) if len(descendants(demo.pid)) >= 4 else None,
                                      "the demo's children")
        demo.kill()
        harness.wait_until(lambda: not any(alive(pid) for pid in children), "the children to end", timeout=harness.STOP_S)


if __name__ == "__main__":
    harness.main()
