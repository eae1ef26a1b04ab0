// A model, slice or backbone file seen as stacks of experts: which layers have them, of what
// types and sizes, which are held here, and how to read one.
//
// Thread contract: immutable once opened; all const members may be called concurrently.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/expert_set.h"
#include "gguf/blake3_hasher.h"
#include "gguf/expert_tensor.h"
#include "gguf/layer_id.h"
#include "gguf/model_files.h"

namespace kvasir::gguf {

enum class FileKind : std::uint8_t {
  kModel,     // everything, as llama.cpp runs it
  kSlice,     // some experts of some layers
  kBackbone,  // everything but the experts, whose weights are placeholders
};
std::string_view to_string(FileKind kind);

// Which dimension counts experts in a tensor with one slab an expert: 2 of a weight [n_in,
// n_out, n_expert], 1 of a bias [n_out, n_expert], 0 of a scale [n_expert].
std::size_t stacked_dimension(ExpertPart part);

struct ExpertTensor {
  std::string name;
  ExpertTensorName id;
  ggml_type type{};  // of a backbone file's placeholder: the type in the model it was made from
  Shape ne{1, 1, 1, 1};
  std::uint32_t file = 0;     // index into files().files()
  std::uint64_t offset = 0;   // in that file
  std::uint64_t nbytes = 0;   // in that file
  // Slabs lie one after the other, in the order of the held experts. A side tensor that is
  // not per expert (a scalar shared by all) is one slab.
  bool per_expert = false;
  std::uint64_t bytes_per_expert = 0;  // of one slab
};

// The experts of one (layer, group).
struct LayerExperts {
  std::uint32_t layer = 0;
  ExpertGroup group{};
  std::uint32_t n_expert = 0;         // of the model's layer
  ExpertSet held;                     // those whose data are here; local id = rank
  std::vector<ExpertTensor> tensors;  // by name; at least one weight
  std::optional<LayerId> stored_id;   // from metadata: slices and backbone files

  const ExpertTensor* find(ExpertRole role, ExpertPart part) const;
  // One expert's share of all tensors, bytes.
  std::uint64_t bytes_per_expert() const;
};

class MoeModel {
 public:
  static Result<MoeModel> open(const std::string& name, const SourceOpener& opener = open_file_source);
  static Result<MoeModel> from_files(ModelFiles files);

  FileKind kind() const { return kind_; }
  const std::string& file_name() const { return files_.metadata().name(); }
  const std::string& architecture() const { return architecture_; }
  const std::string& model_name() const { return model_name_; }
  std::uint32_t n_layer() const { return n_layer_; }             // of the model, dense ones included
  std::uint32_t n_expert() const { return n_expert_; }           // the largest of all layers
  std::uint32_t n_expert_used() const { return n_expert_used_; }  // 0 if not said
  std::uint32_t n_embd() const { return n_embd_; }
  const ModelFiles& files() const { return files_; }
  const std::vector<LayerExperts>& layers() const { return layers_; }  // by (layer, group)

  const LayerExperts* find(std::uint32_t layer, ExpertGroup group) const;
  // The error of a dense model, for callers that need experts.
  Status require_experts() const;
  // The same, and that the experts' data are here (not so in a backbone file).
  Status require_expert_data() const;

  // Stored, or computed from the weights (reads about 32 KiB per weight tensor).
  Result<LayerId> layer_id(const LayerExperts& layer) const;
  // Reads one slab; `out` has bytes_per_expert bytes and `slab` < the number of slabs.
  Status read_slab(const ExpertTensor& tensor, std::uint32_t slab, std::span<std::byte> out) const;
  // BLAKE3 of each slab of a slice's tensor, as recorded when it was cut.
  Result<std::vector<Hash>> slab_hashes(const ExpertTensor& tensor) const;

 private:
  explicit MoeModel(ModelFiles files) : files_(std::move(files)) {}
  Status read_metadata();
  Status collect_layers();
  Status finish_layer(LayerExperts& layer);
  Status finish_slice_layer(LayerExperts& layer, std::uint64_t n_stacked);
  Status finish_backbone();

  ModelFiles files_;
  FileKind kind_ = FileKind::kModel;
  std::string architecture_;
  std::string model_name_;
  std::uint32_t n_layer_ = 0, n_expert_ = 0, n_expert_used_ = 0, n_embd_ = 0;
  std::vector<LayerExperts> layers_;
};

// Number of slabs `tensor` has in `layer`'s file.
std::uint32_t slab_count(const LayerExperts& layer, const ExpertTensor& tensor);

}  // namespace kvasir::gguf
