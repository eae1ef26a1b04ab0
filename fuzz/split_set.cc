// Any bytes as the parts of a split model: parts that lie about their number, tensors that lie in
// two of them, and a plan in JSON over what they hold.

#include <cstdint>
#include <format>
#include <span>
#include <string>
#include <vector>

#include "cut_slice.h"
#include "gguf/slice_plan.h"

using namespace kvasir;
using namespace kvasir::gguf;

// First byte: parts claimed by the name. Then pieces, each a length of three bytes and its
// bytes; what is left is a plan.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const unsigned n_parts = 1 + data[0] % 4;
  ByteSpan rest = std::as_bytes(std::span(data, size)).subspan(1);
  std::vector<ByteSpan> parts;
  for (unsigned i = 0; i < n_parts && rest.size() >= 3; ++i) {
    const std::size_t length = std::to_integer<std::size_t>(rest[0]) | std::to_integer<std::size_t>(rest[1]) << 8 |
                               std::to_integer<std::size_t>(rest[2]) << 16;
    rest = rest.subspan(3);
    parts.push_back(rest.first(std::min(length, rest.size())));
    rest = rest.subspan(parts.back().size());
  }
  const auto open = [&](const std::string& name) -> Result<SourcePtr> {
    const auto part = PartName::parse(name);
    if (!part || part->part == 0 || part->part > parts.size()) return fix_input("there is no such part.");
    return make_memory_source(name, parts[part->part - 1]);
  };
  auto files = ModelFiles::open(std::format("m-00001-of-{:05}.gguf", n_parts), open);
  if (!files) return 0;
  const auto model = MoeModel::from_files(*std::move(files));
  if (!model) return 0;
  const auto use = [](const MoeModel&) {};
  fuzz::cut_slice(*model, SlicePlan::from_ranges(*model, ":", ":"), use);
  fuzz::cut_slice(*model, SlicePlan::from_json(*model, {reinterpret_cast<const char*>(rest.data()), rest.size()}), use);
  return 0;
}
