#include "hub/models/hosted_model.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <format>
#include <fstream>

#include "base/check.h"
#include "base/hex.h"
#include "gguf/backbone.h"
#include "gguf/output_file.h"
#include "gguf/slice.h"
#include "hub/models/proof.h"

namespace kvasir::hub {
namespace {

constexpr std::size_t kHashBufferBytes = 128 * 1024;
constexpr std::string_view kCacheMagic = "kvasir slab hashes 1\n";
constexpr std::size_t kEtagDigits = 32;

std::string etag_of(std::initializer_list<ByteSpan> parts) {
  gguf::Blake3 hash;
  for (const ByteSpan part : parts) hash.update(part);
  return std::format("\"{}\"", to_hex(hash.finish()).substr(0, kEtagDigits));
}

// A file under the name it has inside the folder.
class ShortNamedSource final : public gguf::ByteSource {
 public:
  ShortNamedSource(std::string name, gguf::SourcePtr source) : name_(std::move(name)), source_(std::move(source)) {}
  const std::string& name() const override { return name_; }
  std::uint64_t size() const override { return source_->size(); }
  Status read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    return source_->read_at(offset, out);
  }
  int file_descriptor() const override { return source_->file_descriptor(); }

 private:
  std::string name_;
  gguf::SourcePtr source_;
};

}  // namespace

Result<std::shared_ptr<HostedModel>> HostedModel::open(const std::filesystem::path& folder, const std::string& file,
                                                       std::string name) {
  const gguf::SourceOpener opener = [&folder](const std::string& part) -> Result<gguf::SourcePtr> {
    auto source = gguf::open_file_source((folder / part).string());
    if (!source) return fix_input(std::format("'{}' cannot be opened.", part));
    return std::make_shared<ShortNamedSource>(part, *std::move(source));
  };
  KVASIR_ASSIGN(gguf::MoeModel moe, gguf::MoeModel::open(file, opener));
  if (moe.kind() != gguf::FileKind::kModel)
    return fix_input(std::format("'{}' is a {}; the hub serves whole models.", file, gguf::to_string(moe.kind())));
  KVASIR_TRY(moe.require_expert_data());
  std::shared_ptr<HostedModel> out(new HostedModel(std::move(name), std::move(moe)));
  for (const gguf::GgufFile& part : out->moe_.files().files()) {
    const auto identity = identity_of(part.source().file_descriptor());
    if (!identity) return fatal(std::format("'{}' cannot be looked at: {}.", part.name(), errno_text(errno)));
    out->identity_.push_back(*identity);
  }
  std::size_t n = 0;
  for (const gguf::LayerExperts& layer : out->moe_.layers()) {
    KVASIR_ASSIGN(const gguf::LayerId id, out->moe_.layer_id(layer));
    out->layer_ids_.push_back(id);
    for (const gguf::ExpertTensor& tensor : layer.tensors) {
      out->tensors_.push_back(&tensor);
      out->first_hash_.push_back(n);
      n += gguf::slab_count(layer, tensor);
    }
  }
  out->hashes_.resize(n);
  return out;
}

ModelShape HostedModel::shape() const {
  ModelShape shape;
  shape.name = name_;
  shape.n_embd = moe_.n_embd();
  std::uint32_t n_layer = moe_.n_layer();
  for (const auto& layer : moe_.layers()) n_layer = std::max(n_layer, layer.layer + 1);
  shape.n_expert.resize(n_layer);
  shape.bytes_per_expert.resize(n_layer);
  shape.proof_bytes.resize(n_layer);
  for (std::uint32_t i = 0; i < n_layer; ++i) {
    const gguf::LayerExperts* leading = leading_group(moe_, i);
    if (leading == nullptr) continue;
    shape.n_expert[i] = leading->n_expert;
    shape.proof_bytes[i] = proof_bytes(*leading);
    std::uint64_t bytes = 0;  // of all groups, shared out evenly
    for (const auto& layer : moe_.layers())
      if (layer.layer == i) bytes += layer.bytes_per_expert() * layer.n_expert;
    shape.bytes_per_expert[i] = std::max<std::uint64_t>(1, (bytes + leading->n_expert - 1) / leading->n_expert);
  }
  return shape;
}

