"""One large join: all 256 experts of one layer of a 122B model's shape, 1.5 GB, fetched, verified and served by one node."""

import shutil
import time

import harness
from swarm import Swarm, ask

LAYER_BYTES = 1.45e9
NEEDED_BYTES = 4 * LAYER_BYTES  # the model, the slice on disk, and room


def status_bytes(pid, name):
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return 0


class LargeJoin(Swarm):
    def test_a_whole_layer_in_one_node(self):
        if shutil.disk_usage(self.folder).free < NEEDED_BYTES:
            self.skipTest(f"needs {NEEDED_BYTES / 1e9:.0f} GB of disk")
        model = harness.synthetic("122b-layer", "--layers", 1, "--experts", 256, "--top-k", 8, "--n-embd", 3072, "--n-ff", 1024,
                                  "--seed", 3)
        (self.folder / "models").mkdir()
        (self.folder / "models" / "layer.gguf").symlink_to(model)
        hub = self.hub()
        harness.wait_until(lambda: ask(hub.url, self.worker_token, "/api/models")["models"][0]["ready"] or None,
                           "the hub to hash the model", 240)
        began = time.monotonic()
        node = self.join(hub, "n", "1600M", "--model", "layer")

        def held():
            nodes = ask(hub.url, self.backbone_token, "/api/expert-routes?model=layer")["workers"]
            return nodes and sum(b - a for _, a, b in nodes[0]["segments"]) == 256
        harness.wait_until(held, "the node to hold the layer", 240)
        took = time.monotonic() - began
        size = sum(f.stat().st_size for f in (self.folder / "n" / "slices").iterdir() if f.suffix == ".gguf")
        print(f"joined with {size / 1e9:.2f} GB in {took:.1f} s; resident: hub {status_bytes(hub.pid, 'VmHWM') / 2**20:.0f} MiB, "
              f"node {status_bytes(node.pid, 'VmHWM') / 2**20:.0f} MiB")
        self.assertGreater(size, 1.4e9)
        stats = self.folder / "stats"
        env = harness.plugin_environment(KVASIR_HUB=hub.url, KVASIR_TOKEN=self.backbone_token,
                                        KVASIR_LOCAL="never", KVASIR_STATS_FILE=stats)
        server = self.server(model, env)
        server.complete([1, 2, 3], 4)
        # In its last layer llama.cpp computes only rows that an output is asked of: one a step.
        server.stop()  # which writes the last counters
        counters = harness.read_stats(stats)
        self.assertGreaterEqual(counters["pairs_remote"], 8 * 4, counters)
        self.assertEqual(counters["pairs_local"], 0, counters)


if __name__ == "__main__":
    harness.main()
