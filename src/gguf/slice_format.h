// Names of the metadata that make a GGUF file a slice or a backbone file; docs/slice-format.md
// describes them. Every integer written is u32.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "gguf/expert_tensor.h"

namespace kvasir::gguf {

inline constexpr std::uint32_t kSliceVersion = 1;
inline constexpr std::string_view kSliceVersionKey = "kvasir.expert_shard.version";
inline constexpr std::string_view kSliceModelNameKey = "kvasir.expert_shard.model_name";
inline constexpr std::string_view kSliceEmbdKey = "kvasir.expert_shard.n_embd";
inline constexpr std::string_view kSliceLayersKey = "kvasir.expert_shard.layers";
// Enclosing ranges, for readers of the older format.
inline constexpr std::string_view kOldLayerBeginKey = "linkcpp.expert_shard.layer_begin";
inline constexpr std::string_view kOldLayerEndKey = "linkcpp.expert_shard.layer_end";
inline constexpr std::string_view kOldExpertBeginKey = "linkcpp.expert_shard.expert_begin";
inline constexpr std::string_view kOldExpertEndKey = "linkcpp.expert_shard.expert_end";

inline constexpr std::uint32_t kBackboneVersion = 1;
inline constexpr std::string_view kBackboneVersionKey = "kvasir.backbone.version";
inline constexpr std::string_view kBackboneTensorsKey = "kvasir.backbone.tensors";
inline constexpr std::string_view kBackboneTypesKey = "kvasir.backbone.types";

// ….<layer>, and ….<layer>.chexps for the second group of a layer that has two.
std::string slice_experts_key(std::uint32_t layer, ExpertGroup group);
std::string slice_expert_count_key(std::uint32_t layer, ExpertGroup group);
std::string slice_layer_id_key(std::uint32_t layer, ExpertGroup group);
std::string slice_hashes_key(std::string_view tensor_name);
std::string backbone_layer_id_key(std::uint32_t layer, ExpertGroup group);

}  // namespace kvasir::gguf
