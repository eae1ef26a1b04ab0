"""kvasir plan and kvasir doctor: what they print about a real model, real workers and a running server."""

import json
import re
import threading

import harness
from harness import KVASIR, TINY, SystemTest


def findings(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


class Plan(SystemTest):
    def plan(self, *options):
        return json.loads(harness.run([KVASIR, "plan", TINY, "--json", *options]).stdout)

    def test_machines_share_all_experts(self):
        model = harness.inspect(TINY)
        plan = self.plan("--machines", "2x16M,8M", "--rtt", "0.3")
        self.assertEqual(plan["expert_bytes"], model["expert_bytes"])
        self.assertEqual(plan["expert_bytes"] + plan["dense_bytes"], model["bytes"])
        held = [range(*m["experts"]) for m in plan["machines"]]
        self.assertEqual(sorted(e for r in held for e in r), list(range(model["n_expert"])))
        self.assertGreater(len(held[0]), len(held[2]))
        self.assertEqual(plan["missing_bytes"], 0)
        speed, = plan["speed"]
        self.assertLess(speed["tokens_per_s_low"], speed["tokens_per_s_high"])
        # The shares are what kvasir slice takes.
        for i, machine in enumerate(plan["machines"]):
            begin, end = machine["experts"]
            harness.make_slice(TINY, self.folder / f"{i}.gguf", "--experts", f"{begin}:{end}")

    def test_measured_speeds_narrow_the_range(self):
        measured = self.folder / "measured"
        measured.write_text("\n".join(json.dumps({"bench": "worker", "batch": b, "gb_s": s}) for b, s in [(1, 5.0), (8, 30.0), (1, 6.0)]))
        wide, = self.plan("--machines", "3x16M", "--rtt", "0.1")["speed"]
        narrow, = self.plan("--machines", "3x16M", "--rtt", "0.1", "--bench", measured)["speed"]
        self.assertGreater(narrow["tokens_per_s_low"], wide["tokens_per_s_low"])
        self.assertLess(narrow["tokens_per_s_high"], wide["tokens_per_s_high"])
        measured.write_text("{}\n")
        done = harness.run([KVASIR, "plan", TINY, "--bench", measured], check=False)
        self.assertIn("kvasir bench worker", done.stderr)

    def test_text_says_what_is_missing_and_what_it_means(self):
        text = harness.run([KVASIR, "plan", TINY]).stdout
        self.assertRegex(text, r"layers x round trip")
        self.assertRegex(text, r"4G\s+1\s+2\n")
        text = harness.run([KVASIR, "plan", TINY, "--machines", "4M"]).stdout
        self.assertIn("fit on none of them", text)
        done = harness.run([KVASIR, "plan", TINY, "--machines", "four"], check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("4x8G,16G", done.stderr)


class Doctor(SystemTest):
    def doctor(self, *options, **env):
        return harness.run([KVASIR, "doctor", "--json", *options], env=harness.launcher_environment(**env), check=False)

    def test_machine_llama_and_plugin(self):
        done = self.doctor()
        grades = {f["subject"]: f["grade"] for f in findings(done)}
        self.assertEqual(grades["llama.cpp"], "good", done.stdout)
        self.assertEqual(grades["plugin"], "good", done.stdout)
        self.assertLessEqual({"processor", "memory", "huge pages", "ggml"}, set(grades))

    def test_a_wrong_setting_is_found_as_llama_would_find_it(self):
        done = self.doctor(KVASIR_LOCAL="sometimes")
        plugin, = [f for f in findings(done) if f["subject"] == "plugin"]
        self.assertEqual(plugin["grade"], "bad")
        self.assertIn("KVASIR_LOCAL=sometimes is not known", plugin["finding"])
        self.assertEqual(done.returncode, 1)

    def test_workers_one_there_one_not(self):
        worker = self.worker(harness.make_slice(TINY, self.folder / "a.gguf", "--experts", "0:8"))
        done = self.doctor("--workers", f"{worker.link},127.0.0.1:{harness.unused_port()}")
        there, gone = [f for f in findings(done) if f["subject"].startswith("worker")]
        self.assertNotEqual(there["grade"], "bad", there)  # how far away it is found depends on this machine's load
        self.assertRegex(there["finding"], r"holds \d+ experts")
        self.assertEqual(gone["grade"], "bad")
        self.assertIn("See that it runs", gone["finding"])

    def test_a_running_server_under_partial_coverage(self):
        worker = self.worker(harness.make_slice(TINY, self.folder / "a.gguf", "--experts", "0:16"))
        stats = self.folder / "stats.json"
        dead = f"127.0.0.1:{harness.unused_port()}"
        server = self.server(TINY, harness.plugin_environment([worker, dead], stats=stats))
        server.complete(harness.PROMPTS[0], 4)
        stop = threading.Event()

        def talk():
            while not stop.is_set():
                server.complete(harness.PROMPTS[0], 16)

        talker = threading.Thread(target=talk)
        talker.start()
        try:
            done = self.doctor("--stats", stats, "--seconds", "3")
        finally:
            stop.set()
            talker.join()
        found = {f["subject"]: f for f in findings(done)}
        self.assertEqual(found[f"worker {dead}"]["grade"], "bad", done.stdout)
        share = int(re.search(r"(\d+) % of the experts' work was done here", found["coverage"]["finding"])[1])
        self.assertTrue(10 < share < 90, share)
        self.assertIn("network", found)

        def settled():  # the file may have been written in the middle of a round
            counters = harness.read_stats(stats)
            return sum(layer["rounds"] for layer in counters["layers"]) == counters["rounds"]

        harness.wait_until(settled, "the layers' rounds to be the rounds")
        counters = harness.read_stats(stats)
        self.assertGreater(counters["workers"][0]["answers"], 0)

        done = self.doctor("--stats", self.folder / "nothing.json")
        self.assertIn("KVASIR_STATS_FILE", done.stderr)


if __name__ == "__main__":
    harness.main()
