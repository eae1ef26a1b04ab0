#include "gguf/slice_format.h"

#include <format>

namespace kvasir::gguf {
namespace {

std::string_view group_suffix(ExpertGroup group) { return group == ExpertGroup::kExps ? "" : ".chexps"; }

}  // namespace

std::string slice_experts_key(std::uint32_t layer, ExpertGroup group) {
  return std::format("kvasir.expert_shard.experts.{}{}", layer, group_suffix(group));
}
std::string slice_expert_count_key(std::uint32_t layer, ExpertGroup group) {
  return std::format("kvasir.expert_shard.expert_count.{}{}", layer, group_suffix(group));
}
std::string slice_layer_id_key(std::uint32_t layer, ExpertGroup group) {
  return std::format("kvasir.expert_shard.layer_id.{}.{}", layer, to_string(group));
}
std::string slice_hashes_key(std::string_view tensor_name) {
  return std::format("kvasir.expert_shard.slab_blake3.{}", tensor_name);
}
std::string backbone_layer_id_key(std::uint32_t layer, ExpertGroup group) {
  return std::format("kvasir.backbone.layer_id.{}.{}", layer, to_string(group));
}

}  // namespace kvasir::gguf
