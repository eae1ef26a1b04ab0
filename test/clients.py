"""Two small clients of a worker, written from docs/protocol.md alone: one speaks the frames of
sections 1 to 4, one the older raw framing of section 9."""

import array
import base64
import os
import socket
import struct

HELLO, HOLDINGS, LAYER_RECIPE, EXEC, RESULT, ERROR = 1, 2, 3, 4, 5, 6
EXACT, FAST = 0, 2
GATE_SPLIT, SWIGLU = 1, 0
MORE = 2


def _receive(sock, n):
    data = bytearray()
    while len(data) < n:
        part = sock.recv(n - len(data))
        if not part:
            raise ConnectionError(f"closed after {len(data)} of {n} bytes")
        data += part
    return bytes(data)


def _floats(data):
    values = array.array("f")
    values.frombytes(data)
    return values


class RelayedSocket:
    """The socket of an older backbone at a hub's relay: binary messages, masked with a random key; the token in the address."""

    def __init__(self, hub_port, session, token, timeout=30):
        self.sock = socket.create_connection(("127.0.0.1", hub_port), timeout)
        key = base64.b64encode(os.urandom(16)).decode()
        self.sock.sendall(f"GET /api/expert-relay?session={session}&token={token} HTTP/1.1\r\nHost: hub\r\nUpgrade: websocket\r\n"
                          f"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += _receive(self.sock, 1)
        self.status = int(head.split()[1])
        self.messages = 0  # whole ones that came
        self._payload = b""

    def close(self):
        self.sock.close()

    def sendall(self, data):
        length = struct.pack(">BBH", 0x82, 0x80 | 126, len(data)) if 126 <= len(data) < 65536 else (
            struct.pack(">BB", 0x82, 0x80 | len(data)) if len(data) < 126 else struct.pack(">BBQ", 0x82, 0x80 | 127, len(data)))
        key = os.urandom(4)
        pad = key * (len(data) // 4 + 1)
        masked = (int.from_bytes(data, "big") ^ int.from_bytes(pad[:len(data)], "big")).to_bytes(len(data), "big")
        self.sock.sendall(length + key + masked)

    def recv(self, n):
        while not self._payload:
            first, second = _receive(self.sock, 2)
            size = second & 0x7F
            size = struct.unpack(">H", _receive(self.sock, 2))[0] if size == 126 else struct.unpack(">Q", _receive(self.sock, 8))[0] if size == 127 else size
            payload = _receive(self.sock, size)
            if first & 0x0F == 8:
                return b""
            if first & 0x0F <= 2:
                self._payload += payload
                self.messages += first >> 7
        out, self._payload = self._payload[:n], self._payload[n:]
        return out


class RawClient:
    """int32 n_used, int32 n_tokens, f32 cur, i32 sel -> f32 experts."""

    def __init__(self, port, timeout=30, sock=None):
        self.sock = sock or socket.create_connection(("127.0.0.1", port), timeout)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()

    def send(self, n_used, n_tokens, rows, selection):
        self.sock.sendall(struct.pack("<ii", n_used, n_tokens) + array.array("f", rows).tobytes() + array.array("i", selection).tobytes())

    def compute(self, n_embd, rows, selection):
        """`rows`: one list a token; `selection`: one list of local ids a token. The answer's bytes."""
        n_used, n_tokens = len(selection[0]), len(rows)
        self.send(n_used, n_tokens, [v for row in rows for v in row], [e for s in selection for e in s])
        return _receive(self.sock, 4 * n_embd * n_used * n_tokens)


class FramedClient:
    """HELLO, HOLDINGS, LAYER_RECIPE and EXEC in class exact."""

    def __init__(self, port, timeout=30):
        # In fast the ids are not compared; the worker's own HELLO then tells what exact wants.
        self.sock = socket.create_connection(("127.0.0.1", port), timeout)
        identity = self._greet(FAST, bytes(32), b"", b"")
        self.sock.close()
        self.sock = socket.create_connection(("127.0.0.1", port), timeout)
        self._greet(EXACT, *identity)
        self.holdings = self._read_holdings()
        self._request = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.sock.close()

    def _send(self, kind, payload, request=0):
        self.sock.sendall(struct.pack("<4sHBBQII", b"KVSR", 1, kind, 0, request, len(payload), 0) + payload)

    def _frame(self, wanted):
        magic, version, kind, flags, request, length, _ = struct.unpack("<4sHBBQII", _receive(self.sock, 24))
        assert (magic, version) == (b"KVSR", 1), (magic, version)
        payload = _receive(self.sock, length)
        if kind == ERROR:
            raise ConnectionError(payload[4:].decode())
        assert kind == wanted, f"frame {kind} instead of {wanted}"
        return flags, request, payload

    @staticmethod
    def _text(data):
        return struct.pack("<H", len(data)) + data

    def _greet(self, numerics, probe, ggml_version, cpu_variant):
        texts = b"".join(self._text(t) for t in (b"test client", ggml_version, cpu_variant, b""))
        self._send(HELLO, struct.pack("<HBB", 1, 1, numerics) + probe + texts)
        _, _, payload = self._frame(HELLO)
        assert payload[2] == 2, "the other end is no worker"
        at, fields = 36, []
        for _ in range(4):
            (length,) = struct.unpack_from("<H", payload, at)
            fields.append(payload[at + 2:at + 2 + length])
            at += 2 + length
        return payload[4:36], fields[1], fields[2]

    def _read_holdings(self):
        _, _, payload = self._frame(HOLDINGS)
        (_, count), at, out = struct.unpack_from("<QI", payload, 0), 12, {}
        for _ in range(count):
            layer, group, n_expert, n_embd, n_ranges = struct.unpack_from("<5I", payload, at + 32)
            ranges = [struct.unpack_from("<II", payload, at + 52 + 8 * i) for i in range(n_ranges)]
            out[layer] = {"id": payload[at:at + 32], "n_expert": n_expert, "n_embd": n_embd,
                          "experts": [e for a, b in ranges for e in range(a, b)]}
            at += 52 + 8 * n_ranges
        return out

    def compute(self, layer, n_ff, rows, selection, by_expert=False):
        """As RawClient.compute, but with the model's expert ids, and the answer's rows in the order of the pairs,
        which is by expert, as a backbone sends them, if `by_expert`."""
        held = self.holdings[layer]
        self._send(LAYER_RECIPE, struct.pack("<I32sBBBBHH12f3I", 0, held["id"], 0, GATE_SPLIT, SWIGLU, 0, 0, 0, *[0.0] * 12,
                                             held["n_embd"], n_ff, held["n_expert"]))
        pairs = [(row, expert) for row, experts in enumerate(selection) for expert in experts]
        if by_expert:
            pairs.sort(key=lambda pair: pair[1])
        self._request += 1
        self._send(EXEC, struct.pack("<I4B4I", 0, EXACT, 0, 0, 0, len(rows), len(pairs), held["n_embd"], 0) +
                   b"".join(struct.pack("<II", *pair) for pair in pairs) + b"".join(array.array("f", row).tobytes() for row in rows),
                   self._request)
        answer = bytearray()
        while True:
            flags, request, payload = self._frame(RESULT)
            assert request == self._request
            answer += payload[24:]
            if not flags & MORE:
                return bytes(answer)
