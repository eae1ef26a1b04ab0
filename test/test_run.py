"""kvasir run around a stand-in for llama-server: what it is told, and what becomes of signals and exit statuses."""

import json
import os
import signal

import harness
from harness import KVASIR, TINY, SystemTest

# Shows its arguments and settings; serves /health once the plugin's sign is there; ends as it is told.
STAND_IN = """#!/usr/bin/env python3
import http.server, json, os, signal, sys
args = sys.argv[1:]
print("STARTED " + json.dumps({"args": args, "env": {k: v for k, v in os.environ.items()
      if k.startswith(("KVASIR_", "GGML_", "OMP_", "GOMP_"))}}), flush=True)
if "--die" in args:
    sys.exit(int(args[args.index("--die") + 1]))
for s in (signal.SIGINT, signal.SIGTERM):
    signal.signal(s, lambda number, frame: (print(f"GOT {number}", flush=True), os._exit(30 + number)))
if "--no-plugin" not in args:
    open(os.environ["KVASIR_STATS_FILE"], "w").write("{}")
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer((args[args.index("--host") + 1], int(args[args.index("--port") + 1])), Health).serve_forever()
"""


class RunTest(SystemTest):
    def setUp(self):
        super().setUp()
        bin_folder = self.folder / "bin"
        bin_folder.mkdir()
        program = bin_folder / "llama-server"
        program.write_text(STAND_IN)
        program.chmod(0o755)
        self.path = f"{bin_folder}:{os.environ['PATH']}"

    def environment(self, **extra):
        env = harness.clean_environment(PATH=self.path, **extra)
        env.pop("OMP_WAIT_POLICY", None)
        return env

    def launch(self, *args, **env):
        port = harness.unused_port()
        run = self.start(harness.Process([KVASIR, "run", TINY, "--listen", port, *args], env=self.environment(**env)))
        run.port = port
        run.told = json.loads(run.next_line("^STARTED").split(" ", 1)[1])
        return run

    def refused(self, *args, **env):
        done = harness.run([KVASIR, "run", *args], env=self.environment(**env), check=False)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertNotIn("STARTED", done.stdout)
        return done.stderr

    def test_flags_and_variables(self):
        run = self.launch("--workers", "127.0.0.1:1", "--local", "never")
        self.assertEqual(run.next_line("^http"), f"http://127.0.0.1:{run.port}")
        for flag in ("--no-repack", "--no-warmup", "--cpu-moe"):
            self.assertIn(flag, run.told["args"])
        env = run.told["env"]
        self.assertEqual(env["KVASIR_WORKERS"], "127.0.0.1:1")
        self.assertEqual(env["KVASIR_LOCAL"], "never")
        self.assertEqual((env["OMP_WAIT_POLICY"], env["GOMP_SPINCOUNT"]), ("passive", "1000"))
        self.assertTrue(env["GGML_BACKEND_PATH"].endswith("libggml-kvasir.so"))
        self.assertNotIn("KVASIR_HUB", env)

    def test_what_the_user_says_wins(self):
        run = self.launch("--workers", "192.0.2.1:1", "--", "--repack", "--warmup", "-ot", "x=CPU", KVASIR_HUB="https://h")
        for flag in ("--no-repack", "--no-warmup", "--cpu-moe"):
            self.assertNotIn(flag, run.told["args"])
        self.assertNotIn("GOMP_SPINCOUNT", run.told["env"])  # the worker is elsewhere
        self.assertNotIn("KVASIR_HUB", run.told["env"])

    def test_a_backbone_file_keeps_no_experts(self):
        backbone = harness.make_slice(TINY, self.folder / "backbone.gguf", "--backbone")
        run = self.start(harness.Process([KVASIR, "run", backbone, "--listen", harness.unused_port(), "--workers", "127.0.0.1:1"],
                                         env=self.environment()))
        told = json.loads(run.next_line("^STARTED").split(" ", 1)[1])
        self.assertEqual(told["env"]["KVASIR_REPLICA"], "none")
        self.assertEqual(told["args"][told["args"].index("-lm") + 1], "dio")

    def test_fast_may_repack(self):
        self.assertNotIn("--no-repack", self.launch("--workers", "192.0.2.1:1", "--numerics", "fast").told["args"])

    def test_signals_and_exit_statuses(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            run = self.launch("--workers", "127.0.0.1:1")
            run.next_line("^http")
            run.popen.send_signal(number)
            run.next_line(f"^GOT {int(number)}$")
            self.assertEqual(run.wait(), 30 + number)
        self.assertEqual(self.launch("--workers", "127.0.0.1:1", "--", "--die", "7").wait(), 7)
        # Killed without warning, it takes llama-server with it.
        run = self.launch("--workers", "127.0.0.1:1")
        run.next_line("^http")
        run.kill()
        self.assertIn("GOT 15", run.out)

    def test_a_server_without_the_plugin_is_no_success(self):
        run = self.launch("--workers", "127.0.0.1:1", "--", "--no-plugin")
        self.assertEqual(run.wait(), 1)
        self.assertIn("without Kvasir's plugin", run.err[-1])

    def test_what_is_wrong_is_said(self):
        links = ("--workers", "127.0.0.1:1")
        self.assertIn("who computes", self.refused(TINY))
        self.assertIn("nosuch.gguf", self.refused(self.folder / "nosuch.gguf", *links))
        self.assertIn("one of them", self.refused(TINY, *links, "--hub", "https://h"))
        self.assertIn("token", self.refused(TINY, "--hub", "http://127.0.0.1:1"))
        self.assertIn("does not answer", self.refused(TINY, "--hub", "http://127.0.0.1:1", KVASIR_TOKEN="t"))
        self.assertIn("in the clear", self.refused(TINY, "--hub", "http://192.0.2.1", KVASIR_TOKEN="t"))
        slice_path = harness.make_slice(TINY, self.folder / "slice.gguf", "--experts", "0:4")
        self.assertIn("slice", self.refused(slice_path, *links))
        (self.folder / "text.gguf").write_text("no model")
        self.assertIn("text.gguf", self.refused(self.folder / "text.gguf", *links))
        with harness.socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            self.assertIn(str(port), self.refused(TINY, *links, "--listen", port))


if __name__ == "__main__":
    harness.main()
