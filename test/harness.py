"""What the system tests share: workers, llama.cpp with and without the plugin, models, slices.

Standard library only. Every process a test starts is killed and reaped by its pid when the
test's `Processes` is closed, and by the kernel if the test itself dies.
"""

import atexit
import contextlib
import fcntl
import http.client
import json
import os
import pathlib
import queue
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest
import zlib

import sanitizers

SOURCE = pathlib.Path(os.environ.get("KVASIR_SOURCE_DIR", pathlib.Path(__file__).resolve().parent.parent))
BUILD = pathlib.Path(os.environ.get("KVASIR_BUILD_DIR", SOURCE / "build"))
KVASIR = BUILD / "bin" / "kvasir"
PLUGIN = BUILD / "lib" / "libggml-kvasir.so"
LOGITS = BUILD / "test-bin" / "kvasir-logits"
TINY = SOURCE / "models" / "tinymoe-en-Q4_K_M.gguf"
HELD_OUT = SOURCE / "models" / "heldout.txt"
WORK = BUILD / "test-work"

# OpenMP's threads spin while they wait for each other, which on a busy machine makes a token a
# hundred times slower: here they sleep, and llama.cpp has one thread almost everywhere.

# Generous: a machine under load must not turn a pass into a failure. Nothing waits this long
# when things work. KVASIR_TEST_PATIENCE: so many times as long, for a machine that stands still now and then.
PATIENCE = float(os.environ.get("KVASIR_TEST_PATIENCE", "1"))
START_S = 60 * PATIENCE
STOP_S = 20 * PATIENCE
RUN_S = 240 * PATIENCE

PROMPTS = ["In the beginning", "And the LORD said unto Moses,", "It is a truth universally acknowledged,"]


def clean_environment(**extra):
    """This process's environment without KVASIR_ and GGML_ variables, plus `extra`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("KVASIR_", "GGML_", "LLAMA_"))}
    env["OMP_WAIT_POLICY"] = "passive"
    env["KVASIR_DISCOVERY"] = "0"  # the network of the machine that runs the tests is none of their business
    env.update({k: str(v) for k, v in extra.items() if v is not None})
    return env


def launcher_environment(**extra):
    """For a kvasir that starts llama.cpp with the plugin itself."""
    return clean_environment(LD_PRELOAD=preload(), **extra)


def plugin_environment(workers=(), local=None, stats=None, libraries=(), **extra):
    """For a llama.cpp that loads the plugin; `libraries`: of test/preload, loaded before its own."""
    links = ",".join(w if isinstance(w, str) else w.link for w in workers)
    settings = {"KVASIR_WORKERS": links or None, "KVASIR_LOCAL": local, "KVASIR_STATS_FILE": stats}
    return clean_environment(GGML_BACKEND_PATH=PLUGIN, LD_PRELOAD=preload(*libraries), **(settings | extra))


def run(args, env=None, check=True, timeout=RUN_S, **kwargs):
    """Runs a command to its end; its output is in the error if it fails."""
    done = subprocess.run([str(a) for a in args], env=env or clean_environment(), stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, errors="replace", timeout=timeout, **kwargs)
    if check and done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, args))}\nexit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def preload(*names):
    """A value for LD_PRELOAD: what the plugin needs before it (sanitizers.py), and test/preload/NAME.c of each name. Links,
    because the list is split at spaces, which the build's path may have."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-preload-")) if names else None
    if folder:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in names:
        (folder / f"{name}.so").symlink_to(BUILD / "test-bin" / f"{name}.so")
    return sanitizers.preloaded(PLUGIN, *(folder / f"{name}.so" for name in names))


