"""Machines of a small network in one process: network namespaces joined by a bridge.

The test runs again inside a user namespace of its own, so it needs no rights and leaves nothing
behind: everything is gone with its last process.
"""

import itertools
import os
import pathlib
import socket
import subprocess
import sys
import threading

import harness

INSIDE = "KVASIR_NETLAB"
BRIDGE = "br0"


def why_not():
    """What is missing for network namespaces here, or None."""
    for tool in ("unshare", "nsenter", "ip", "nft"):
        if subprocess.run(["sh", "-c", f"command -v {tool}"], capture_output=True).returncode != 0:
            return f"no {tool} here"
    probe = ("ip link add br9 type bridge && unshare -n sleep 5 & sleep 0.2; ip link add va type veth peer name vb && "
             "nft add table inet t")
    done = subprocess.run(["unshare", "-Urn", "sh", "-c", probe], capture_output=True, text=True)
    return None if done.returncode == 0 else f"no network namespaces here: {done.stderr.strip()}"


def enter():
    """Call first in main: goes on inside namespaces of this test's own, where they can be had."""
    if inside():
        ip("link", "set", "lo", "up")
    elif why_not() is None:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "-Urn", sys.executable, "-B", *sys.argv])


def inside():
    return os.environ.get(INSIDE) is not None


def ip(*args):
    harness.run(["ip", *args])


class Lan:
    """The bridge that stands for the internet; everything that passes it can be recorded."""

    def __init__(self):
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        self.hosts = []

    def host(self, name, address):
        self.hosts.append(Host(name, address))
        self.hosts[-1].connect()
        return self.hosts[-1]

    def close(self):
        for host in self.hosts:
            host.close()
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


class Host:
    # The kernel takes a namespace down some time after its last process: a name is used once.
    numbers = itertools.count()

    def __init__(self, name, address):
        self.name, self.address = name, address
        # Ends with this process, and holds none of its output open.
        self.holder = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "--", "unshare", "-n", "sh", "-c", "echo up; exec sleep 1000"],
                                       stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.holder.stdout.readline()

    def connect(self):
        address = self.address
        self.outer = f"v{next(self.numbers)}"
        ip("link", "add", self.outer, "type", "veth", "peer", "name", "eth0", "netns", str(self.holder.pid))
        ip("link", "set", self.outer, "master", BRIDGE, "up")
        for command in (["link", "set", "lo", "up"], ["addr", "add", f"{address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            harness.run(self.command("ip", *command))

    def command(self, *args):
        return ["nsenter", "-t", str(self.holder.pid), "-n", "--", *map(str, args)]

    def behind_nat(self, port=443):
        """Nothing comes in by itself, and only TCP to `port` goes out."""
        rules = f"""
            table inet home {{
              chain input {{
                type filter hook input priority 0; policy drop;
                iif lo accept
                ct state established accept
              }}
              chain output {{
                type filter hook output priority 0; policy drop;
                oif lo accept
                tcp dport {port} accept
              }}
            }}
            """
        subprocess.run(self.command("nft", "-f", "-"), input=rules, text=True, check=True)

    def open_up(self):
        harness.run(self.command("nft", "flush", "ruleset"))

    def close(self):
        self.holder.kill()
        self.holder.wait()
        self.holder.stdout.close()


class Tap:
    """Every byte that passes the bridge, from all of its ports."""

    def __init__(self):
        self.packets = []
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self.socket.bind((BRIDGE, 0))
        self.socket.settimeout(0.2)
        # A bridge shows its own port only what is for it, unless it is promiscuous.
        ip("link", "set", BRIDGE, "promisc", "on")
        self.stopping = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        while not self.stopping:
            try:
                self.packets.append(self.socket.recv(65536))
            except TimeoutError:
                continue

    def close(self):
        self.stopping = True
        self.thread.join()
        self.socket.close()

    def holds(self, needle):
        """Whether one packet has these bytes."""
        return any(needle in packet for packet in self.packets)

    def size(self):
        return sum(len(packet) for packet in self.packets)


def certificate(folder, name):
    """(certificate, key) of a hub under that name ("IP:…", "DNS:…"), signed by itself."""
    certificate, key = folder / "hub.pem", folder / "hub.key"
    harness.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                 "-subj", "/CN=hub", "-addext", f"subjectAltName={name}", "-keyout", key, "-out", certificate])
    return certificate, pathlib.Path(key)
