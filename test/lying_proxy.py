"""A proxy between a backbone and an honest worker that changes some of the answers' rows: with it
a worker lies as far as the backbone can tell. Only tests have it; it works on plain f32 frames."""

import contextlib
import random
import socket
import struct
import threading

HEADER = struct.Struct("<4sHBBQII")  # magic, version, type, flags, request id, payload length, checksum
EXEC, RESULT = 4, 5
CHECKSUM = 1
RESULT_HEAD_BYTES = 24
KINDS = ("flipped bit", "norm", "older answer", "other row", "nan")


class LyingProxy:
    """`link` goes into KVASIR_WORKERS. `share`: of the rows answered that are changed; `kinds`: how."""

    def __init__(self, port, share, kinds=KINDS[:4], seed=1):
        self.worker, self.share, self.kinds = port, share, kinds
        self.lies = self.rows = 0
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._older = None
        self._open = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.link = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        for s in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)
            s.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
                worker = socket.create_connection(("127.0.0.1", self.worker))
            except OSError:
                return
            for s in (client, worker):
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open += [client, worker]
            threading.Thread(target=self._pump, args=(client, worker, bytes), daemon=True).start()
            threading.Thread(target=self._pump, args=(worker, client, self._change), daemon=True).start()

    @staticmethod
    def _read(source, n):
        data = bytearray()
        while len(data) < n:
            piece = source.recv(n - len(data))
            if not piece:
                raise OSError("closed")
            data += piece
        return data

    def _pump(self, source, to, change):
        with contextlib.suppress(OSError):
            while True:
                header = self._read(source, HEADER.size)
                magic, version, kind, flags, request, length, checksum = HEADER.unpack(header)
                payload = self._read(source, length)
                if kind == RESULT and change is not bytes:
                    payload = change(payload)
                    flags, checksum = flags & ~CHECKSUM, 0  # it is optional; nothing else protects a plain link
                to.sendall(HEADER.pack(magic, version, kind, flags, request, length, checksum) + payload)
        for s in (source, to):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def _change(self, payload):
        head, rows = payload[:RESULT_HEAD_BYTES], payload[RESULT_HEAD_BYTES:]
        n_embd, _, n_rows = struct.unpack_from("<III", head, 4)
        size = 4 * n_embd
        if len(rows) != n_rows * size:
            return payload  # not f32
        with self._lock:
            for i in range(n_rows):
                row = bytes(rows[i * size:(i + 1) * size])
                self.rows += 1
                if self._rng.random() < self.share:
                    lie = self._lie(row, n_embd, bytes(rows[:size]))
                    if lie != row:
                        self.lies += 1
                        rows[i * size:(i + 1) * size] = lie
                self._older = row
        return head + rows

    def _lie(self, row, n_embd, first):
        values = list(struct.unpack(f"<{n_embd}f", row))
        at = self._rng.randrange(n_embd)
        kind = self._rng.choice(self.kinds)
        if kind == "flipped bit":
            changed = bytearray(row)
            changed[4 * at + self._rng.randrange(3)] ^= 1 << self._rng.randrange(8)  # not in the exponent's top
            return bytes(changed)
        if kind == "norm":
            return struct.pack(f"<{n_embd}f", *(1.01 * v for v in values))
        if kind == "older answer":
            return self._older if self._older is not None and len(self._older) == len(row) else first
        if kind == "other row":
            return first
        values[at] = float("nan")
        return struct.pack(f"<{n_embd}f", *values)
