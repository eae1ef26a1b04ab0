// Frames of a WebSocket in pieces of any size, as a client and as a server send them: pieces lie
// inside what came, control frames are short, and the size of the pieces changes nothing.

#include "net/websocket_frames.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"

namespace {

using namespace kvasir;
using net::websocket::Parser;

struct Seen {
  Bytes data;
  std::size_t messages = 0, controls = 0;
  bool refused = false;
  bool operator==(const Seen&) const = default;
};

Seen parse(Bytes bytes, std::size_t step, Parser::From from) {
  Parser parser(from);
  Seen out;
  for (std::size_t at = 0; at < bytes.size() && !out.refused; at += step) {
    const std::span<std::byte> all = std::span(bytes).subspan(at, std::min(step, bytes.size() - at));
    std::span<std::byte> rest = all;
    while (true) {
      const auto got = parser.next(rest);
      out.refused = !got;
      if (!got || !*got) break;
      const Parser::Piece& piece = **got;
      if (piece.is_control()) {
        KVASIR_CHECK(piece.payload.size() <= net::websocket::kControlBytesMax);
        if (piece.op == net::websocket::Op::kClose) net::websocket::parse_close(piece.payload);
        ++out.controls;
        continue;
      }
      KVASIR_CHECK(piece.payload.empty() || (piece.payload.data() >= all.data() &&
                                             piece.payload.data() + piece.payload.size() <= all.data() + all.size()));
      out.data.insert(out.data.end(), piece.payload.begin(), piece.payload.end());
      out.messages += piece.message_done;
    }
    KVASIR_CHECK(out.refused || rest.empty());
  }
  return out;
}

}  // namespace

// First byte: the size of the pieces.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const ByteSpan rest = std::as_bytes(std::span(data, size)).subspan(1);
  const Bytes bytes(rest.begin(), rest.end());
  for (const auto from : {Parser::From::kClient, Parser::From::kServer})
    KVASIR_CHECK(parse(bytes, 1u + data[0], from) == parse(bytes, std::max<std::size_t>(bytes.size(), 1), from));
  return 0;
}
