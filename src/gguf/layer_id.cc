#include "gguf/layer_id.h"

#include <algorithm>
#include <cstring>
#include <format>
#include <set>
#include <vector>

#include "base/bytes.h"
#include "gguf/blake3_hasher.h"
#include "gguf/expert_tensor.h"

namespace kvasir::gguf {
namespace {

constexpr std::string_view kDomain = "kvasir expert layer v1\n";
constexpr std::uint64_t kSampleBytes = 4096;

Status add_tensor(Blake3& hash, const LayerIdTensor& tensor) {
  const auto slab = tensor_bytes(tensor.type, {tensor.ne[0], tensor.ne[1], 1, 1});
  const std::uint64_t n_expert = tensor.ne[2];
  if (!slab || *slab == 0 || n_expert == 0 || n_expert > kMaxExperts)
    return fix_input(std::format("tensor '{}' has no shape that experts can have; the model is broken.", tensor.name));

  Bytes head;
  ByteWriter out(head);
  out.put(static_cast<std::uint32_t>(tensor.name.size()));
  out.put_bytes(tensor.name);
  out.put(static_cast<std::uint32_t>(tensor.type));
  for (std::uint64_t n : tensor.ne) out.put(n);
  hash.update(head);

  Bytes sample(static_cast<std::size_t>(std::min(kSampleBytes, *slab)));
  for (std::uint64_t e : std::set{std::uint64_t{0}, n_expert / 3, 2 * n_expert / 3, n_expert - 1}) {
    const auto expert = static_cast<std::uint32_t>(e);
    hash.update(std::as_bytes(std::span(&expert, 1)));
    for (std::uint64_t offset : {std::uint64_t{0}, *slab - sample.size()}) {
      KVASIR_TRY(tensor.read(expert, offset, sample));
      hash.update(sample);
    }
  }
  return {};
}

}  // namespace

Result<LayerId> compute_layer_id(std::span<const LayerIdTensor> weights) {
  std::vector<const LayerIdTensor*> sorted;
  for (const LayerIdTensor& tensor : weights) sorted.push_back(&tensor);
  std::ranges::sort(sorted, {}, [](const LayerIdTensor* t) { return t->name; });
  Blake3 hash;
  hash.update(std::as_bytes(std::span(kDomain)));
  for (const LayerIdTensor* tensor : sorted) KVASIR_TRY(add_tensor(hash, *tensor));
  return hash.finish();
}

Result<LayerId> compute_layer_id(std::span<const LayerIdMemoryTensor> weights) {
  std::vector<LayerIdTensor> readers;
  for (const LayerIdMemoryTensor& tensor : weights) {
    const std::uint64_t slab = tensor_bytes(tensor.type, {tensor.ne[0], tensor.ne[1], 1, 1}).value_or(0);
    readers.push_back({tensor.name, tensor.type, tensor.ne,
                       [data = tensor.data, slab](std::uint32_t expert, std::uint64_t offset,
                                                  std::span<std::byte> out) {
                         std::memcpy(out.data(), data + expert * slab + offset, out.size());
                         return Status{};
                       }});
  }
  return compute_layer_id(readers);
}

}  // namespace kvasir::gguf
