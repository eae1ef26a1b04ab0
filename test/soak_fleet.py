"""What ./dev soak runs: workers behind links that can be cut, a hub with its relay, nodes that joined it, a
disk that can be full and a clock that can be wrong."""

import contextlib
import ctypes
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import harness
from harness import BUILD, KVASIR, TINY

HUB = BUILD / "bin" / "kvasir-hub"
DISK_BYTES = 96 << 20
INSIDE = "KVASIR_SOAK_INSIDE"
LIBC = ctypes.CDLL(None)  # Python has no mount of its own, and the root no program
MNT_DETACH = 2


def enter():
    """Goes on inside a mount namespace of the soak's own, so that it can have a small disk, where that can be had."""
    if os.environ.get(INSIDE) is None and subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode == 0:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "-Urm", sys.executable, "-B", *sys.argv])


class Link:
    """A TCP proxy that can cut every connection, or hold the bytes for a while."""

    def __init__(self, port):
        self.port_behind, self.hold_until = port, 0.0
        self._pairs = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                behind = socket.create_connection(("127.0.0.1", self.port_behind), timeout=5)
            except OSError:
                client.close()
                continue
            behind.settimeout(None)
            for end in (client, behind):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs = [p for p in self._pairs if p[0].fileno() >= 0] + [(client, behind)]
            for source, to in ((client, behind), (behind, client)):
                threading.Thread(target=self._pump, args=(source, to), daemon=True).start()

    def _pump(self, source, to):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while time.monotonic() < self.hold_until:
                    time.sleep(0.01)
                to.sendall(data)
        self._close(source, to)

    @staticmethod
    def _close(*sockets):
        for s in sockets:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()

    def cut(self):
        for pair in self._pairs:
            self._close(*pair)

    def close(self):
        self._close(self._listener)
        self.cut()


class Disk:
    """A folder with little room, if this process may mount one."""

    def __init__(self, folder):
        self.folder = folder / "disk"
        self.folder.mkdir()
        self.small = LIBC.mount(b"soak", os.fsencode(self.folder), b"tmpfs", 0, f"size={DISK_BYTES}".encode()) == 0
        self._filling = self.folder / "filling"

    def fill(self):
        with contextlib.suppress(OSError), open(self._filling, "wb", buffering=0) as out:
            while out.write(bytes(1 << 20)):
                pass
        with contextlib.suppress(OSError), open(self._filling, "ab", buffering=0) as out:
            while out.write(bytes(512)):  # the last page
                pass

    def empty(self):
        self._filling.unlink(missing_ok=True)

    def close(self):
        if self.small:
            LIBC.umount2(os.fsencode(self.folder), MNT_DETACH)


class Clock:
    """The wall clock of the hub and the nodes."""

    def __init__(self, folder):
        self.file, self.library = folder / "clock", harness.preload("jumping_clock")
        self.set(0)

    def set(self, offset_s):
        if not self.file.exists():
            self.file.write_bytes(bytes(8))
        with open(self.file, "r+b") as out:
            out.write(struct.pack("<q", offset_s))

    def environment(self):
        return {"LD_PRELOAD": self.library, "JUMPING_CLOCK": self.file}


class Daemon:
    """A process that comes back when it was killed, and is not to end by itself."""

    def __init__(self, label):
        self.label, self.process, self.stopped, self.ended = label, None, False, []
        self.samples = []  # (kB resident, descriptors) of one life after another

    def start(self):
        raise NotImplementedError

    def start_again(self):
        self.look()
        self.process = self.start()

    def look(self):
        """Notes an end that nobody asked for, and what the process holds."""
        status = self.process.popen.poll()
        if status is not None and status != -signal.SIGKILL:
            self.ended.append(f"{self.label} ended by itself with {status}: {self.process.describe()}")
        elif status is None:
            with contextlib.suppress(OSError):
                self.samples.append(resources(self.process.pid))

    def kill(self):
        self.look()
        self.process.close()

    def signal(self, number):
        self.stopped = number == signal.SIGSTOP
        os.kill(self.process.pid, number)

    def stop(self):
        """In order; the exit status."""
        if self.stopped:
            self.signal(signal.SIGCONT)
        return self.process.stop()

    def close(self):
        if self.process is None:
            return
        if self.stopped:
            self.signal(signal.SIGCONT)
        self.process.close()


class Slot(Daemon):
    """A worker on a port of its own, behind a link."""

    def __init__(self, label, slice_path, stats):
        super().__init__(label)
        self.slice, self.stats, self.link = slice_path, stats, None
        self.process = self.start()
        self.link = Link(self.process.port)

    def start(self):
        return harness.Worker([self.slice], port=self.link.port_behind if self.link else 0, extra=["--stats-file", self.stats])

    def close(self):
        self.link.close()
        super().close()


class Hub(Daemon):
    """With its relay, behind a link that nodes and backbones dial."""

    def __init__(self, disk, folder, clock):
        super().__init__("hub")
        self.data, self.models, self.clock, self.link = disk.folder / "hub", folder / "models", clock, None
        self.models.mkdir()
        (self.models / "tiny.gguf").symlink_to(TINY)
        self.process = self.start()
        self.link = Link(int(self.process.url.rsplit(":", 1)[1]))
        self.url = f"http://127.0.0.1:{self.link.port}"

    def start(self):
        process = harness.Process([HUB, "--data", self.data, "--models", self.models, "--heartbeat", "2", "--target", "3", "--listen",
                                   f"127.0.0.1:{self.link.port_behind if self.link else 0}"],
                                  env=harness.clean_environment(**self.clock.environment()))
        process.url = process.next_line(r"^http://")
        return process

    def token(self, scope):
        return harness.run([HUB, "token", "create", "--data", self.data, "--scope", scope]).stdout.strip()

    def close(self):
        self.link.close()
        super().close()


class Node(Daemon):
    """kvasir join."""

    def __init__(self, label, hub, token, disk, clock, memory, extra):
        super().__init__(label)
        self.hub, self.token, self.clock, self.memory, self.extra = hub, token, clock, memory, extra
        self.data = disk.folder / label
        self.process = self.start()

    def start(self):
        return harness.Process([KVASIR, "join", self.hub.url, "--memory", self.memory, "--threads", 1, "--data", self.data, "--cache",
                                self.data / "slices", *self.extra],
                               env=harness.clean_environment(KVASIR_TOKEN=self.token, **self.clock.environment()))


def resources(pid):
    """(kB resident, descriptors); OSError of a process that has ended."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    if "VmRSS:" not in status:
        raise ProcessLookupError(f"process {pid} has ended")
    return int(status.split("VmRSS:")[1].split()[0]), len(os.listdir(f"/proc/{pid}/fd"))
