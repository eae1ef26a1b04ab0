// A model the hub serves: its files held open, their identity, and the BLAKE3 of every slab.
//
// Thread contract: all const members may be called from any thread while one other thread
// runs compute_hashes().
#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "gguf/moe_model.h"
#include "gguf/slice_plan.h"
#include "hub/core/market.h"
#include "hub/models/body.h"
#include "hub/models/file_identity.h"

namespace kvasir::hub {

struct SliceAnswer {
  Body body;
  std::string etag;  // strong, quotes included: the same bytes have the same one, others not
};

class HostedModel : public std::enable_shared_from_this<HostedModel> {
 public:
  // `file` in `folder`; any other part of a split set lies beside it. Errors name files
  // without the folder, for they are shown to strangers.
  static Result<std::shared_ptr<HostedModel>> open(const std::filesystem::path& folder, const std::string& file,
                                                   std::string name);

  const std::string& name() const { return name_; }
  const gguf::MoeModel& moe() const { return moe_; }
  const std::vector<FileIdentity>& identity() const { return identity_; }
  ModelShape shape() const;
  // Of moe().layers(), in their order.
  const std::vector<gguf::LayerId>& layer_ids() const { return layer_ids_; }

  // kRetryLater once a file was written to since it was opened.
  Status check_unchanged() const;

  std::size_t slab_count() const { return hashes_.size(); }
  std::size_t slabs_hashed() const { return n_hashed_.load(std::memory_order_acquire); }
  bool ready() const { return slabs_hashed() == slab_count(); }
  // Reads the whole model; `stop` is asked between slabs. Picks up where it was.
  Status compute_hashes(const std::function<bool()>& stop);
  // A file of these hashes for these very files, or nothing.
  bool load_hashes(const std::filesystem::path& path);
  Status save_hashes(const std::filesystem::path& path) const;

  // The hashes of a tensor's slabs; the tensor must be one of moe()'s and ready() true.
  std::span<const gguf::Hash> slab_hashes(const gguf::ExpertTensor& tensor) const;

  // kRetryLater while hashes that it needs are not there yet.
  Result<SliceAnswer> slice(const gguf::SlicePlan& plan) const;
  // The model without its experts. Needs no hashes: its tag comes from the files' identity.
  Result<SliceAnswer> backbone() const;

 private:
  HostedModel(std::string name, gguf::MoeModel moe) : name_(std::move(name)), moe_(std::move(moe)) {}
  std::size_t first_hash(const gguf::ExpertTensor& tensor) const;
  Bytes cache_prefix() const;
  void keep_alive(Body& body) const;

  std::string name_;
  gguf::MoeModel moe_;
  std::vector<FileIdentity> identity_;
  std::vector<gguf::LayerId> layer_ids_;
  std::vector<const gguf::ExpertTensor*> tensors_;  // in the order of the hashes
  std::vector<std::size_t> first_hash_;             // of each
  std::vector<gguf::Hash> hashes_;
  std::atomic<std::size_t> n_hashed_{0};
};

}  // namespace kvasir::hub
