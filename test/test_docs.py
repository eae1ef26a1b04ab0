"""The documents: their commands run, their links lead somewhere, the messages they explain exist.

A fenced block opened by ```sh run is run to its end and must succeed; one opened by ```sh serve is a
program that stays, and the next block comes when it is there; one opened by ```sh join is the same on
three machines. A second kvasir run takes the place of the first. What differs from an installed system
(paths, ports, addresses) is replaced as `Page.adapt` says. Other blocks are not run: they install
packages, or need a GPU or a telephone.
"""

import re
import textwrap
import unittest
import urllib.error
import urllib.request

import harness
from harness import BUILD, PLUGIN, SOURCE, SystemTest

PAGES = sorted([SOURCE / "README.md", *(SOURCE / "docs").rglob("*.md"), *(p for p in SOURCE.glob("*.md") if p.name != "README.md"),
                SOURCE / "models" / "MODEL.md"])
BLOCK = re.compile(r"^ *```sh (run|serve|join)\n(.*?)^ *```$", re.M | re.S)


def anchor(heading):
    """As GitHub makes one of a heading."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).strip().lower()).replace(" ", "-")


def links(page):
    """(target as written, file, fragment) of each relative link outside of code."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            path, _, fragment = target.partition("#")
            yield target, (page.parent / path).resolve() if path else page, fragment


class Links(unittest.TestCase):
    def test_relative_links_and_anchors_resolve(self):
        broken = []
        for page in PAGES:
            for target, file, fragment in links(page):
                if not file.exists():
                    broken.append(f"{page.relative_to(SOURCE)}: {target}")
                elif fragment and fragment not in map(anchor, re.findall(r"^#+ (.+)$", file.read_text(), re.M)):
                    broken.append(f"{page.relative_to(SOURCE)}: {target}: no such heading")
        self.assertEqual(broken, [])

    def test_every_document_is_reached_from_the_readme(self):
        reached, ahead = set(), [SOURCE / "README.md"]
        while ahead:
            page = ahead.pop()
            if page not in reached and page.suffix == ".md":
                reached.add(page)
                ahead += [file for _, file, _ in links(page) if file.is_file()]
        self.assertEqual([p.name for p in (SOURCE / "docs").glob("*.md") if p not in reached], [])


class Messages(unittest.TestCase):
    def test_troubleshooting_quotes_messages_that_exist(self):
        sources = " ".join(re.sub(r'"\s*\n\s*"', "", p.read_text()) for p in (SOURCE / "src").rglob("*.cc") if not p.name.endswith("_test.cc"))
        page = (SOURCE / "docs" / "troubleshooting.md").read_text()
        # Of a heading with several quotations each must exist; words without quotation are descriptions.
        unknown = []
        for heading in re.findall(r"^### (.+)$", page, re.M):
            if "llama-server" in heading or "KVASIR0" in heading:
                continue  # llama.cpp's words
            for quoted in re.findall(r"`([^`]+)`", heading):
                if re.sub(r"^not loaded: ", "", quoted) not in sources:
                    unknown.append(quoted)
        self.assertEqual(unknown, [])
        self.assertGreater(len(re.findall(r"^### `", page, re.M)), 30)


