"""docs/testing.md names tests that exist, and every fuzz target."""

import os
import pathlib
import re
import unittest

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

    def test_named_constants_exist(self):
        code = "\n".join(p.read_text() for p in (SOURCE / "src").rglob("*.h"))
        for name in set(re.findall(r"`(k[A-Z]\w+)`", self.text)):
            self.assertRegex(code, rf"\b{name}\b")


if __name__ == "__main__":
    unittest.main(verbosity=2)
