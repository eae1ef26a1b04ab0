"""The older framing, spoken by a client that knows nothing else: the same numbers as the frames, bit
for bit, and right ones, against float64 on weights that gguf-py reads from the slice."""

import array
import random
import struct

import gguf
import numpy

import harness
from clients import FramedClient, RawClient
from harness import TINY, SystemTest


def random_rows(n_tokens, n_embd, seed=1):
    source = random.Random(seed)
    return [[source.gauss(0, 1) for _ in range(n_embd)] for _ in range(n_tokens)]


def random_selection(n_tokens, n_used, ids, seed=2):
    source = random.Random(seed)
    return [source.sample(ids, n_used) for _ in range(n_tokens)]


def expert_ffn_f64(path, layer, rows, selection):
    """silu(gate x) * (up x), through down: [n_tokens, n_used, n_embd]; ids are local to the file."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}

    def weight(role):
        t = tensors[f"blk.{layer}.ffn_{role}_exps.weight"]
        return gguf.dequantize(t.data, t.tensor_type).astype(numpy.float64)

    gate, up, down = weight("gate"), weight("up"), weight("down")
    out = []
    for row, experts in zip(rows, selection):
        x = numpy.array(row, dtype=numpy.float32).astype(numpy.float64)
        for e in experts:
            g = gate[e] @ x
            out.append(down[e] @ (g / (1 + numpy.exp(-g)) * (up[e] @ x)))
    return numpy.array(out)


class RawFraming(SystemTest):
    LAYER, EXPERTS = 1, [1, 3, 4, 7, 8, 20, 21, 31]
    N_EMBD = N_FF = 256

    def setUp(self):
        super().setUp()
        self.slice = harness.make_slice(TINY, self.folder / "one.gguf", "--layers", self.LAYER,
                                        "--experts", ",".join(map(str, self.EXPERTS)))

    def model_ids(self, selection):
        return [[self.EXPERTS[local] for local in s] for s in selection]

    def test_same_bits_as_the_frames(self):
        worker = self.worker(self.slice)
        with RawClient(worker.port) as raw, FramedClient(worker.port) as framed:
            self.assertEqual(framed.holdings[self.LAYER]["experts"], self.EXPERTS)
            # One token, a few, and enough of each expert for the kernels of large batches.
            for n_tokens in (1, 3, 64):
                rows = random_rows(n_tokens, self.N_EMBD, seed=n_tokens)
                selection = random_selection(n_tokens, 4, range(len(self.EXPERTS)))
                a = raw.compute(self.N_EMBD, rows, selection)
                b = framed.compute(self.LAYER, self.N_FF, rows, self.model_ids(selection))
                self.assertEqual(a, b, f"{n_tokens} tokens")

    def test_right_numbers(self):
        model = harness.synthetic("f32", "--layers", 2, "--experts", 8, "--n-embd", 256, "--n-ff", 128, "--types", "experts=F32")
        path = harness.make_slice(model, self.folder / "f32.gguf", "--layers", 1, "--experts", "1,3,4,7")
        worker = self.worker(path)
        rows, selection = random_rows(20, 256), random_selection(20, 2, range(4))
        with RawClient(worker.port) as raw:
            answer = numpy.frombuffer(raw.compute(256, rows, selection), dtype="<f4").reshape(-1, 256)
        expected = expert_ffn_f64(path, 1, rows, selection)
        error = numpy.abs(answer - expected).max() / numpy.abs(expected).max()
        self.assertLess(error, 1e-5)
        self.assertGreater(numpy.abs(expected).max(), 1e-3)

    def test_close_numbers_when_quantised(self):
        worker = self.worker(self.slice)
        rows, selection = random_rows(16, self.N_EMBD), random_selection(16, 4, range(len(self.EXPERTS)))
        with RawClient(worker.port) as raw:
            answer = numpy.frombuffer(raw.compute(self.N_EMBD, rows, selection), dtype="<f4").reshape(-1, self.N_EMBD)
        expected = expert_ffn_f64(self.slice, self.LAYER, rows, selection)
        cosine = (answer * expected).sum() / numpy.sqrt((answer**2.0).sum() * (expected**2).sum())
        self.assertGreater(cosine, 0.999)

    def test_older_command_name(self):
        worker = self.start(harness.Process([harness.BUILD / "bin" / "linkcpp-expert-worker", "--serve", "0", "--model", TINY,
                                             "--layer", str(self.LAYER)]))
        port = int(worker.next_line(r":\d+$").rsplit(":", 1)[1])
        sliced = self.worker(self.slice)
        rows, selection = random_rows(5, self.N_EMBD), random_selection(5, 4, range(len(self.EXPERTS)))
        with RawClient(port) as whole, RawClient(sliced.port) as part:
            # In a whole model an expert's rank is its number.
            self.assertEqual(whole.compute(self.N_EMBD, rows, self.model_ids(selection)), part.compute(self.N_EMBD, rows, selection))

    def test_refused_requests(self):
        """Each closes its connection, without an answer; the worker serves on."""
        worker = self.worker(self.slice)
        row = random_rows(1, self.N_EMBD)[0]
        bad = [(0, 1, row, []), (-1, 1, row, []), (2, 0, [], []), (2, -5, [], []), (2_000_000, 1, [], []), (4, 2_000_000_000, [], []),
               (2, 1, row, [0, 8]), (2, 1, row, [0, -1]), (2, 1, row, [3, 3]), (9, 1, row, list(range(9)))]
        for n_used, n_tokens, rows, selection in bad:
            with self.subTest(n_used=n_used, n_tokens=n_tokens, selection=selection), RawClient(worker.port, timeout=10) as client:
                try:
                    client.send(n_used, n_tokens, rows, selection)
                    self.assertEqual(client.sock.recv(1), b"")
                except ConnectionError:
                    pass  # closed with bytes of ours unread
        with RawClient(worker.port) as client:
            self.assertEqual(len(client.compute(self.N_EMBD, [row], [[0, 1]])), 2 * 4 * self.N_EMBD)

    def test_no_layer_to_serve(self):
        """Several layers and none chosen: the framing cannot say which."""
        worker = self.worker(TINY)
        with RawClient(worker.port, timeout=10) as client:
            try:
                client.send(1, 1, random_rows(1, self.N_EMBD)[0], [0])
                self.assertEqual(client.sock.recv(1), b"")
            except ConnectionError:
                pass
        chosen = self.worker(TINY, extra=["--layer", "2"])
        with RawClient(chosen.port) as client:
            rows = random_rows(1, self.N_EMBD)
            values = array.array("f", client.compute(self.N_EMBD, rows, [[5]]))
            self.assertTrue(any(values))

    def test_endless_trickle(self):
        """A request of a few bytes holds nothing up for others."""
        worker = self.worker(self.slice)
        with RawClient(worker.port) as slow, RawClient(worker.port) as other:
            slow.sock.sendall(struct.pack("<i", 4))
            self.assertEqual(len(other.compute(self.N_EMBD, random_rows(1, self.N_EMBD), [[2]])), 4 * self.N_EMBD)


if __name__ == "__main__":
    harness.main()
