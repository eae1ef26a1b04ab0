// The small messages: HELLO, HOLDINGS, ERROR, PING, PONG.

#include <format>

#include "wire/codec.h"
#include "wire/text.h"

namespace kvasir::wire {
namespace {

std::unexpected<Error> malformed(std::string_view message, std::string_view why) {
  return retry_elsewhere(std::format("the peer sent a malformed {}: {}; drop the connection.", message, why));
}

ErrorCode known_or_unknown(std::uint16_t code) {
  return code <= static_cast<std::uint16_t>(ErrorCode::kBadUpload) ? static_cast<ErrorCode>(code) : ErrorCode::kUnknown;
}

}  // namespace

// --- HELLO ---------------------------------------------------------------------------

Bytes encode(const Hello& hello) {
  Bytes bytes;
  ByteWriter out(bytes);
  out.put(hello.protocol_version);
  out.put(hello.role);
  out.put(hello.numerics);
  out.put_bytes(hello.numerics_id.probe);
  put_text(out, hello.software);
  put_text(out, hello.numerics_id.ggml_version);
  put_text(out, hello.numerics_id.cpu_variant);
  put_text(out, hello.token);
  return bytes;
}

Result<Hello> decode_hello(ByteSpan payload) {
  ByteCursor in(payload);
  Hello hello;
  hello.protocol_version = in.get<std::uint16_t>();
  hello.role = in.get<Role>();
  hello.numerics = in.get<Numerics>();
  const ByteSpan probe = in.get_bytes(hello.numerics_id.probe.size());
  if (!in.ok()) return malformed("HELLO", "it is too short");
  std::ranges::copy(probe, hello.numerics_id.probe.begin());
  if (hello.role != Role::kBackbone && hello.role != Role::kWorker) return malformed("HELLO", "its role is unknown");
  if (!is_known(hello.numerics)) return malformed("HELLO", "its numerics class is unknown");
  if (!get_text(in, hello.software) || !get_text(in, hello.numerics_id.ggml_version) ||
      !get_text(in, hello.numerics_id.cpu_variant) || !get_text(in, hello.token))
    return malformed("HELLO", "a text is cut short, too long or not plain UTF-8");
  if (!in.at_end()) return malformed("HELLO", "bytes follow its end");
  return hello;
}

// --- HOLDINGS ------------------------------------------------------------------------

Bytes encode(const Holdings& holdings) {
  Bytes bytes;
  ByteWriter out(bytes);
  out.put(holdings.upload_bytes_free);
  out.put(static_cast<std::uint32_t>(holdings.entries.size()));
  for (const Holding& entry : holdings.entries) {
    out.put_bytes(entry.layer_id);
    out.put(entry.layer);
    out.put(static_cast<std::uint32_t>(entry.group));
    out.put(entry.n_expert);
    out.put(entry.n_embd);
    out.put(static_cast<std::uint32_t>(entry.experts.ranges().size()));
    for (const Range& range : entry.experts.ranges()) {
      out.put(range.begin);
      out.put(range.end);
    }
  }
  return bytes;
}

Result<Holdings> decode_holdings(ByteSpan payload) {
  ByteCursor in(payload);
  Holdings holdings;
  holdings.upload_bytes_free = in.get<std::uint64_t>();
  const auto n_entries = in.get<std::uint32_t>();
  if (!in.ok() || n_entries > kHoldingsMax || n_entries > in.left() / kHoldingFixedBytes)
    return malformed("HOLDINGS", "its entry count does not fit its length");
  if (holdings.upload_bytes_free > kUploadBytesMax) return malformed("HOLDINGS", "its room for uploads is over the limit");
  holdings.entries.reserve(n_entries);
  std::uint32_t ranges_left = kHoldingsRangesMax;
  for (std::uint32_t i = 0; i < n_entries; ++i) {
    Holding& entry = holdings.entries.emplace_back();
    const ByteSpan id = in.get_bytes(entry.layer_id.size());
    entry.layer = in.get<std::uint32_t>();
    const auto group = in.get<std::uint32_t>();
    entry.n_expert = in.get<std::uint32_t>();
    entry.n_embd = in.get<std::uint32_t>();
    const auto n_ranges = in.get<std::uint32_t>();
    if (!in.ok()) return malformed("HOLDINGS", "it is too short");
    std::ranges::copy(id, entry.layer_id.begin());
    if (entry.layer >= kLayersMax) return malformed("HOLDINGS", "a layer number is over the limit");
    if (group > static_cast<std::uint32_t>(ExpertGroup::kChexps))
      return malformed("HOLDINGS", "an expert group is unknown");
    entry.group = static_cast<ExpertGroup>(group);
    if (entry.n_expert == 0 || entry.n_expert > kExpertsMax)
      return malformed("HOLDINGS", "an expert count is out of limits");
    if (entry.n_embd == 0 || entry.n_embd > kWidthMax) return malformed("HOLDINGS", "a row width is out of limits");
    if (n_ranges > kRangesMax || n_ranges > ranges_left || n_ranges > in.left() / kRangeBytes)
      return malformed("HOLDINGS", "a range count is over the limit or the length");
    ranges_left -= n_ranges;
    for (std::uint32_t r = 0; r < n_ranges; ++r) {
      const auto begin = in.get<std::uint32_t>();
      const auto end = in.get<std::uint32_t>();
      // One byte form per set: ascending, not empty, a gap between neighbours.
      if (begin >= end || end > entry.n_expert || (r > 0 && begin <= entry.experts.end()))
        return malformed("HOLDINGS", "its expert ranges are not ascending ranges of existing experts");
      entry.experts.add({begin, end});
    }
  }
  if (!in.at_end()) return malformed("HOLDINGS", "bytes follow its end");
  return holdings;
}

// --- ERROR, PING, PONG ----------------------------------------------------------------

Bytes encode(const ErrorMessage& error) {
  Bytes bytes;
  ByteWriter out(bytes);
  out.put(error.code);
  put_text(out, error.message);
  return bytes;
}

Result<ErrorMessage> decode_error(ByteSpan payload) {
  ByteCursor in(payload);
  ErrorMessage error;
  error.code = known_or_unknown(in.get<std::uint16_t>());
  if (!in.ok() || !get_text(in, error.message) || !in.at_end())
    return malformed("ERROR", "its length is wrong or its text is not plain UTF-8");
  return error;
}

Bytes encode(const Ping& ping) {
  Bytes bytes;
  ByteWriter(bytes).put(ping.sent_ns);
  return bytes;
}

Result<Ping> decode_ping(ByteSpan payload) {
  ByteCursor in(payload);
  Ping ping{.sent_ns = in.get<std::uint64_t>()};
  if (!in.at_end()) return malformed("PING", "its length is wrong");
  return ping;
}

Bytes encode(const Pong& pong) {
  Bytes bytes;
  ByteWriter out(bytes);
  out.put(pong.sent_ns);
  out.put(pong.queued);
  out.put(pong.wait_us);
  out.put(pong.busy_permille);
  out.put(pong.row_us);
  return bytes;
}

Result<Pong> decode_pong(ByteSpan payload) {
  ByteCursor in(payload);
  Pong pong;
  pong.sent_ns = in.get<std::uint64_t>();
  pong.queued = in.get<std::uint32_t>();
  pong.wait_us = in.get<std::uint32_t>();
  pong.busy_permille = in.get<std::uint32_t>();
  pong.row_us = in.get<std::uint32_t>();
  if (!in.at_end()) return malformed("PONG", "its length is wrong");
  if (pong.busy_permille > 1000) return malformed("PONG", "its busy share is over 1000 per mille");
  return pong;
}

}  // namespace kvasir::wire
