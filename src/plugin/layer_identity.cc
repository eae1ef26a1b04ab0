#include "plugin/layer_identity.h"

#include <ggml-backend.h>

#include <format>
#include <vector>

#include "gguf/expert_tensor.h"
#include "gguf/layer_id.h"
#include "gguf/placeholder.h"

namespace kvasir::plugin {
namespace {

std::optional<gguf::Placeholder> placeholder_of(const ggml_tensor* weight) {
  const bool readable = weight->data != nullptr && ggml_nbytes(weight) >= gguf::kPlaceholderBytes;
  if (!readable) return std::nullopt;
  return gguf::decode_placeholder({static_cast<const std::byte*>(weight->data), gguf::kPlaceholderBytes});
}

std::unexpected<Error> not_here(std::string_view name) {
  return fix_input(std::format("{} is not in this model file, which holds no experts (a backbone file); start with KVASIR_REPLICA=none "
                               "and workers that hold them, or give the whole model.", name));
}

}  // namespace

Result<wire::LayerId> layer_id_of(const ExpertFfn& ffn, Replica replica) {
  std::vector<gguf::LayerIdMemoryTensor> weights;
  std::optional<wire::LayerId> stands_for;
  std::size_t n_placeholders = 0;
  for (const ggml_tensor* t : {ffn.tensors.gate, ffn.tensors.up, ffn.tensors.gate_up, ffn.tensors.down}) {
    if (t == nullptr) continue;
    weights.push_back({.name = ggml_get_name(t),
                       .type = t->type,
                       .ne = {static_cast<std::uint64_t>(t->ne[0]), static_cast<std::uint64_t>(t->ne[1]), static_cast<std::uint64_t>(t->ne[2])},
                       .data = static_cast<const std::byte*>(t->data)});
    const auto placeholder = placeholder_of(t);
    if (!placeholder) continue;
    if (stands_for && *stands_for != placeholder->layer_id)
      return fix_input(std::format("{} belongs to another layer than its neighbours; the backbone file is broken.", ggml_get_name(t)));
    stands_for = placeholder->layer_id;
    ++n_placeholders;
  }
  const char* name = ggml_get_name(ffn.tensors.down);
  if (replica == Replica::kNone) {
    if (n_placeholders == weights.size()) return *stands_for;
    return fix_input(std::format("nothing was kept of {}, and nothing says which model it is of; with KVASIR_REPLICA=none give llama.cpp a "
                                 "backbone file (kvasir slice MODEL --backbone -o FILE).", name));
  }
  if (n_placeholders > 0) return not_here(name);
  return gguf::compute_layer_id(weights);
}

Status check_computable_here(ggml_cgraph* graph, Replica replica) {
  for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
    const ggml_tensor* node = ggml_graph_node(graph, i);
    if (node->op != GGML_OP_MUL_MAT_ID) continue;
    const char* name = ggml_get_name(node->src[0]);
    const auto expert = gguf::parse_expert_tensor(name);
    if (!expert || expert->part != gguf::ExpertPart::kWeight) continue;
    if (replica == Replica::kNone)
      return fix_input(std::format("{} is used in a way that workers cannot compute, and KVASIR_REPLICA=none keeps no expert here; "
                                   "give the whole model and KVASIR_REPLICA=mmap.", name));
    if (placeholder_of(node->src[0])) return not_here(name);
  }
  return {};
}

}  // namespace kvasir::plugin