class Page:
    """The commands of one page, adapted to this machine and run in order."""

    def __init__(self, test, page):
        self.test, self.text = test, page.read_text()
        self.ports = {}
        self.links = ["no-link-yet"]
        self.hub, self.backbone = "no-hub-yet", None
        self.here = test.folder / page.stem
        self.here.mkdir()
        # Under names without spaces, whatever the checkout is called.
        for name, target in (("libggml-kvasir.so", PLUGIN), ("models", SOURCE / "models")):
            if not (test.folder / name).exists():
                (test.folder / name).symlink_to(target)

    def port(self, number):
        return self.ports.setdefault(number, harness.unused_port())

    def adapt(self, block):
        folder = str(self.test.folder)
        block = textwrap.dedent(block).replace("/tmp/", f"{folder}/").replace("./dev run ", "")
        block = block.replace("$PWD/build/lib/", f"{folder}/").replace(" models/", f" {folder}/models/")
        block = block.replace("LINK_OF_A", self.links[0]).replace("LINK_OF_B", self.links[-1]).replace("LINK", self.links[-1])
        block = re.sub(r"\bHUB\b", self.hub, block)
        block = block.replace("/usr/lib/kvasir/", f"{folder}/").replace("/usr/share/kvasir/models", f"{folder}/models")
        block = block.replace("--listen 0.0.0.0:8443", "--listen 127.0.0.1:0 --tls")
        block = block.replace("kvasir run ", f"kvasir run --listen 127.0.0.1:{self.port('8080')} ")
        # Encrypted as on an address that others can reach, and two threads a machine are plenty here.
        block = re.sub(r"--serve 0\.0\.0\.0:(\d+)", lambda m: "--serve 127.0.0.1:0 --tls --threads 1", block)
        return re.sub(r"(--port |127\.0\.0\.1:)(8080)\b", lambda m: f"{m[1]}{self.port(m[2])}", block)

    def environment(self, machine="backbone"):
        home = self.here / machine
        home.mkdir(exist_ok=True)
        env = harness.clean_environment(HOME=home, XDG_DATA_HOME=home / "data", XDG_CACHE_HOME=home / "cache")
        env["PATH"] = f"{BUILD / 'bin'}:{env['PATH']}"
        return env

    def launch(self, script, machine="backbone"):
        # So that ending the block ends the program.
        script = re.sub(r"^(kvasir|kvasir-hub|llama-server) ", r"exec \1 ", script, flags=re.M)
        return self.test.start(harness.Process(["bash", "-euc", f"cd '{self.here}'\n{script}"], env=self.environment(machine)))

    def serve(self, script):
        if re.search(r"^(kvasir run|llama-server) ", script, re.M) and self.backbone:
            self.backbone.stop()
        process = self.launch(script)
        if "kvasir worker" in script:
            self.links = [link for link in self.links if "#" in link] + [process.next_line(r"^127\.0\.0\.1:\d+#[0-9a-f]{64}$")]
        elif "kvasir-hub" in script:
            self.hub = process.next_line(r"^https://127\.0\.0\.1:\d+$")
        else:
            self.backbone = process
            port = re.search(r"--(?:port |listen 127\.0\.0\.1:)(\d+)", script)[1]
            harness.wait_until(lambda: self.healthy(port, process), "the server to be ready")

    def join(self, script):
        """On three machines, each of which was given a copy of the hub's certificate."""
        (self.here / "hub-ca.pem").write_bytes((self.here / "backbone" / "kvasir" / "hub-ca.pem").read_bytes())
        # Less than the whole model each, so that all three are wanted.
        script = script.replace("--memory 2G", "--memory 9M --threads 1")
        nodes = [self.launch(script, f"machine{i}") for i in range(3)]
        for node in nodes:
            harness.wait_until(lambda node=node: any(re.search(r"\bserving \d+ experts", line) for line in node.err),
                               "a node to serve", 120)

    def healthy(self, port, process):
        self.test.assertTrue(process.running(), process.describe())
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                return answer.status == 200
        except urllib.error.HTTPError as busy:
            busy.close()
        except OSError:
            pass
        return False

    def run(self):
        outputs = []
        for kind, block in BLOCK.findall(self.text):
            script = self.adapt(block)
            if kind != "run":
                {"serve": self.serve, "join": self.join}[kind](script)
            else:
                script = f"cd '{self.here}'\n{script}"
                done = harness.run(["bash", "-euo", "pipefail", "-c", script], env=self.environment(), check=False)
                self.test.assertEqual(done.returncode, 0, f"{script}\n{done.stdout}\n{done.stderr}")
                outputs.append(done.stdout)
        return outputs


class Commands(SystemTest):
    def test_getting_started(self):
        outputs = Page(self, SOURCE / "docs" / "getting-started.md").run()
        everything = "\n".join(outputs)
        # The worker did all of it, as the page says.
        self.assertRegex(everything, r'"pairs_remote":[1-9]')
        self.assertIn('"pairs_local":0', everything)
        self.assertIn('"content":', everything)
        self.assertRegex(everything, r"workers 3\b")

    def test_other_pages(self):
        for page in PAGES:
            if page.name != "getting-started.md" and BLOCK.search(page.read_text()):
                with self.subTest(page=page.name):
                    Page(self, page).run()


if __name__ == "__main__":
    harness.main()
