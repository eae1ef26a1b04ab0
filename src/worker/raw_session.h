// The older framing, which has no greeting, no layer and no error:
//   int32 n_used, int32 n_tokens, f32 cur[n_embd * n_tokens], i32 sel[n_used * n_tokens]
//   -> f32 experts[n_embd * n_used * n_tokens]
// `sel` holds ids local to the slice (an expert's rank in it). Anything wrong closes the
// connection. Served for one layer, whose recipe must be SwiGLU without biases.
#pragma once

#include "worker/server_core.h"

namespace kvasir::worker {

// The first four bytes of a framed connection are the magic, which no n_used can be.
// `first` are bytes already read. Returns when the peer closes or errs, with the reason.
Status serve_raw(ServerCore& core, net::Stream& stream, const Wake& wake, ByteSpan first);

// The layer such connections get: the one chosen, or the only one held.
Result<BoundRecipe> choose_raw_layer(const SliceStore& store, std::optional<std::uint32_t> layer);

}  // namespace kvasir::worker
