"""llama-server with the plugin: concurrent requests, lost workers, no local replica."""

import json
import threading

import harness
from harness import TINY, SystemTest

PROMPTS = harness.PROMPTS + ["And it came to pass in those days, that"]
N_TOKENS = 96


class Server(SystemTest):
    def test_worker_killed_under_four_streams(self):
        # Stock's own tokens depend on how the streams' rows fall into batches; started together
        # they always fall alike, which its repetitions confirm.
        stock = self.server(TINY, harness.clean_environment(), parallel=4)
        repetitions = [stock.stream_together(PROMPTS, N_TOKENS) for _ in range(3)]
        stock.stop()
        for repetition in repetitions[1:]:
            self.assertEqual(repetition, repetitions[0], "stock llama.cpp does not agree with itself")

        workers = self.three_workers(TINY)
        stats_path = self.folder / "stats.json"
        server = self.server(TINY, harness.plugin_environment(workers, stats=stats_path), parallel=4)
        answer = server.stream_together(PROMPTS, N_TOKENS, at_token=N_TOKENS // 2, action=workers[0].kill)
        self.assertEqual(answer, repetitions[0])
        for tokens in answer[1]:
            self.assertGreater(len(tokens), N_TOKENS * 3 // 4)
        self.assertEqual(server.stop(), 0, server.describe())
        stats = harness.read_stats(stats_path)
        self.assertGreater(stats["pairs_remote"], 0)
        self.assertGreater(stats["pairs_local"], 0)
        self.assertGreaterEqual(stats["workers_lost"], 1)

    def test_worker_killed_under_four_requests(self):
        """Requests of their own connections: all are answered, whole. No bit of a round changes: test_logits."""
        workers = self.three_workers(TINY)
        server = self.server(TINY, harness.plugin_environment(workers), parallel=4)
        answers = [None] * len(PROMPTS)

        def one(i):
            answers[i] = server.try_complete(PROMPTS[i], N_TOKENS)

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        workers[0].kill()
        for thread in threads:
            thread.join(harness.RUN_S)
        for status, answer in answers:
            self.assertEqual(status, 200, answer)
            self.assertEqual(len(answer["tokens"]), N_TOKENS)

    def test_chat(self):
        workers = self.three_workers(TINY)
        server = self.server(TINY, harness.plugin_environment(workers, local="never"), parallel=4)
        answers = [None] * 4

        def chat(i):
            answers[i] = server.request("POST", "/v1/chat/completions", {
                "messages": [{"role": "user", "content": f"Tell me of chapter {i}."}], "max_tokens": 16, "temperature": 0})

        threads = [threading.Thread(target=chat, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(harness.RUN_S)
        for status, answer in answers:
            self.assertEqual(status, 200, answer)
            self.assertIn("content", answer["choices"][0]["message"])

    def test_no_replica_and_a_lost_worker(self):
        """KVASIR_LOCAL=never: the request fails in words, the server lives and serves again."""
        slices = harness.three_slices(TINY, self.folder)
        workers = [self.worker(s) for s in slices]
        server = self.server(TINY, harness.plugin_environment(workers, local="never"))
        before = server.complete(PROMPTS[0], 24)
        workers[1].kill()
        status, answer = server.try_complete(PROMPTS[0], 24)
        self.assertEqual(status, 500, answer)
        self.assertIn("error", json.dumps(answer))
        log = "\n".join(server.err + server.out)
        self.assertIn(workers[1].link, log)
        self.assertRegex(log, r"kvasir: .*experts? ")
        self.assertEqual(server.request("GET", "/health")[0], 200)

        self.worker(slices[1], port=workers[1].port)
        # The next tries of the connection are up to 10 s apart.
        harness.wait_until(lambda: server.try_complete(PROMPTS[0], 1)[0] == 200, "the server to serve again")
        self.assertEqual(server.complete(PROMPTS[0], 24), before)


if __name__ == "__main__":
    harness.main()