Status HostedModel::check_unchanged() const {
  for (std::size_t i = 0; i < identity_.size(); ++i) {
    const gguf::GgufFile& part = moe_.files().files()[i];
    if (identity_of(part.source().file_descriptor()) != identity_[i])
      return retry_later(std::format(
          "the file '{}' of model '{}' was changed while in use; it is being read anew, ask again in a moment.",
          part.name(), name_));
  }
  return {};
}

std::size_t HostedModel::first_hash(const gguf::ExpertTensor& tensor) const {
  const auto found = std::ranges::find(tensors_, &tensor);
  KVASIR_CHECK(found != tensors_.end());
  return first_hash_[static_cast<std::size_t>(found - tensors_.begin())];
}

std::span<const gguf::Hash> HostedModel::slab_hashes(const gguf::ExpertTensor& tensor) const {
  KVASIR_CHECK(ready());
  const std::size_t n = static_cast<std::size_t>(tensor.nbytes / std::max<std::uint64_t>(1, tensor.bytes_per_expert));
  return std::span(hashes_).subspan(first_hash(tensor), n);
}

Status HostedModel::compute_hashes(const std::function<bool()>& stop) {
  Bytes buffer(kHashBufferBytes);
  gguf::Blake3 hash;
  std::size_t tensor_index = 0;
  for (std::size_t i = slabs_hashed(); i < hashes_.size(); ++i) {
    while (tensor_index + 1 < tensors_.size() && first_hash_[tensor_index + 1] <= i) ++tensor_index;
    const gguf::ExpertTensor& tensor = *tensors_[tensor_index];
    const gguf::ByteSource& source = moe_.files().files()[tensor.file].source();
    const std::uint64_t begin = tensor.offset + (i - first_hash_[tensor_index]) * tensor.bytes_per_expert;
    for (std::uint64_t at = 0; at < tensor.bytes_per_expert; at += buffer.size()) {
      const auto part = std::span(buffer).first(
          static_cast<std::size_t>(std::min<std::uint64_t>(buffer.size(), tensor.bytes_per_expert - at)));
      KVASIR_TRY(source.read_at(begin + at, part));
      hash.update(part);
    }
    hashes_[i] = hash.finish();
    n_hashed_.store(i + 1, std::memory_order_release);
    if (stop()) return retry_later("stopped.");
  }
  // Bytes that were written to under way would be hashed as a mixture.
  const Status unchanged = check_unchanged();
  if (!unchanged) n_hashed_.store(0, std::memory_order_release);
  return unchanged;
}

// What the hashes are good for: the identity of every part, then how many follow.
Bytes HostedModel::cache_prefix() const {
  Bytes out;
  ByteWriter writer(out);
  writer.put_bytes(kCacheMagic);
  writer.put(static_cast<std::uint32_t>(identity_.size()));
  for (const FileIdentity& part : identity_) {
    writer.put(part.device);
    writer.put(part.inode);
    writer.put(part.size);
    writer.put(part.modified_ns);
  }
  writer.put(static_cast<std::uint64_t>(hashes_.size()));
  return out;
}

bool HostedModel::load_hashes(const std::filesystem::path& path) {
  const Bytes prefix = cache_prefix();
  const std::size_t expected = prefix.size() + (hashes_.size() + 1) * sizeof(gguf::Hash);
  std::error_code error;
  if (std::filesystem::file_size(path, error) != expected || error) return false;
  std::ifstream in(path, std::ios::binary);
  Bytes all(expected);
  if (!in.read(reinterpret_cast<char*>(all.data()), static_cast<std::streamsize>(all.size()))) return false;
  if (!std::equal(prefix.begin(), prefix.end(), all.begin())) return false;
  gguf::Blake3 checksum;
  checksum.update(ByteSpan(all).first(expected - sizeof(gguf::Hash)));
  const gguf::Hash sum = checksum.finish();
  if (std::memcmp(sum.data(), all.data() + expected - sizeof sum, sizeof sum) != 0) return false;
  std::memcpy(hashes_.data(), all.data() + prefix.size(), hashes_.size() * sizeof(gguf::Hash));
  n_hashed_.store(hashes_.size(), std::memory_order_release);
  return true;
}

