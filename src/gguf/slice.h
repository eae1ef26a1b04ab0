// A slice as a layout: what the file will contain, byte for byte, before any of it exists.
// The writer fills a file from it; a hub streams it over HTTP without one.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "gguf/byte_source.h"
#include "gguf/copy_runs.h"
#include "gguf/moe_model.h"
#include "gguf/slice_plan.h"

namespace kvasir::gguf {

struct SliceTensor {
  const ExpertTensor* source = nullptr;  // in the model
  Shape ne{1, 1, 1, 1};
  std::uint64_t offset = 0;  // in the output
  std::uint64_t nbytes = 0;
  std::uint32_t n_slabs = 0;  // nbytes = n_slabs * slab_bytes
  std::uint64_t slab_bytes = 0;
};

class SliceLayout {
 public:
  // The model must outlive the layout. Reads the layers' ids, nothing else of the data.
  static Result<SliceLayout> make(const MoeModel& model, const SlicePlan& plan);

  const MoeModel& model() const { return *model_; }
  std::uint64_t header_bytes() const { return header_bytes_; }
  std::uint64_t total_bytes() const { return total_bytes_; }
  const std::vector<SliceTensor>& tensors() const { return tensors_; }  // in output order
  const std::vector<CopyRun>& runs() const { return runs_; }         // in output order
  std::size_t slab_count() const { return n_slabs_; }

  // The header with these hashes, one per slab, tensor by tensor; header_bytes() long
  // whatever they are.
  Bytes header(std::span<const Hash> slab_hashes) const;

 private:
  struct Group {
    const LayerExperts* layer = nullptr;
    ExpertSet kept;
    LayerId id{};
    std::size_t first_tensor = 0, n_tensors = 0;
  };
  SliceLayout() = default;
  Status add_group(const LayerExperts& layer, const ExpertSet& kept);

  const MoeModel* model_ = nullptr;
  std::vector<Group> groups_;
  std::vector<SliceTensor> tensors_;
  std::vector<CopyRun> runs_;
  std::vector<std::pair<std::string, Bytes>> copied_metadata_;  // raw values
  std::size_t n_slabs_ = 0;
  std::uint64_t header_bytes_ = 0;
  std::uint64_t total_bytes_ = 0;
};

// Hashes every slab of the layout by reading the model.
Result<std::vector<Hash>> hash_slabs(const SliceLayout& layout);

// The bytes of the slice, any range of them, put together from the model as they are asked
// for. The layout and its model must outlive the source.
SourcePtr make_slice_source(const SliceLayout& layout, std::span<const Hash> slab_hashes, std::string name);

// Copies, hashes on a second thread, and lets the file appear at `path` when it is complete.
Status write_slice(const SliceLayout& layout, const std::string& path, const Progress& progress = {});

}  // namespace kvasir::gguf
