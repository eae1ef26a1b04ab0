"""Every MoE architecture llama.cpp can build, over three workers, bit for bit.

llama.cpp's own test-llama-archs writes one tiny model with random weights an architecture.
Each is cut over three workers: unequal sets, different in every layer. A prompt and some
decode steps of three sequences in one batch then run over the workers alone
(KVASIR_LOCAL=never), on this machine alone (KVASIR_LOCAL=only) and without the plugin. All
logits must be the same bits; the counters prove who computed. Models without experts must run
as if the plugin were not there. One line a model; none may be left out.

The tool gives tensors of one name and shape equal weights in every model. A layer's identity is
over its weights, so models whose experts have other side tensors (biases, scales) beside equal
weights get workers of their own.
"""

import glob
import json
import os
import shutil
import sys

import harness
import three_ways
from harness import SystemTest

# What llama.cpp 0.7.0 writes. Another version may write more: then these change, knowingly.
MOE_MODELS = 57
WITHOUT_EXPERTS = {"ernie4_5-moe", "paddleocr-moe"}
# Their files hold experts, but llama.cpp builds a graph without them; a test below proves it.
EXPERTS_UNUSED = {"refact-moe"}

RUN = ["--prompt-tokens", 9, "--n-seq", 3, "--decode", 3, "--fixed", "--threads", 1, "--no-repack"]


def tool():
    found = glob.glob("/usr/libexec/*/llama.cpp-tests/test-llama-archs")
    if not found:
        raise AssertionError("test-llama-archs is missing; install llama.cpp-tests.")
    return found[0]


def moe_models():
    """The models, written once for this build of the tool."""
    made_by = os.stat(tool())
    folder = harness.WORK / f"archs-{made_by.st_size}-{int(made_by.st_mtime)}"
    with harness._made_once(folder) as temporary:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            harness.run([tool(), "-o", temporary])
            for path in temporary.iterdir():
                if not path.name.endswith("-moe.gguf"):
                    path.unlink()
    return sorted(folder.glob("*-moe.gguf"))


def shares(description):
    """Three plans with unequal sets, different in every layer. Most of these models have two
    experts, so a worker that would get none gets a replica of one."""
    plans = [{}, {}, {}]
    units = [(entry["layer"], expert) for entry in description["layers"] for expert in range(entry["n_expert"])]
    owner = [0, 1, 0, 2, 1, 0]
    for layer, expert in dict.fromkeys(units):  # a second group of a layer follows the first
        plans[owner[(expert + 5 * layer + expert // 7) % len(owner)]].setdefault(str(layer), []).append([expert, expert + 1])
    for plan in plans:
        if not plan:
            layer, expert = units[0]
            plan[str(layer)] = [[expert, expert + 1]]
    return [{"layers": plan} for plan in plans]


class Architectures(SystemTest):
    def cut(self, path, description):
        slices = []
        for i, plan in enumerate(shares(description)):
            plan_path = self.folder / f"{path.stem}-{i}.json"
            plan_path.write_text(json.dumps(plan))
            slices.append(harness.make_slice(path, self.folder / f"{path.stem}-{i}.gguf", "--plan", plan_path))
        return slices

    def workers_for(self, descriptions):
        """Three links for each model; models share workers where their layers cannot be confused."""
        groups = {}
        for path, description in descriptions.items():
            side = {t["name"].split(".", 2)[2] for entry in description["layers"] for t in entry["tensors"]}
            groups.setdefault(frozenset(side), []).append(path)
        links = {}
        for paths in groups.values():
            cuts = [self.cut(path, descriptions[path]) for path in paths]
            workers = [self.worker(list(slices)).link for slices in zip(*cuts)]
            links.update(dict.fromkeys(paths, workers))
        return links

    def compare(self, path, description, links):
        wrong, remote, stats = three_ways.compare(path, links, self.folder / f"{path.stem}.stats", RUN)
        uses_experts = bool(description["layers"]) and path.stem not in EXPERTS_UNUSED
        if uses_experts != (stats["pairs_remote"] > 0):
            wrong.append(f"{stats['pairs_remote']} pairs were computed by workers")
        n_experts = sum(entry["n_expert"] for entry in description["layers"])
        line = (f"{path.stem:22} {len(description['layers'])} layers {n_experts:3} experts {remote['rows']:3} rows "
                f"pairs remote {stats['pairs_remote']:4} local {stats['pairs_local']}")
        return wrong, line

    def test_every_moe_architecture(self):
        models = moe_models()
        descriptions = {path: harness.inspect(path) for path in models}
        self.assertEqual(len(models), MOE_MODELS, [path.stem for path in models])
        self.assertEqual({path.stem for path in models if not descriptions[path]["layers"]}, WITHOUT_EXPERTS)

        links = self.workers_for({path: d for path, d in descriptions.items() if d["layers"]})
        failures = three_ways.check_all(
            models, lambda path: self.compare(path, descriptions[path], links.get(path, links[models[0]])))
        with_experts = len([path for path in models if descriptions[path]["layers"] and path not in failures])
        print(f"{len(models) - len(failures)} of {len(models)} identical, {with_experts} of them with experts", file=sys.stderr)
        self.assertEqual(failures, {})

    def stock_hash(self, model):
        return harness.logits(model, harness.clean_environment(**three_ways.QUIET), *RUN)["xxh3"]

    def test_whose_experts_llama_cpp_does_not_use(self):
        """An altered expert changes the logits of every model but these."""
        for path in moe_models():
            if path.stem not in EXPERTS_UNUSED | {"qwen3moe-moe"}:
                continue
            altered = self.folder / path.name
            shutil.copy(path, altered)
            everything = harness.make_slice(path, self.folder / "all.gguf", "--layers", ":", "--experts", ":").read_bytes()
            slab = everything[-4096:]  # a slice ends with the last expert's weights
            with open(altered, "r+b") as file:
                content = file.read()
                self.assertEqual(content.count(slab), 1)
                file.seek(content.index(slab))
                file.write(bytes(len(slab)))
            changed = self.stock_hash(path) != self.stock_hash(altered)
            self.assertEqual(changed, path.stem not in EXPERTS_UNUSED, path.stem)


if __name__ == "__main__":
    harness.main()
