// The closed set of messages between a backbone and a worker. docs/protocol.md specifies
// the bytes; this header gives the meaning. Integers are little-endian, floats IEEE-754.
//
// A connection: both ends send HELLO (backbone first). The worker then sends HOLDINGS (again
// whenever they change). The backbone binds a LAYER_RECIPE to a small number, then sends
// EXEC and gets RESULT frames or one ERROR for each. Requests may overlap; answers carry
// their request id and come in any order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/expert_set.h"
#include "wire/recipe.h"

namespace kvasir::wire {

inline constexpr std::uint16_t kProtocolVersion = 1;

// --- limits: checked before anything is allocated ------------------------------------
inline constexpr std::uint32_t kFramePayloadBytesMax = 64u << 20;   // any frame
inline constexpr std::uint32_t kResultPayloadBytesMax = 16u << 20;  // one RESULT frame; longer answers come in several
inline constexpr std::uint64_t kAnswerBytesMax = 512u << 20;        // all rows that answer one EXEC
inline constexpr std::uint32_t kExecRowsMax = 16384;
inline constexpr std::uint32_t kExecPairsMax = 262144;
inline constexpr std::uint32_t kRecipesMax = 4096;          // bound on one connection
inline constexpr std::uint32_t kHoldingsMax = 4096;         // (layer, group) entries of one worker
inline constexpr std::uint32_t kRangesMax = 4096;           // expert ranges of one entry
inline constexpr std::uint32_t kHoldingsRangesMax = 65536;  // expert ranges of all entries of one worker
inline constexpr std::uint32_t kTextBytesMax = 1024;        // any string
inline constexpr std::uint32_t kWidthMax = 1u << 20;        // n_embd, n_ff
inline constexpr std::uint32_t kLayersMax = 4096;           // layer numbers are below
inline constexpr std::uint32_t kExpertsMax = 65536;         // expert numbers are below
inline constexpr std::uint64_t kUploadBytesMax = 8ull << 30;  // one slice handed to a worker
inline constexpr std::uint32_t kUploadChunkBytes = 4u << 20;  // of it in one UPLOAD

enum class FrameType : std::uint8_t {
  kHello = 1,
  kHoldings = 2,
  kLayerRecipe = 3,
  kExec = 4,
  kResult = 5,
  kError = 6,
  kCancel = 7,  // no payload: the answer to this request id is no longer wanted
  kPing = 8,
  kPong = 9,
  kDrain = 10,  // no payload: the sender will answer what it has, and takes nothing new
  kUpload = 11,
};

enum class Role : std::uint8_t { kBackbone = 1, kWorker = 2 };

// DESIGN section 6. Chosen by the backbone.
enum class Numerics : std::uint8_t { kExact = 0, kInvariant = 1, kFast = 2 };
constexpr bool is_known(Numerics numerics) { return numerics <= Numerics::kFast; }

// How a row of n_embd values travels. kQ8: blocks of 32 as ggml's Q8_0 (f16 scale, 32 x i8).
enum class RowType : std::uint8_t { kF32 = 0, kF16 = 1, kBF16 = 2, kQ8 = 3 };

// BLAKE3-256 of one layer's expert tensors (gguf/layer_id.h).
using LayerId = std::array<std::byte, 32>;

// Two ends whose ids are equal compute the same bits.
struct NumericsId {
  std::string ggml_version;             // ggml_version()
  std::string cpu_variant;              // name of the CPU backend build ggml picked here
  std::array<std::byte, 32> probe{};    // hash of the answer to a fixed probe FFN
  friend bool operator==(const NumericsId&, const NumericsId&) = default;
};

struct Hello {
  std::uint16_t protocol_version = kProtocolVersion;
  Role role = Role::kBackbone;
  Numerics numerics = Numerics::kExact;  // backbone: what it asks for; worker: echoed
  std::string software;                  // "kvasir 0.1.0", for people
  NumericsId numerics_id;
  std::string token;  // node token; empty on an --insecure loopback port. Never logged.
  friend bool operator==(const Hello&, const Hello&) = default;
};

struct Holding {
  LayerId layer_id{};
  std::uint32_t layer = 0;
  ExpertGroup group = ExpertGroup::kExps;
  std::uint32_t n_expert = 0;  // of the whole layer
  std::uint32_t n_embd = 0;
  ExpertSet experts;  // held here; ids are the model's
  friend bool operator==(const Holding&, const Holding&) = default;
};

struct Holdings {
  std::vector<Holding> entries;
  // The longest slice the worker would take now, older uploads given up for it; 0: it takes none.
  std::uint64_t upload_bytes_free = 0;
  friend bool operator==(const Holdings&, const Holdings&) = default;
};

// Binds `recipe_id` (chosen by the backbone, < kRecipesMax) on this connection. Has no answer
// of its own: a worker that cannot serve it says why to each EXEC that uses the number.
struct LayerRecipe {
  std::uint32_t recipe_id = 0;
  LayerId layer_id{};
  Recipe recipe;
  friend bool operator==(const LayerRecipe&, const LayerRecipe&) = default;
};

// One use of an expert: row `row` of the request through expert `expert` (the model's id).
struct Pair {
  std::uint32_t row = 0;
  std::uint32_t expert = 0;
  friend bool operator==(const Pair&, const Pair&) = default;
};

enum class ResultKind : std::uint8_t {
  kPerPair = 0,      // one row per pair, in the order of the pairs (exact, invariant)
  kWeightedSum = 1,  // one row per request row: sum of weight * expert output (fast)
};

// The fixed part of an EXEC. Rows, pairs and weights follow in the payload and are read in
// place (ExecView in codec.h), because they are the bulk of the traffic.
struct ExecHead {
  std::uint32_t recipe_id = 0;
  Numerics numerics = Numerics::kExact;
  RowType row_type = RowType::kF32;     // of the rows sent
  RowType result_type = RowType::kF32;  // of the rows wanted back
  ResultKind result_kind = ResultKind::kPerPair;
  std::uint32_t n_rows = 0;
  std::uint32_t n_pairs = 0;
  std::uint32_t n_embd = 0;
  friend bool operator==(const ExecHead&, const ExecHead&) = default;
};

// The fixed part of a RESULT: rows [first_row, first_row + n_rows) of the answer.
struct ResultHead {
  RowType row_type = RowType::kF32;
  std::uint32_t n_embd = 0;
  std::uint32_t first_row = 0;
  std::uint32_t n_rows = 0;
  std::uint32_t total_rows = 0;
  std::uint32_t compute_us = 0;  // the worker's own compute time for this request
  friend bool operator==(const ResultHead&, const ResultHead&) = default;
};

// The fixed part of an UPLOAD: bytes [offset, …) of a slice (docs/slice-format.md) of one layer's
// experts. The parts come in order under one request id, which is answered once, by HOLDINGS
// when the worker has the slice or by ERROR.
struct UploadHead {
  std::uint64_t total_bytes = 0;  // of the slice
  std::uint64_t offset = 0;
  friend bool operator==(const UploadHead&, const UploadHead&) = default;
};

// Why a request or a connection was refused. kUnknown for values of a newer peer.
enum class ErrorCode : std::uint16_t {
  kUnknown = 0,
  kWrongVersion = 1,      // HELLO: the other end speaks another version
  kNumerics = 2,          // HELLO: numerics ids differ and exactness was asked for
  kUnauthorized = 3,
  kMalformed = 4,         // the frame breaks the protocol; the connection is closed after it
  kUnknownLayer = 5,      // no such layer id held here
  kUnknownRecipe = 6,     // EXEC before its LAYER_RECIPE
  kUnsupportedRecipe = 7, // the shape does not fit the tensors held
  kExpertNotHeld = 8,
  kBusy = 9,              // the queue is full; try a replica
  kDraining = 10,
  kCancelled = 11,
  kInternal = 12,
  kNoRoom = 13,     // UPLOAD: no memory for it, or this worker takes none
  kBadUpload = 14,  // UPLOAD: not a slice of one layer's experts, or not the bytes that were cut
};

struct ErrorMessage {
  ErrorCode code = ErrorCode::kUnknown;
  std::string message;  // one sentence
  friend bool operator==(const ErrorMessage&, const ErrorMessage&) = default;
};

struct Ping {
  std::uint64_t sent_ns = 0;  // sender's clock, echoed
  friend bool operator==(const Ping&, const Ping&) = default;
};

struct Pong {
  std::uint64_t sent_ns = 0;
  std::uint32_t queued = 0;          // requests waiting
  std::uint32_t wait_us = 0;         // what those are expected to take, microseconds; 0 with `queued` > 0: unknown
  std::uint32_t busy_permille = 0;   // share of the last second spent computing
  std::uint32_t row_us = 0;          // compute time of a pair whose expert has one row, microseconds; 0 = unknown
  friend bool operator==(const Pong&, const Pong&) = default;
};

}  // namespace kvasir::wire
