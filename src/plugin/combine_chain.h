// The end of an MoE layer in a graph: weights and the sum over a token's experts.
#pragma once

#include <optional>

#include "plugin/expert_graph.h"

namespace kvasir::plugin {

// `ffn` with the chain that follows it taken in, or nothing where it has another form: weights
// applied before the FFN, sums over some of the experts only (llama.cpp's warm-up), values of
// the chain asked for as outputs. `after`: the FFN's nodes lie before or at this position but
// for its scale and bias.
std::optional<ExpertFfn> take_combine(ggml_cgraph* graph, int after, const ExpertFfn& ffn);

}  // namespace kvasir::plugin