Status HostedModel::save_hashes(const std::filesystem::path& path) const {
  KVASIR_CHECK(ready());
  Bytes all = cache_prefix();
  ByteWriter(all).put_bytes(std::as_bytes(std::span(hashes_)));
  gguf::Blake3 checksum;
  checksum.update(all);
  ByteWriter(all).put_bytes(checksum.finish());
  KVASIR_ASSIGN(gguf::OutputFile out, gguf::OutputFile::create(path.string()));
  KVASIR_TRY(out.write_at(0, all));
  return out.commit();
}

Result<SliceAnswer> HostedModel::slice(const gguf::SlicePlan& plan) const {
  KVASIR_TRY(check_unchanged());
  KVASIR_ASSIGN(const gguf::SliceLayout layout, gguf::SliceLayout::make(moe_, plan));
  const std::size_t available = slabs_hashed();
  std::vector<gguf::Hash> hashes;
  hashes.reserve(layout.slab_count());
  for (const gguf::SliceTensor& tensor : layout.tensors()) {
    const gguf::ExpertTensorName& id = tensor.source->id;
    const gguf::LayerExperts* group = moe_.find(id.layer, id.group);
    KVASIR_CHECK(group != nullptr);
    const std::size_t first = first_hash(*tensor.source);
    std::vector<std::uint32_t> slabs = {0};
    if (tensor.source->per_expert) slabs = gguf::experts_of_group(moe_, *group, plan.layers.at(id.layer)).ids();
    KVASIR_CHECK(slabs.size() == tensor.n_slabs);
    for (const std::uint32_t slab : slabs) {
      const std::size_t at = first + slab;  // a whole model holds all: rank and id are the same
      if (at >= available)
        return retry_later(std::format("model '{}' is still being hashed ({} of {} slabs); ask again in a moment.",
                                       name_, available, slab_count()));
      hashes.push_back(hashes_[at]);
    }
  }
  SliceAnswer out;
  auto header = std::make_shared<const Bytes>(layout.header(hashes));
  out.etag = etag_of({*header});  // it has the hash of everything that follows

  std::uint64_t at = header->size();
  out.body.append_memory(std::move(header));
  for (const gguf::CopyRun& run : layout.runs()) {
    out.body.append_zeros(run.offset - at);
    out.body.append_file(moe_.files().files()[run.file].source().file_descriptor(), run.source_offset, run.size);
    at = run.offset + run.size;
  }
  out.body.append_zeros(layout.total_bytes() - at);
  KVASIR_CHECK(out.body.size == layout.total_bytes());
  keep_alive(out.body);
  return out;
}

Result<SliceAnswer> HostedModel::backbone() const {
  KVASIR_TRY(check_unchanged());
  KVASIR_ASSIGN(gguf::BackboneLayout layout, gguf::BackboneLayout::make(moe_));
  SliceAnswer out;
  out.etag = etag_of({layout.header, cache_prefix()});
  // Copies and placeholders, in the order of the file.
  struct Part {
    std::uint64_t offset = 0;
    const gguf::CopyRun* run = nullptr;
    const gguf::BackboneLayout::Stamp* stamp = nullptr;
  };
  std::vector<Part> parts;
  for (const gguf::CopyRun& run : layout.runs) parts.push_back({run.offset, &run, nullptr});
  for (const auto& stamp : layout.stamps) parts.push_back({stamp.offset, nullptr, &stamp});
  std::ranges::sort(parts, {}, &Part::offset);
  out.body.append_memory(std::make_shared<const Bytes>(std::move(layout.header)));
  for (const Part& part : parts) {
    out.body.append_zeros(part.offset - out.body.size);
    if (part.run != nullptr) {
      out.body.append_file(moe_.files().files()[part.run->file].source().file_descriptor(), part.run->source_offset,
                           part.run->size);
    } else {
      out.body.append_memory(std::make_shared<const Bytes>(part.stamp->bytes.begin(), part.stamp->bytes.end()));
    }
  }
  out.body.append_zeros(layout.total_bytes - out.body.size);
  keep_alive(out.body);
  return out;
}

void HostedModel::keep_alive(Body& body) const {
  body.owner = shared_from_this();
  body.check = [self = shared_from_this()] { return self->check_unchanged(); };
}

}  // namespace kvasir::hub