def unused_port():
    """A port that nothing listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def port_is_open(port):
    with socket.socket() as s:
        s.settimeout(1)
        return s.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition, what, timeout=START_S):
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout} s in vain for {what}")
        time.sleep(0.02)
    return value


class Process:
    """A child with its output kept; lines of stdout can be waited for."""

    def __init__(self, args, env=None, interactive=False):
        # setpriv replaces itself by the command, so the pid stays; the kernel kills the child
        # if this process dies without cleaning up.
        self.args = ["setpriv", "--pdeathsig", "KILL", "--"] + [str(a) for a in args]
        self.popen = subprocess.Popen(self.args, env=env or clean_environment(), text=True, errors="replace",
                                      stdin=subprocess.PIPE if interactive else subprocess.DEVNULL,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.out, self.err = [], []
        self._lines = queue.Queue()
        self._readers = [threading.Thread(target=self._read, args=(self.popen.stdout, self.out, self._lines), daemon=True),
                         threading.Thread(target=self._read, args=(self.popen.stderr, self.err, None), daemon=True)]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream, lines, each):
        for line in stream:
            lines.append(line.rstrip("\n"))
            if each is not None:
                each.put(line.rstrip("\n"))
        if each is not None:
            each.put(None)

    @property
    def pid(self):
        return self.popen.pid

    def running(self):
        return self.popen.poll() is None

    def describe(self):
        return f"{' '.join(self.args)}\nstdout:\n" + "\n".join(self.out[-60:]) + "\nstderr:\n" + "\n".join(self.err[-60:])

    def next_line(self, pattern, timeout=START_S):
        """The next stdout line that matches."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line like '{pattern}' in {timeout} s from {self.describe()}") from None
            if line is None:
                self.wait()
                raise AssertionError(f"ended with {self.popen.returncode} before a line like '{pattern}': {self.describe()}")
            if re.search(pattern, line):
                return line

    def tell(self, text):
        self.popen.stdin.write(text + "\n")
        self.popen.stdin.flush()

    def wait(self, timeout=RUN_S):
        status = self.popen.wait(timeout)
        for reader in self._readers:
            reader.join(STOP_S)
        return status

    def pause(self):
        self.popen.send_signal(signal.SIGSTOP)

    def resume(self):
        self.popen.send_signal(signal.SIGCONT)

    def kill(self):
        """SIGKILL, reaped."""
        if self.running():
            self.popen.kill()
        self.wait(STOP_S)

    def stop(self):
        """SIGTERM, and SIGKILL if that does not help; the exit status."""
        if self.running():
            self.popen.terminate()
            try:
                self.popen.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.popen.kill()
        return self.wait(STOP_S)

    def close(self):
        self.kill()
        for stream in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class Worker(Process):
    """kvasir worker on loopback; `link` is what goes into KVASIR_WORKERS."""

    def __init__(self, slices, port=0, threads=1, extra=()):
        super().__init__([KVASIR, "worker", "--serve", f"127.0.0.1:{port}", "--insecure", "--threads", threads, "--slice",
                          *slices, *extra])
        self.link = re.search(r"127\.0\.0\.1:\d+\S*", self.next_line(r"127\.0\.0\.1:\d+")).group(0)
        self.port = int(re.match(r"127\.0\.0\.1:(\d+)", self.link).group(1))


