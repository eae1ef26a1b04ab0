// What the fuzzers of model files do with a model that was read: cut a slice and read that.
#pragma once

#include <cstdio>

#include "gguf/slice.h"

namespace kvasir::fuzz {

// A result that had to come did not.
template <typename T>
void must(const char* what, const Result<T>& result) {
  if (result) return;
  std::fprintf(stderr, "%s: %s\n", what, result.error().message.c_str());
  __builtin_trap();
}

// Nothing, if the plan or the model's tensors make no slice. Else what was cut can be read, and
// `use(slice)` sees it while its bytes live.
template <typename Use>
void cut_slice(const gguf::MoeModel& model, const Result<gguf::SlicePlan>& plan, Use use) {
  if (!plan) return;
  const auto layout = gguf::SliceLayout::make(model, *plan);
  if (!layout) return;
  const auto hashes = gguf::hash_slabs(*layout);
  if (!hashes) return;
  const gguf::SourcePtr stream = gguf::make_slice_source(*layout, *hashes, "slice");
  Bytes whole(static_cast<std::size_t>(stream->size()));
  must("streaming a slice", stream->read_at(0, whole));
  auto files = gguf::ModelFiles::from_source(gguf::make_memory_source("slice", whole));
  must("reading the slice", files);
  const auto slice = gguf::MoeModel::from_files(*std::move(files));
  must("seeing experts in the slice", slice);
  use(*slice);
}

}  // namespace kvasir::fuzz
