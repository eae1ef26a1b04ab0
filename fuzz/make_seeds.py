#!/usr/bin/env python3
"""Writes the small seeds of the text and operation fuzzers into fuzz/corpus (those of frames, GGUF and
the older framing come from their tests). What a fuzzer finds is added beside them by hand."""

import pathlib
import random

CORPUS = pathlib.Path(__file__).resolve().parent / "corpus"


def put(target, name, data):
    path = CORPUS / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def hub_api():
    def request(name, start, body="", content_range="", if_range="", if_none_match=""):
        put("hub_api", name, "\n".join([start, content_range, if_range, if_none_match, body]))

    shard = "/api/proxy/models/m/expert-shard?layers=0:2&experts=0:4"
    request("models", "GET /api/models")
    request("manifest", "GET /api/models/m/manifest")
    request("openapi", "GET /api/openapi.json")
    request("shard", f"GET {shard}")
    request("shard-part", f"GET {shard}", content_range="bytes=0-99")
    request("shard-parts", f"GET {shard}", content_range="bytes=0-0,100-199,-5")
    request("shard-past", f"GET {shard}", content_range="bytes=99999999999999999999-")
    request("shard-overflow", f"GET {shard}", content_range="bytes=0-18446744073709551615")
    request("shard-if-range", f"GET {shard}", content_range="bytes=1-2", if_range='"x"')
    request("shard-known", f"GET {shard}", if_none_match="*")
    request("shard-odd", "GET /api/proxy/models/m/expert-shard?layers=1:1&experts=18446744073709551615:0")
    request("backbone", "GET /api/proxy/models/m/backbone", content_range="bytes=-100")
    request("traversal", "GET /api/models/..%2f..%2fetc%2fpasswd/manifest")
    request("nul", "GET /api/models/m%00/manifest")
    request("sql", "GET /api/expert-demand?model=m'%20OR%201=1--")
    request("demand", "GET /api/expert-demand?model=m")
    request("routes", "GET /api/expert-routes?model=m&since=1&wait_s=0")
    request("nodes", "GET /api/admin/nodes")
    request("ledger", "GET /api/contributions?since=2026-03-01")
    request("coverage", "POST /api/expert-coverage",
            '{"worker_id":"w","model":"m","n_layer":2,"n_expert":8,"segments":[[0,0,4],[1,0,8]],'
            '"url":"192.0.2.7:7000","fingerprint":"' + "ab" * 32 + '","speed_rows_per_s":100.5,"capacity_bytes":1000000}')
    request("coverage-lies", "POST /api/expert-coverage",
            '{"worker_id":"w","model":"m","n_layer":4294967296,"n_expert":-1,"segments":[[0,4294967295,4294967296],[9,9]],"url":"x"}')
    request("volunteer", "POST /api/expert-volunteer", '{"model":"","max_experts":64,"memory_bytes":340000000,"worker_id":"w"}')
    request("volunteer-much", "POST /api/expert-volunteer", '{"model":"m","max_experts":18446744073709551615}')
    request("heat", "POST /api/expert-heat", '{"model":"m","saturation":0.25,"layers":[{"layer":0,"uses":[12,0,7]}]}')
    request("report", "POST /api/contributions",
            '{"report_id":"a1","day":"2026-03-01","entries":[{"worker_id":"w","pairs":1000,"rows":250,"bytes":1}]}')
    request("challenge", "POST /api/auth/challenge", '{"public_key":"' + "00" * 32 + '"}')
    request("node-token", "POST /api/auth/node-token",
            '{"public_key":"' + "00" * 32 + '","nonce":"kvasir-node-token:00","signature":"' + "00" * 64 + '"}')
    for action in ("ban", "unban", "evict"):
        request(action, f"POST /api/admin/{action}", '{"worker_id":"w","reason":"wrong answers"}')
    request("deep", "POST /api/expert-heat", "[" * 2000)
    request("not-utf8", "POST /api/admin/ban", '{"worker_id":"\udcff"}'.encode("utf-8", "surrogateescape").decode("latin-1"))


def market():
    rng = random.Random(7)
    for name, length in (("short", 40), ("long", 600), ("longer", 2000)):
        put("market", name, bytes([1]) + rng.randbytes(length))
        put("market", f"{name}-proved", bytes([0]) + rng.randbytes(length))


def tokens():
    put("tokens", "empty", b"\0")
    put("tokens", "form", b"\0kvasir_0123456789abcdef_" + b"00" * 32)
    put("tokens", "valid", b"\1")
    put("tokens", "valid-changed", b"\1\x10\x01")
    put("tokens", "valid-longer", b"\1\xff\x20")
    put("tokens", "expired", b"\3")
    put("tokens", "nul", b"\0kvasir_\0_\0")