class Server(Process):
    """llama-server on a unix socket, so that no port can be in the way."""

    def __init__(self, model, socket_path, env, parallel=1, threads=1, extra=(), prefix=()):
        self.socket_path = str(socket_path)
        super().__init__([*prefix, "llama-server", "-m", model, "--host", self.socket_path, "--no-repack", "-t", threads, "-np", parallel,
                          "-c", 512 * parallel, "--no-webui", "--no-warmup", "--offline", *extra], env=env)
        wait_until(self._ready, "llama-server to be ready")

    def _ready(self):
        if not self.running():
            self.wait()
            raise AssertionError(f"llama-server ended at once: {self.describe()}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.request("GET", "/health")[0] == 200
        return False

    def _connect(self, timeout):
        connection = http.client.HTTPConnection("localhost", timeout=timeout)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(timeout)
        try:
            connection.sock.connect(self.socket_path)
        except OSError:
            connection.close()
            raise
        return connection

    def request(self, method, path, body=None, timeout=RUN_S):
        """(HTTP status, decoded JSON)."""
        connection = self._connect(timeout)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            try:
                return answer.status, json.loads(text)
            except ValueError:
                return answer.status, text.decode(errors="replace")
        finally:
            connection.close()

    def complete(self, prompt, n_predict=64, **extra):
        """Greedy token ids of one completion; fails on an HTTP error."""
        status, answer = self.try_complete(prompt, n_predict, **extra)
        if status != 200:
            raise AssertionError(f"HTTP {status}: {answer}\n{self.describe()}")
        return answer["tokens"]

    @staticmethod
    def _greedy(prompt, n_predict, **extra):
        return {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "top_k": 1, "cache_prompt": False, "ignore_eos": True,
                "return_tokens": True, **extra}

    def try_complete(self, prompt, n_predict=64, **extra):
        return self.request("POST", "/completion", self._greedy(prompt, n_predict, **extra))

    def stream_together(self, prompts, n_predict, at_token=None, action=None):
        """(HTTP status, token ids by prompt) of several prompts in one request: the server starts them in the same
        step, so that every batch has the same rows in each run, whatever the timing. `action` is called when the first
        prompt's token numbered `at_token` has come. Tokens that end within a character are not streamed."""
        connection = self._connect(RUN_S)
        try:
            connection.request("POST", "/completion", json.dumps(self._greedy(prompts, n_predict, stream=True)),
                               {"Content-Type": "application/json"})
            answer = connection.getresponse()
            tokens, running = [[] for _ in prompts], len(prompts)
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return 500, event
                tokens[event["index"]] += event.get("tokens", [])
                running -= bool(event.get("stop"))
                if action is not None and len(tokens[0]) >= at_token:
                    action()
                    action = None
                if running == 0:
                    break
            return answer.status, tokens
        finally:
            connection.close()


class SystemTest(unittest.TestCase):
    """A folder of its own, and every process closed at the end."""

    maxDiff = None

    @classmethod
    def setUpClass(cls):
        for needed in (KVASIR, PLUGIN, LOGITS, TINY):
            if not needed.exists():
                raise AssertionError(f"{needed} is missing; build it first.")

    def setUp(self):
        if sanitizers.library(PLUGIN):
            sanitizers.take_reports()  # what is found from now on is this test's
            self.addCleanup(lambda: self.assertEqual(sanitizers.take_reports(), ""))  # after every process has ended
        # Short: a unix socket's path has at most 107 bytes.
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="kvasir-test-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def start(self, process):
        self.addCleanup(process.close)
        return process

    def worker(self, slices, **kwargs):
        return self.start(Worker([slices] if isinstance(slices, (str, pathlib.Path)) else slices, **kwargs))

    def server(self, model, env, **kwargs):
        self._servers = getattr(self, "_servers", 0) + 1
        return self.start(Server(model, self.folder / f"{self._servers}.sock", env, **kwargs))

    def three_workers(self, model, **kwargs):
        return [self.worker(path, **kwargs) for path in three_slices(model, self.folder)]


# --- models and slices ------------------------------------------------------------------

@contextlib.contextmanager
def _made_once(path):
    """Yields a temporary path to fill if `path` is not there yet, else None. Tests run at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            yield None
            return
        temporary = path.with_suffix(".part")
        yield temporary
        temporary.rename(path)


def requantized(type_name):
    """The tiny model in another type, made by llama.cpp's own tool."""
    path = WORK / f"tinymoe-{type_name}.gguf"
    with _made_once(path) as temporary:
        if temporary:
            run(["llama-quantize", "--allow-requantize", TINY, temporary, type_name, "1"])
    return path


def synthetic(name, *options):
    """A model with random weights: a difference in the last bit changes its tokens at once."""
    # A build folder outlives changes of a model's shape.
    shape = zlib.crc32(repr(options).encode())
    path = WORK / f"synth-{name}-{shape:08x}.gguf"
    with _made_once(path) as temporary:
        if temporary:
            run([KVASIR, "synth", *options, "-o", temporary])
    return path


def random_model():
    return synthetic("small", "--layers", 3, "--experts", 24, "--top-k", 4, "--n-embd", 256, "--n-ff", 256, "--seed", 7)


def inspect(path):
    return json.loads(run([KVASIR, "inspect", "--json", path]).stdout)


def uneven_plans(model):
    """Three plans that share out all experts: unequal, with gaps, different in every layer."""
    plans = [{}, {}, {}]
    owner = [0, 1, 0, 2, 1, 0]
    for entry in inspect(model)["layers"]:
        layer = entry["layer"]
        for expert in range(entry["n_expert"]):
            plan = plans[owner[(expert + 5 * layer + expert // 7) % len(owner)]]
            plan.setdefault(str(layer), []).append([expert, expert + 1])
    return [{"layers": plan} for plan in plans]


def make_slice(model, path, *options):
    run([KVASIR, "slice", model, *options, "-o", path])
    return path


def three_slices(model, folder):
    paths = []
    for i, plan in enumerate(uneven_plans(model)):
        plan_path = folder / f"plan{i}.json"
        plan_path.write_text(json.dumps(plan))
        paths.append(make_slice(model, folder / f"slice{i}.gguf", "--plan", plan_path))
    return paths


# --- runs ---------------------------------------------------------------------------------

def logits(model, env, *options):
    """kvasir-logits to its end: its report, with the hash of all logits in 'xxh3'."""
    done = run([LOGITS, "--model", model, *options], env=env)
    return json.loads(done.stdout.strip().splitlines()[-1])


def read_stats(path):
    """The plugin's counters; call it when the process has ended, for the last state."""
    return json.loads(pathlib.Path(path).read_text())


def main():
    signal.signal(signal.SIGTERM, lambda *_: exit(1))  # so that cleanups run when ctest gives up
    unittest.main(verbosity=2)
