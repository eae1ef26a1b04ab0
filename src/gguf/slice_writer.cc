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
        const std::span<std::byte> part(buffer.data(),
                                        static_cast<std::size_t>(std::min<std::uint64_t>(end - offset, buffer.size())));
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
    std::uint64_t at = offset;  // everything before is in `out`
    const auto part = [&](std::uint64_t to) {
      const auto bytes = out.subspan(static_cast<std::size_t>(at - offset), static_cast<std::size_t>(to - at));
      at = to;
      return bytes;
    };
    if (at < header_.size()) {
      const std::uint64_t from = at;
      const std::span<std::byte> bytes = part(std::min<std::uint64_t>(end, header_.size()));
      std::memcpy(bytes.data(), header_.data() + from, bytes.size());
    }
    const auto& runs = layout_.runs();
    auto run = std::ranges::upper_bound(runs, at, {}, &CopyRun::offset);
    if (run != runs.begin()) --run;
    for (; run != runs.end() && run->offset < end && at < end; ++run) {
      const std::uint64_t run_end = run->offset + run->size;
      if (run_end <= at) continue;
      if (run->offset > at) std::ranges::fill(part(run->offset), std::byte{0});  // padding
      const std::uint64_t skipped = at - run->offset;
      const ByteSource& source = layout_.model().files().files()[run->file].source();
      KVASIR_TRY(source.read_at(run->source_offset + skipped, part(std::min(end, run_end))));
    }
    std::ranges::fill(part(end), std::byte{0});
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
  const SourcePtr source = make_slice_source(layout, std::vector<Hash>(layout.slab_count()),
                                             layout.model().file_name());
  return hash_in_order(layout, [&](std::uint64_t offset, std::span<std::byte> out) {
    return source->read_at(offset, out);
  });
}

Status write_slice(const SliceLayout& layout, const std::string& path, const Progress& progress) {
  KVASIR_TRY(check_not_input(layout.model().files(), path));
  KVASIR_ASSIGN(OutputFile out, OutputFile::create(path));
  KVASIR_TRY(out.set_size(layout.total_bytes()));

  // This thread copies; the second follows it and hashes. From files it reads the model again,
  // close behind: the bytes are in the page cache, and reading the pages that are being
  // written would slow the copy by a tenth. Other sources are read once, so there it reads
  // what was written.
  const auto is_file = [](const GgufFile& file) { return file.source().file_descriptor() >= 0; };
  const bool reads_model = std::ranges::all_of(layout.model().files().files(), is_file);
  const SourcePtr model_bytes = make_slice_source(layout, std::vector<Hash>(layout.slab_count()), path);
  Watermark written;
  Result<std::vector<Hash>> hashes;
  std::thread hasher([&] {
    hashes = hash_in_order(layout, [&](std::uint64_t offset, std::span<std::byte> part) -> Status {
      if (!written.wait_for(offset + part.size())) return fatal("stopped.");
      return reads_model ? model_bytes->read_at(offset, part) : out.read_at(offset, part);
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
