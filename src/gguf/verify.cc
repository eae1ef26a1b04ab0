#include "gguf/verify.h"

#include <algorithm>
#include <cstring>
#include <format>
#include <map>
#include <vector>

#include "gguf/placeholder.h"

namespace kvasir::gguf {
namespace {

constexpr std::size_t kCompareBytes = 256 * 1024;

class Verifier {
 public:
  Verifier(const MoeModel& made, const MoeModel& model, const Progress& progress)
      : made_(made), model_(model), progress_(progress), left_(kCompareBytes), right_(kCompareBytes) {}

  Result<Verified> run() {
    KVASIR_TRY(model_.require_expert_data());
    if (made_.kind() == FileKind::kModel)
      return fix_input(std::format("'{}' is a whole model; --verify takes a slice or a backbone file.",
                                   made_.file_name()));
    for (const ModelFiles::Entry& entry : made_.files().tensors()) total_ += entry.tensor->nbytes;
    if (made_.kind() == FileKind::kSlice) {
      KVASIR_TRY(verify_slice());
    } else {
      KVASIR_TRY(verify_backbone());
    }
    return verified_;
  }

 private:
  std::unexpected<Error> differs(std::string_view what) const {
    return fix_input(std::format("'{}' was not made from '{}': {}.", made_.file_name(), model_.file_name(), what));
  }

  Status check_layer_id(const LayerExperts& mine, const LayerExperts& theirs) const {
    KVASIR_ASSIGN(const LayerId id, model_.layer_id(theirs));
    if (mine.stored_id != id)
      return differs(std::format("the id of layer {} ({}) differs", mine.layer, to_string(mine.group)));
    return {};
  }

  Status verify_slice() {
    for (const LayerExperts& mine : made_.layers()) {
      const LayerExperts* theirs = model_.find(mine.layer, mine.group);
      if (!theirs || theirs->n_expert != mine.n_expert)
        return differs(std::format("layer {} has no {} {} there", mine.layer, mine.n_expert, to_string(mine.group)));
      KVASIR_TRY(check_layer_id(mine, *theirs));
      if (mine.tensors.size() != theirs->tensors.size())
        return differs(std::format("layer {} has {} expert tensors instead of {}", mine.layer, mine.tensors.size(),
                                   theirs->tensors.size()));
      for (std::size_t i = 0; i < mine.tensors.size(); ++i)
        KVASIR_TRY(verify_tensor(mine, mine.tensors[i], *theirs, theirs->tensors[i]));
    }
    if (verified_.n_tensors != made_.files().tensors().size())
      return differs("it holds tensors that are not of experts");
    return {};
  }

  // Both lists are sorted by name.
  Status verify_tensor(const LayerExperts& mine, const ExpertTensor& a, const LayerExperts& theirs,
                       const ExpertTensor& b) {
    if (a.name != b.name) return differs(std::format("it holds '{}' where '{}' is there", a.name, b.name));
    Shape wanted = b.ne;
    if (b.per_expert) wanted[stacked_dimension(b.id.part)] = mine.held.size();
    if (a.type != b.type || a.per_expert != b.per_expert || a.ne != wanted)
      return differs(std::format("'{}' has another type or shape", a.name));
    KVASIR_ASSIGN(const std::vector<Hash> hashes, made_.slab_hashes(a));
    const std::vector<std::uint32_t> ids = a.per_expert ? mine.held.ids() : std::vector<std::uint32_t>{0};
    for (std::uint32_t slab = 0; slab < ids.size(); ++slab) {
      const auto rank = a.per_expert ? theirs.held.rank(ids[slab]) : 0;
      if (!rank) return fix_input(std::format("'{}' does not hold expert {} of layer {}; compare with the whole model.",
                                              model_.file_name(), ids[slab], mine.layer));
      Blake3 hash;
      KVASIR_TRY(compare(a.file, a.offset + slab * a.bytes_per_expert, b.file, b.offset + *rank * b.bytes_per_expert,
                         a.bytes_per_expert, std::format("expert {} of '{}'", ids[slab], a.name), &hash));
      if (hash.finish() != hashes[slab])
        return differs(std::format("the hash recorded for expert {} of '{}' is wrong", ids[slab], a.name));
      ++verified_.n_slabs;
    }
    ++verified_.n_tensors;
    return {};
  }

  Status verify_backbone() {
    std::map<std::string_view, const LayerExperts*> weights;
    for (const LayerExperts& layer : model_.layers()) {
      const LayerExperts* mine = made_.find(layer.layer, layer.group);
      if (!mine) return differs(std::format("layer {} has no experts", layer.layer));
      KVASIR_TRY(check_layer_id(*mine, layer));
      for (const ExpertTensor& tensor : layer.tensors)
        if (tensor.id.part == ExpertPart::kWeight) weights.emplace(tensor.name, mine);
    }
    std::map<std::string_view, ModelFiles::Entry> theirs;
    for (const ModelFiles::Entry& entry : model_.files().tensors()) theirs.emplace(entry.tensor->name, entry);
    if (theirs.size() != made_.files().tensors().size()) return differs("the number of tensors differs");
    for (const ModelFiles::Entry& mine : made_.files().tensors()) {
      const TensorInfo& a = *mine.tensor;
      const auto found = theirs.find(a.name);
      if (found == theirs.end()) return differs(std::format("there is no '{}' there", a.name));
      const TensorInfo& b = *found->second.tensor;
      const auto weight = weights.find(a.name);
      if (a.ne != b.ne || (weight == weights.end() && a.type != b.type))
        return differs(std::format("'{}' has another type or shape", a.name));
      if (weight == weights.end()) {
        KVASIR_TRY(compare(mine.file, a.offset, found->second.file, b.offset, a.nbytes, std::format("'{}'", a.name),
                           nullptr));
      } else {
        std::array<std::byte, kPlaceholderBytes> block;
        KVASIR_TRY(made_.files().files()[mine.file].source().read_at(a.offset, block));
        if (decode_placeholder(block) != Placeholder{b.type, *weight->second->stored_id, b.nbytes})
          return differs(std::format("the placeholder of '{}' names other weights", a.name));
        ++verified_.n_slabs;
      }
      ++verified_.n_tensors;
    }
    return {};
  }

  Status compare(std::uint32_t made_file, std::uint64_t made_offset, std::uint32_t model_file,
                 std::uint64_t model_offset,
                 std::uint64_t size, const std::string& what, Blake3* hash) {
    for (std::uint64_t at = 0; at < size; at += kCompareBytes) {
      const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(kCompareBytes, size - at));
      const std::span<std::byte> a(left_.data(), n), b(right_.data(), n);
      KVASIR_TRY(made_.files().files()[made_file].source().read_at(made_offset + at, a));
      KVASIR_TRY(model_.files().files()[model_file].source().read_at(model_offset + at, b));
      if (std::memcmp(a.data(), b.data(), n) != 0) {
        const auto first = static_cast<std::uint64_t>(std::ranges::mismatch(a, b).in1 - a.begin());
        return differs(std::format("byte {} of {} differs", at + first, what));
      }
      if (hash) hash->update(a);
      verified_.n_bytes += n;
      if (progress_) progress_(verified_.n_bytes, total_);
    }
    return {};
  }

  const MoeModel& made_;
  const MoeModel& model_;
  const Progress& progress_;
  Bytes left_, right_;
  std::uint64_t total_ = 0;
  Verified verified_;
};

}  // namespace

Result<Verified> verify(const MoeModel& made, const MoeModel& model, const Progress& progress) {
  return Verifier(made, model, progress).run();
}

}  // namespace kvasir::gguf
