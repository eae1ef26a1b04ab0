"""docs/testing.md names tests that exist, and every fuzz target."""

import os
import pathlib
import re
import unittest

# What systems of this kind have been attacked with, and have fallen over.
CLASSES = [
    "GGUF: counts, string lengths, dimensions, types that overflow or lie; sizes, padding, alignment that wrap; "
    "offsets and sizes past the end; a small file that asks for gigabytes",
    "GGUF: uninitialised frees on the error path", "ids past the slice", "the same expert twice for one token",
    "negative or huge counts", "row indices out of range", "a small frame that makes a large allocation", "short replies",
    "slow readers and writers", "a stalled open peer", "NaN and Inf rows", "a layer or model the worker does not hold",
    "a replayed or corrupted answer", "bounds checked only in `assert`", "path traversal in model names", "tokens in logs",
    "secrets readable by others", "false coverage", "a flood of volunteers", "ranges that overflow",
    "a relay reaching the hub's own port", "SQL from request fields", "identity taken over after a restart",
]
SOURCE = pathlib.Path(os.environ.get("KVASIR_SOURCE_DIR", pathlib.Path(__file__).resolve().parent.parent))


class TestingDoc(unittest.TestCase):
    def setUp(self):
        self.text = (SOURCE / "docs" / "testing.md").read_text()

    def test_named_tests_exist(self):
        known = set()
        for path in (SOURCE / "src").rglob("*test.cc"):
            known |= {".".join(m) for m in re.findall(r"^TEST(?:_F|_P)?\((\w+), (\w+)\)", path.read_text(), re.M)}
        named = set(re.findall(r"`([A-Z]\w+\.[A-Z]\w+)`", self.text))
        self.assertGreater(len(named), 50)
        self.assertEqual(named - known, set())

    def test_named_files_exist(self):
        for name in set(re.findall(r"`(test_\w+\.py)`", self.text)):
            self.assertTrue((SOURCE / "test" / name).exists(), name)

    def test_every_fuzz_target_is_listed(self):
        targets = set(re.findall(r"^kvasir_fuzz\((\w+)", (SOURCE / "fuzz" / "CMakeLists.txt").read_text(), re.M))
        listed = set(re.findall(r"^\| `(\w+)` \|", self.text, re.M))
        self.assertEqual(targets - listed, set())
        for target in targets:
            self.assertTrue(any((SOURCE / "fuzz" / "corpus" / target).iterdir()), f"no corpus for {target}")

    def test_every_class_has_a_test_that_the_sanitizers_run(self):
        section = self.text.split("## Classes of attack and fault", 1)[1].split("\n## ", 1)[0]
        rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", section, re.M))
        self.assertEqual(set(CLASSES) - set(rows), set())
        for name, tests in rows.items():
            if name != "class":
                self.assertRegex(tests, r"`[A-Z]\w+\.[A-Z]\w+`|fuzz `\w+`", name)
        # They are built with the sanitizers: no condition stands before them.
        system = (SOURCE / "test" / "CMakeLists.txt").read_text().split("\nelse()\n", 1)[0]
        for name in re.findall(r"`(test_\w+)\.py`", section):
            self.assertIn(f"\nkvasir_system_test({name})\n", system)
        for path in [*(SOURCE / "src").rglob("CMakeLists.txt"), SOURCE / "fuzz" / "CMakeLists.txt"]:
            self.assertNotIn("KVASIR_SANITIZE", path.read_text(), path)

    def test_nothing_is_checked_in_assert(self):
        for path in [*(SOURCE / "src").rglob("*.cc"), *(SOURCE / "src").rglob("*.h")]:
            self.assertNotRegex(path.read_text(), r"(?<!static_)\bassert\(|#include <cassert>", path)

    def test_named_constants_exist(self):
        code = "\n".join(p.read_text() for p in (SOURCE / "src").rglob("*.h"))
        for name in set(re.findall(r"`(k[A-Z]\w+)`", self.text)):
            self.assertRegex(code, rf"\b{name}\b")


if __name__ == "__main__":
    unittest.main(verbosity=2)
