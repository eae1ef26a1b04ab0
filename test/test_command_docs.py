"""Manual pages and completions are made from the program, and do what they are for."""

import json
import re
import subprocess
import sys

import harness
from harness import KVASIR, SOURCE, SystemTest

sys.path.insert(0, str(SOURCE / "packaging"))
import command_docs  # noqa: E402


def commands(node, path=()):
    for child in node["commands"]:
        yield (*path, child["name"]), child
        yield from commands(child, (*path, child["name"]))


class CommandDocs(SystemTest):
    @classmethod
    def setUpClass(cls):
        cls.root = json.loads(harness.run([KVASIR, "describe"]).stdout)

    def complete(self, program, *words):
        """What bash would offer for the last word."""
        script = command_docs.completions(self.root)[f"completion/{program}.bash"]
        quoted = " ".join(f"'{w}'" for w in (program, *words))
        ask = f"{script}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _{program.replace('-', '_')}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        done = subprocess.run(["bash", "--norc", "-c", ask], capture_output=True, text=True, timeout=30, cwd=self.folder)
        self.assertEqual(done.stderr, "")
        return set(done.stdout.split())

    def test_every_command_is_described(self):
        names = {path for path, _ in commands(self.root)}
        for wanted in (("slice",), ("worker",), ("join",), ("hub", "token", "create"), ("verify",)):
            self.assertIn(wanted, names)
        self.assertNotIn(("describe",), names)
        for path, node in commands(self.root):
            self.assertTrue(node["help"], path)
            for option in node["options"]:
                self.assertTrue(option["help"], f"{path}: {option['names']} has no help")

    def test_bash_completes_commands_options_and_files(self):
        self.assertEqual(self.complete("kvasir", "jo"), {"join"})
        self.assertEqual(self.complete("kvasir", "join", "--mem"), {"--memory"})
        self.assertEqual(self.complete("kvasir", "hub", "token", "cr"), {"create"})
        self.assertEqual(self.complete("kvasir-hub", "token", "create", "--sc"), {"--scope"})
        (self.folder / "model.gguf").touch()
        self.assertEqual(self.complete("kvasir", "inspect", "mo"), {"model.gguf"})
        self.assertEqual(self.complete("kvasir", "worker", "--slice", "mo"), {"model.gguf"})
        # A value that looks like a command leads nowhere else.
        self.assertEqual(self.complete("kvasir", "worker", "--slice", "join", "--mem"), {"--memory"})

    def test_each_page_names_each_option(self):
        pages = command_docs.manual_pages(self.root)
        for path, node in commands(self.root):
            page = pages["kvasir-hub.1" if path[0] == "hub" else f"kvasir-{path[0]}.1"]
            for option in node["options"]:
                for name in option["names"]:
                    self.assertIn(f"*{name}*", page, path)
        for variable in re.findall(r"^\| `(KVASIR_\w+)`", (SOURCE / "docs" / "configuration.md").read_text().split("\n## ")[0], re.M):
            self.assertIn("*" + command_docs.scd(variable) + "*", pages["kvasir-plugin.7"])

    def test_prose_belongs_to_a_command(self):
        pages = set(command_docs.manual_pages(self.root))
        for file in (SOURCE / "packaging" / "man").glob("*.scd"):
            self.assertTrue({f"{file.stem}.1", f"{file.stem}.7"} & pages, f"{file.name} is about no command there is")
        for name, text in command_docs.manual_pages(self.root).items():
            self.assertNotRegex(text, r"(?m)^\s*@[A-Z]+@", name)


if __name__ == "__main__":
    harness.main()
