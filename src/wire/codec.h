// Frames and messages to bytes and back. Pure: no sockets, no clocks, no allocation from a
// length that has not been checked. docs/protocol.md is the specification.
//
// A frame is a 24-byte header and a payload:
//   0  u32 magic          'KVSR' (0x5253564b)
//   4  u16 version        kProtocolVersion
//   6  u8  type           FrameType
//   7  u8  flags          kFlagChecksum | kFlagMore
//   8  u64 request_id     0 where a frame answers nothing
//   16 u32 payload_bytes  <= kFramePayloadBytesMax
//   20 u32 checksum       low 32 bits of XXH3-64 of the payload; 0 and unflagged under TLS
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "base/bytes.h"
#include "base/error.h"
#include "wire/messages.h"

namespace kvasir::wire {

inline constexpr std::uint32_t kMagic = 0x5253564b;
inline constexpr std::size_t kHeaderBytes = 24;
inline constexpr std::uint8_t kFlagChecksum = 1;
inline constexpr std::uint8_t kFlagMore = 2;  // RESULT: more frames of this answer follow

struct FrameHeader {
  std::uint16_t version = kProtocolVersion;
  FrameType type = FrameType::kPing;
  std::uint8_t flags = 0;
  std::uint64_t request_id = 0;
  std::uint32_t payload_bytes = 0;
  std::uint32_t checksum = 0;
  friend bool operator==(const FrameHeader&, const FrameHeader&) = default;
};

void encode_header(const FrameHeader& header, std::span<std::byte, kHeaderBytes> out);
// The longest payload a frame of this type can have.
std::uint32_t payload_bytes_max(FrameType type);
// Refuses a wrong magic, version, type, flag or length (payload_bytes_max). The error of a
// version mismatch names both versions.
Result<FrameHeader> decode_header(std::span<const std::byte, kHeaderBytes> bytes);
std::uint32_t payload_checksum(ByteSpan payload);
std::uint32_t payload_checksum(ByteSpan first, ByteSpan second);  // of the two in a row
// True if the header has no checksum or it matches.
bool checksum_matches(const FrameHeader& header, ByteSpan payload);

// --- messages <-> payloads -------------------------------------------------------------
// Bytes of the fixed parts.
inline constexpr std::uint32_t kHelloFixedBytes = 36;
inline constexpr std::uint32_t kHoldingsFixedBytes = 12;
inline constexpr std::uint32_t kHoldingFixedBytes = 52;
inline constexpr std::uint32_t kRangeBytes = 8;
inline constexpr std::uint32_t kLayerRecipeBytes = 104;
inline constexpr std::uint32_t kPingBytes = 8;
inline constexpr std::uint32_t kPongBytes = 24;

// Text is cut at kTextBytesMax and control characters become '?' (wire/text.h). The bounds
// of a recipe's clamp that is off travel as 0.
Bytes encode(const Hello&);
Bytes encode(const Holdings&);
Bytes encode(const LayerRecipe&);
Bytes encode(const ErrorMessage&);
Bytes encode(const Ping&);
Bytes encode(const Pong&);
// Every decoder refuses unknown enum values (but ErrorCode), reserved bits, counts over their
// limits and left-over bytes: a message has one byte form.
Result<Hello> decode_hello(ByteSpan);
Result<Holdings> decode_holdings(ByteSpan);
Result<LayerRecipe> decode_layer_recipe(ByteSpan);
Result<ErrorMessage> decode_error(ByteSpan);
Result<Ping> decode_ping(ByteSpan);
Result<Pong> decode_pong(ByteSpan);

// What decode_layer_recipe asks of a recipe: known enums, an activation that fits the gate
// layout, scales, biases and clamps only where their path exists, constants finite where the
// activation uses them and 0 elsewhere, widths and expert count inside their limits.
Status validate(const Recipe& recipe);

// A whole frame, for the small messages.
Bytes frame_of(FrameType type, std::uint64_t request_id, ByteSpan payload, bool checksum);
template <typename Message>
Bytes encode_frame(FrameType type, std::uint64_t request_id, const Message& message, bool checksum) {
  return frame_of(type, request_id, encode(message), checksum);
}
Bytes encode_empty_frame(FrameType type, std::uint64_t request_id);  // kCancel, kDrain

// --- EXEC and RESULT: heads and tables are copied, rows are not --------------------------
// EXEC payload: head (kExecHeadBytes) · pairs n_pairs x (u32 row, u32 expert) ·
//               [weights n_pairs x f32, with kWeightedSum] · rows n_rows x row_bytes.
// RESULT payload: head (kResultHeadBytes) · rows n_rows x row_bytes.
inline constexpr std::size_t kExecHeadBytes = 24;
inline constexpr std::size_t kResultHeadBytes = 24;
inline constexpr std::size_t kPairBytes = 8;
inline constexpr std::uint32_t kUploadHeadBytes = 24;

// Bytes of one row of n_embd values; nullopt if n_embd does not suit the type (kQ8: % 32).
std::optional<std::size_t> row_bytes(RowType type, std::uint32_t n_embd);

// Borrowed from the payload; aligned to 4 bytes if the payload is.
struct ExecView {
  ExecHead head;
  ByteSpan pairs;    // n_pairs x 8
  ByteSpan weights;  // n_pairs x 4, or empty
  ByteSpan rows;     // n_rows x row_bytes
  Pair pair(std::size_t i) const;
  float weight(std::size_t i) const;
};
struct ResultView {
  ResultHead head;
  ByteSpan rows;
};
// Checked: lengths agree exactly, counts inside their limits, every pair's row < n_rows, no
// (row, expert) twice, weights finite, the answer not over kAnswerBytesMax, and f32 rows per
// pair unless numerics is fast. Whether an expert is held is the worker's check.
Result<ExecView> decode_exec(ByteSpan payload);
Result<ResultView> decode_result(ByteSpan payload);

// Header, head, pairs and weights of an EXEC as one contiguous prefix; the caller sends
// `rows` (row_type encoded) right after it by scatter/gather. The checksum covers both.
// Refuses what is over a limit (send fewer rows or pairs); spans whose sizes disagree with
// the head are a bug.
Result<Bytes> encode_exec_prefix(std::uint64_t request_id, const ExecHead& head, std::span<const Pair> pairs,
                                 std::span<const float> weights, ByteSpan rows, bool checksum);
// Likewise for one RESULT frame; `more`: further frames of the answer follow. The rows must
// fit (result_rows_per_frame).
Bytes encode_result_prefix(std::uint64_t request_id, const ResultHead& head, ByteSpan rows, bool more, bool checksum);
// How many rows fit one RESULT frame; at least 1.
std::uint32_t result_rows_per_frame(RowType type, std::uint32_t n_embd);
// How many rows of an answer to put into one: so few that its reader checks and copies them in its cache, and while
// the next are on their way; so many that frames cost little.
std::uint32_t result_rows_at_once(RowType type, std::uint32_t n_embd);

// --- UPLOAD --------------------------------------------------------------------------
// Payload: head (kUploadHeadBytes) · 1..kUploadChunkBytes bytes of the slice.
struct UploadView {
  UploadHead head;
  ByteSpan bytes;
};
// Checked: the bytes lie inside the slice, and that inside kUploadBytesMax.
Result<UploadView> decode_upload(ByteSpan payload);
// Header and head of a frame; the caller sends `bytes` right after it. A part that breaks a
// limit is a bug.
Bytes encode_upload_prefix(std::uint64_t request_id, const UploadHead& head, ByteSpan bytes, bool checksum);

// --- rows ----------------------------------------------------------------------------
// f32 values <-> a row as it travels. Widths must agree (row_bytes). kF32 is a copy. kF16 and
// kBF16 round to nearest even; NaN stays NaN; f16 overflows to infinity from 65520 on. kQ8:
// a block with a value that is not finite, or too large for an f16 scale (over 8.3e6), decodes
// as NaN throughout, so that the receiver's check for finite rows sees it.
void encode_row(RowType type, std::span<const float> values, std::span<std::byte> out);
void decode_row(RowType type, ByteSpan bytes, std::span<float> out);

}  // namespace kvasir::wire
