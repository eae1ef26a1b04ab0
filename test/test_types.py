"""Every tensor type over workers, bit for bit: one synthetic model a type, mixed types within a
layer, and rows that no block of 256 fits.

A prompt long enough for the kernels that ggml switches to at 8 rows an expert, decode steps
below that, and three sequences in a batch.
"""

import harness
import three_ways
from harness import SystemTest

GEOMETRY = ["--layers", 2, "--experts", 10, "--top-k", 3]
WIDE = ["--n-embd", 256, "--n-ff", 256]
# Whole blocks of 32 and of nothing larger.
NARROW = ["--n-embd", 320, "--n-ff", 96]

CASES = {name: [*WIDE, "--types", f"experts={name}"]
         for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4")}
CASES |= {f"{name}-narrow": [*NARROW, "--types", f"experts={name}"] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "MXFP4")}
CASES |= {
    "Q4_K-Q5_K-Q6_K": [*WIDE, "--types", "gate=Q4_K,up=Q5_K,down=Q6_K"],
    "IQ4_XS-Q8_0-F16": [*WIDE, "--types", "gate=IQ4_XS,up=Q8_0,down=F16"],
    "MXFP4-BF16-Q4_0": [*WIDE, "--types", "gate=MXFP4,up=BF16,down=Q4_0"],
    # Inner rows of 96 beside outer ones of 256, so that only `down` has the odd length.
    "Q4_K-Q4_K-Q8_0-narrow": ["--n-embd", 256, "--n-ff", 96, "--types", "gate=Q4_K,up=Q6_K,down=Q8_0"],
    "shared": ["--arch", "qwen2moe", *WIDE, "--types", "gate=Q4_K,up=Q4_K,down=Q6_K"],
}

RUN = ["--prompt-tokens", 24, "--n-seq", 3, "--decode", 5, "--threads", 1, "--no-repack"]


class Types(SystemTest):
    def compare(self, name, model, links):
        wrong, remote, stats = three_ways.compare(model, links, self.folder / f"{name}.stats", RUN)
        # 2 layers, 3 experts a row. Rows that nobody reads may be dropped in the last layer.
        if not remote["rows"] * 3 < stats["pairs_remote"] <= remote["rows"] * 6:
            wrong.append(f"{stats['pairs_remote']} pairs for {remote['rows']} rows")
        return wrong, f"{name:24} {remote['rows']} rows  pairs remote {stats['pairs_remote']:4} local {stats['pairs_local']}"

    def test_every_type(self):
        models, slices = {}, [[], [], []]
        for seed, (name, options) in enumerate(CASES.items(), start=1):
            # Another seed for each: a layer's identity must tell them apart on a shared worker.
            models[name] = harness.synthetic(f"type-{name}", *GEOMETRY, *options, "--seed", seed)
            folder = self.folder / name
            folder.mkdir()
            for mine, cut in zip(slices, harness.three_slices(models[name], folder)):
                mine.append(cut)
        links = [self.worker(mine).link for mine in slices]

        failures = three_ways.check_all(list(models), lambda name: self.compare(name, models[name], links))
        self.assertEqual(failures, {})


if __name__ == "__main__":
    harness.main()
