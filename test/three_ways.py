"""One model, three ways: over workers alone, on this machine alone, and without the plugin.
All logits must be the same bits, and the plugin's counters must say who computed."""

import concurrent.futures
import subprocess
import sys

import harness

# Two models at a time on a small machine: OpenMP's threads must not spin for each other.
QUIET = {"OMP_WAIT_POLICY": "passive"}
AT_ONCE = 2


def compare(model, links, stats_path, options):
    """What went wrong (a list of sentences), kvasir-logits' report, the plugin's counters."""
    remote = harness.logits(model, harness.plugin_environment(links, local="never", stats=stats_path, **QUIET), *options)
    local = harness.logits(model, harness.plugin_environment(local="only", **QUIET), *options)
    stock = harness.logits(model, harness.clean_environment(**QUIET), *options)
    stats = harness.read_stats(stats_path)
    wrong = []
    if remote["xxh3"] != local["xxh3"]:
        wrong.append("the workers' logits are not the local ones")
    if local["xxh3"] != stock["xxh3"]:
        wrong.append("the local logits are not llama.cpp's own")
    if not stock["finite"]:
        wrong.append("logits are not finite, so that equal bits say little")
    if stats["pairs_local"] != 0 or stats["splits_local"] != 0 or stats["unknown_shapes"]:
        wrong.append(f"computed locally: {stats['pairs_local']} pairs, {stats['splits_local']} splits, {stats['unknown_shapes']}")
    return wrong, remote, stats


def check_all(names, check):
    """check(name) -> (wrong, line) for every name; prints the lines and gives {name: wrong}."""
    def guarded(name):
        try:
            return check(name)
        except (AssertionError, OSError, ValueError, subprocess.TimeoutExpired) as error:
            return [str(error)], str(name)

    failures = {}
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        for name, (wrong, line) in zip(names, pool.map(guarded, names)):
            print(f"{line}  {'; '.join(wrong) if wrong else 'identical'}", file=sys.stderr, flush=True)
            if wrong:
                failures[name] = wrong
    return failures
