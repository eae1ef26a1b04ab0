// Filling a file, a stream or a list of hashes from a SliceLayout.

#include <algorithm>
#include <atomic>
#include <format>
#include <thread>

#include "gguf/output_file.h"
#include "gguf/slice.h"

namespace kvasir::gguf {
namespace {

// What the hasher reads at once: stays in a core's L2 cache between the read and the hash.
constexpr std::size_t kHashBufferBytes = 128 * 1024;

// How much of the output is written, from its start; counts up to the end, or to kStopped.
class Watermark {
 public:
  static constexpr std::uint64_t kStopped = UINT64_MAX;
  void advance(std::uint64_t offset) {
    value_.store(offset, std::memory_order_release);
    value_.notify_one();
  }
  // Waits until [0, offset) is written; false when the writer gave up.
  bool wait_for(std::uint64_t offset) const {
    std::uint64_t seen = value_.load(std::memory_order_acquire);
    while (seen < offset) {
      value_.wait(seen, std::memory_order_acquire);
      seen = value_.load(std::memory_order_acquire);
    }
    return seen != kStopped;
  }

 private:
  std::atomic<std::uint64_t> value_{0};
};

// Hashes slabs in output order. `read` gives bytes of the output.
template <typename Read>
Result<std::vector<Hash>> hash_in_order(const SliceLayout& layout, const Read& read) {
  std::vector<Hash> hashes;
  hashes.reserve(layout.slab_count());
  Bytes buffer(kHashBufferBytes);
  Blake3 hash;
  for (const SliceTensor& tensor : layout.tensors()) {
    std::uint64_t offset = tensor.offset;
    for (std::uint32_t slab = 0; slab < tensor.n_slabs; ++slab) {
      const std::uint64_t end = offset + tensor.slab_bytes;
      while (offset < end) {
        const std::span<std::byte> part(buffer.data(), static_cast<std::size_t>(std::min<std::uint64_t>(end - offset, buffer.size())));
        KVASIR_TRY(read(offset, part));
        hash.update(part);
        offset += part.size();
      }
      hashes.push_back(hash.finish());
    }
  }
  return hashes;
}

class SliceSource final : public ByteSource {
 public:
  SliceSource(const SliceLayout& layout, Bytes header, std::string name)
      : layout_(layout), header_(std::move(header)), name_(std::move(name)) {}
  const std::string& name() const override { return name_; }
  std::uint64_t size() const override { return layout_.total_bytes(); }

  Status read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    if (offset > size() || out.size() > size() - offset)
      return fix_input(std::format("'{}' ends at byte {}; ask for less.", name_, size()));
    const std::uint64_t end = offset + out.size();
    std::ranges::fill(out, std::byte{0});  // paddings
    if (offset < header_.size()) {
      const std::size_t n = std::min<std::size_t>(header_.size() - static_cast<std::size_t>(offset), out.size());
      std::memcpy(out.data(), header_.data() + offset, n);
    }
    const auto& runs = layout_.runs();
    auto run = std::ranges::upper_bound(runs, offset, {}, &CopyRun::offset);
    if (run != runs.begin()) --run;
    for (; run != runs.end() && run->offset < end; ++run) {
      const std::uint64_t from = std::max(offset, run->offset), to = std::min(end, run->offset + run->size);
      if (from >= to) continue;
      KVASIR_TRY(layout_.model().files().files()[run->file].source().read_at(
          run->source_offset + (from - run->offset),
          out.subspan(static_cast<std::size_t>(from - offset), static_cast<std::size_t>(to - from))));
    }
    return {};
  }

 private:
  const SliceLayout& layout_;
  Bytes header_;
  std::string name_;
};

}  // namespace

SourcePtr make_slice_source(const SliceLayout& layout, std::span<const Hash> slab_hashes, std::string name) {
  return std::make_shared<SliceSource>(layout, layout.header(slab_hashes), std::move(name));
}

Result<std::vector<Hash>> hash_slabs(const SliceLayout& layout) {
  // The header is not read, so any hashes will do for it.
  const SourcePtr source = make_slice_source(layout, std::vector<Hash>(layout.slab_count()), layout.model().file_name());
  return hash_in_order(layout, [&](std::uint64_t offset, std::span<std::byte> out) { return source->read_at(offset, out); });
}

Status write_slice(const SliceLayout& layout, const std::string& path, const Progress& progress) {
  KVASIR_TRY(check_not_input(layout.model().files(), path));
  KVASIR_ASSIGN(OutputFile out, OutputFile::create(path));
  KVASIR_TRY(out.set_size(layout.total_bytes()));

  // This thread copies; the second follows it and hashes what was written, read back from
  // the page cache. So a source is read once, whatever it is, and the hash is the file's own.
  Watermark written;
  Result<std::vector<Hash>> hashes;
  std::thread hasher([&] {
    hashes = hash_in_order(layout, [&](std::uint64_t offset, std::span<std::byte> part) -> Status {
      if (!written.wait_for(offset + part.size())) return fatal("stopped.");
      return out.read_at(offset, part);
    });
  });
  const Status copied = copy_runs(layout.model().files(), layout.runs(), out, progress,
                                  [&](std::uint64_t offset) { written.advance(offset); });
  if (!copied) written.advance(Watermark::kStopped);
  hasher.join();
  KVASIR_TRY(copied);
  KVASIR_TRY(hashes);
  KVASIR_TRY(out.write_at(0, layout.header(*hashes)));
  return out.commit();
}

}  // namespace kvasir::gguf
