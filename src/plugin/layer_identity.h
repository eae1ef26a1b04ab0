// Which layer of which model the experts of a graph are.
#pragma once

#include "base/error.h"
#include "plugin/config.h"
#include "plugin/expert_graph.h"

namespace kvasir::plugin {

// Of the weights, as a slice file has it: from samples of their bytes, or from what stands in
// their place in a backbone file. Refuses weights that this replica setting cannot mean.
Result<wire::LayerId> layer_id_of(const ExpertFfn& ffn, Replica replica);

// Refuses a graph with products of experts whose weights are not here, because nothing but an
// expert FFN of a known shape can be computed elsewhere.
Status check_computable_here(ggml_cgraph* graph, Replica replica);

}  // namespace kvasir::plugin