def grants():
    put("grants", "text", b"\0grant1.00.11.22")
    put("grants", "not-a-grant", b"\0kvasir_0123456789abcdef_00")
    put("grants", "right", b"\1")
    put("grants", "proof-changed", b"\1\xff\1\x01")
    put("grants", "capital", b"\1\x0a\0\x20")
    put("grants", "signed-nonsense", b"\2" + b"\xff" * 60)
    names = b"".join(len(name).to_bytes(2, "little") + name for name in (b"0123", b"laptop-1a2b", b"qwen"))
    put("grants", "signed", b"\3" + (1_800_000_600).to_bytes(8, "little") + names)
    put("grants", "signed-for-ever", b"\3" + b"\xff" * 8 + names)


def relay():
    worker, backbone = b"\0\0", b"\0\1"  # of session a, with the first token
    put("relay", "pair", worker + backbone + b"\3\1\x50\x40" + b"\3\0\x03\x05" + b"\7\0\7\1")
    put("relay", "asker-first", backbone + worker + b"\3\0\xff\xff\3\0\xff\xff")
    put("relay", "gone", worker + backbone + b"\3\1\2\2\x09\0" + worker + b"\x09\1")
    put("relay", "half-closed", worker + backbone + b"\x08\1\3\0\1\1")
    put("relay", "control", worker + backbone + b"\6\1\x09\0\4ping\6\0\x08\0\2\x03\xe8")
    put("relay", "speaks-first", worker + b"\3\0\1\1")
    put("relay", "many", (worker + backbone) * 6 + b"\0\2\0\3\0\4\0\5\0\6\0\x08\0\x09")
    put("relay", "raw", worker + backbone + b"\5\1\x0c\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")
    put("relay", "key", b"\2\0\x20dGhlIHNhbXBsZSBub25jZQ==\r\nA: b\r\n")


def websocket():
    answer = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    put("websocket", "wrong-key", b"\0\x20" + answer)
    put("websocket", "refused", b'\0\x08HTTP/1.1 403 Forbidden\r\nContent-Length: 29\r\n\r\n{"error":"banned: of no use."}')
    put("websocket", "frames", b"\2\x20\x82\x05hello\x02\x01a\x80\x01b\x89\x02hi\x88\x06\x03\xe8done")
    put("websocket", "masked", b"\2\x20\x82\x85\1\2\3\4hello")
    put("websocket", "huge", b"\2\x20\x82\x7f\xff\xff\xff\xff\xff\xff\xff\xff")
    put("websocket", "replaced", b"\2\x20\x88\x07\x11\x39newer")
    put("websocket", "good", b"\6\x20\0\1\2\xff\x10")
    put("websocket", "proxy", b"\1\x20HTTP/1.1 200 Connection established\r\n\r\n\x16\3\3\0\2\2\x28")
    put("websocket", "proxy-wants-a-password", b"\1\x20HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")


def config_file():
    put("config_file", "workers", '{"KVASIR_WORKERS": "192.168.1.10:7070#' + "ab" * 32 + ',[::1]:5", "KVASIR_LOCAL": "fallback"}')
    put("config_file", "numbers", '{"KVASIR_CONNECT_MS": 500, "KVASIR_SPOT_CHECK": 0.5, "KVASIR_STATS": 1}')
    put("config_file", "nan", '{"KVASIR_SPOT_CHECK": "nan"}')
    put("config_file", "comments", '{ // a comment\n"KVASIR_NUMERICS": "exact" }')
    put("config_file", "unknown", '{"KVASIR_WORKER": "x"}')
    put("config_file", "list", "127.0.0.1:9000, host.local:81#" + "0" * 64 + ",[fe80::1%25eth0]:5,")
    put("config_file", "array", "[1,2,3]")


def split_set():
    model = (CORPUS / "gguf_reader" / "model").read_bytes()
    part = (CORPUS / "gguf_reader" / "part-of-a-set").read_bytes()

    def piece(data):
        return len(data).to_bytes(3, "little") + data

    plan = b'{"layers": {"0": [[0, 1]], "1": [[1, 2]]}}'
    put("split_set", "one", b"\0" + piece(model) + plan)
    put("split_set", "two", b"\1" + piece(part) + piece(part))
    put("split_set", "twice-the-same", b"\1" + piece(model) + piece(model) + plan)
    put("split_set", "missing", b"\2" + piece(part))


def canary():
    put("canary", "bird", b"bird")


for make in (hub_api, market, tokens, grants, relay, websocket, config_file, split_set, canary):
    make()
