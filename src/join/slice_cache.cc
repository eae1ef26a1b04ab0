#include "join/slice_cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <format>
#include <fstream>

#include "gguf/blake3_hasher.h"
#include "gguf/moe_model.h"
#include "hub/store/private_folder.h"

namespace kvasir::join {
namespace fs = std::filesystem;
namespace {

constexpr Nanos kBackoffMin = std::chrono::seconds(1), kBackoffMax = std::chrono::minutes(2);
constexpr std::uint64_t kCountEvery = 4u << 20;
constexpr int kBadFilesMax = 3;  // the same slice, whole and wrong: something else is the matter

std::string today() {
  return std::format("{:%F}", std::chrono::floor<std::chrono::days>(std::chrono::system_clock::now()));
}

class PartFile {
 public:
  explicit PartFile(const fs::path& path) : fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {}
  ~PartFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  PartFile(const PartFile&) = delete;
  PartFile& operator=(const PartFile&) = delete;
  bool ok() const { return fd_ >= 0; }
  std::uint64_t size() const { return static_cast<std::uint64_t>(std::max<off_t>(0, ::lseek(fd_, 0, SEEK_END))); }
  bool truncate() const { return ::ftruncate(fd_, 0) == 0; }
  bool sync() const { return ::fsync(fd_) == 0; }
  bool append(const char* data, std::size_t n) const {
    ::lseek(fd_, 0, SEEK_END);
    while (n > 0) {
      const ssize_t written = ::write(fd_, data, n);
      if (written <= 0) return false;
      data += written;
      n -= static_cast<std::size_t>(written);
    }
    return true;
  }

 private:
  int fd_;
};

std::string read_line(const fs::path& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

// Of a strong tag, quotes off; empty if it is none that can be a file's name.
std::string file_of_etag(const std::string& etag) {
  if (etag.size() < 10 || etag.front() != '"' || etag.back() != '"') return {};
  const std::string text = etag.substr(1, etag.size() - 2);
  if (!std::ranges::all_of(text, [](unsigned char c) { return std::isalnum(c) != 0; })) return {};
  return text + ".gguf";
}

}  // namespace

Status verify_slice(const std::string& path) {
  KVASIR_ASSIGN(const gguf::MoeModel slice, gguf::MoeModel::open(path));
  Bytes buffer;
  for (const gguf::LayerExperts& layer : slice.layers())
    for (const gguf::ExpertTensor& tensor : layer.tensors) {
      KVASIR_ASSIGN(const auto hashes, slice.slab_hashes(tensor));
      buffer.resize(tensor.bytes_per_expert);
      for (std::uint32_t i = 0; i < hashes.size(); ++i) {
        KVASIR_TRY(slice.read_slab(tensor, i, buffer));
        gguf::Blake3 hash;
        hash.update(buffer);
        if (hash.finish() != hashes[i]) return retry_later(std::format("slab {} of '{}' is damaged.", i, tensor.name));
      }
    }
  return {};
}

Result<SliceCache> SliceCache::open(fs::path folder) {
  KVASIR_TRY(hub::make_private_folder(folder));
  return SliceCache(std::move(folder));
}

std::uint64_t SliceCache::received_today() const {
  std::ifstream in(folder_ / "received");
  std::string day;
  std::uint64_t bytes = 0;
  return in >> day >> bytes && day == today() ? bytes : 0;
}

void SliceCache::count_received(std::uint64_t bytes) {
  uncounted_ += bytes;
  if (uncounted_ < kCountEvery && bytes != 0) return;
  const std::uint64_t total = received_today() + std::exchange(uncounted_, 0);
  const fs::path fresh = folder_ / "received.new";
  std::ofstream(fresh, std::ios::trunc) << today() << ' ' << total << '\n';
  std::error_code ignored;
  fs::rename(fresh, folder_ / "received", ignored);
}

Status SliceCache::make_room(std::uint64_t bytes, std::uint64_t quota, const fs::path& part) const {
  if (quota == 0) return {};
  struct Kept {
    fs::file_time_type used;
    fs::path path;
    std::uint64_t size;
  };
  std::vector<Kept> files;
  std::uint64_t total = bytes;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder_, error)) {
    if (!entry.is_regular_file(error) || entry.path() == part) continue;
    const std::string extension = entry.path().extension();
    if (extension != ".gguf" && extension != ".part") continue;
    files.push_back({entry.last_write_time(error), entry.path(), entry.file_size(error)});
    total += files.back().size;
  }
  std::ranges::sort(files, {}, &Kept::used);
  for (const Kept& file : files) {
    if (total <= quota) break;
    if (in_use_.contains(file.path)) continue;
    if (fs::remove(file.path, error)) total -= file.size;
  }
  if (total > quota)
    return fix_input(
        std::format("{} bytes do not fit into the quota of {} beside what is in use; raise --disk or lower --memory.",
                    bytes, quota));
  return {};
}

Result<fs::path> SliceCache::fetch(hub::HubClient& hub, const std::string& model, const hub::Segment& experts,
                                   const FetchOptions& options) {
  const std::string path = std::format("/api/proxy/models/{}/expert-shard?layers={}:{}&experts={}:{}", model,
                                       experts.layer, experts.layer + 1, experts.begin, experts.end);
  const std::string stem = std::format("{}-{}-{}-{}", model, experts.layer, experts.begin, experts.end);
  const fs::path part = folder_ / (stem + ".part"), tag_file = folder_ / (stem + ".etag");
  PartFile file(part);
  if (!file.ok())
    return fix_input(std::format("cannot write '{}': {}; choose another --cache.", part.string(), errno_text(errno)));
  Nanos backoff = kBackoffMin;
  int bad_files = 0;
  while (true) {
    if (options.daily_bytes_max > 0 && received_today() >= options.daily_bytes_max) {
      options.log("the day's share of data is used up; the download goes on tomorrow.");
      while (received_today() >= options.daily_bytes_max)
        if (!options.wait(std::chrono::minutes(1))) return retry_later("stopped.");
    }
    const std::uint64_t had = file.size();
    const std::string etag = had > 0 ? read_line(tag_file) : std::string();
    std::uint64_t done = 0, total = 0;
    std::optional<Error> refused;
    fs::path ready;
    const auto begin = [&](const hub::HubClient::Piece& piece) {
      const std::string name = file_of_etag(piece.etag);
      if (name.empty()) {
        refused = Error{ErrorAction::kFixInput,
                        "the hub's answer has no strong ETag; is a proxy in between that changes it?"};
        return false;
      }
      if (fs::exists(folder_ / name)) {  // fetched before, under whatever name
        ready = folder_ / name;
        return false;
      }
      total = piece.total;
      if (piece.status == 200) {
        if (!file.truncate()) return false;
        std::ofstream(tag_file, std::ios::trunc) << piece.etag << '\n';
      }
      done = file.size();
      if (const Status room = make_room(total, options.quota_bytes, part); !room) {
        refused = room.error();
        return false;
      }
      return true;
    };
    const auto data = [&](const char* bytes, std::size_t n) {
      if (!file.append(bytes, n)) {
        refused =
            Error{ErrorAction::kFixInput, std::format("cannot write '{}': {}.", part.string(), errno_text(errno))};
        return false;
      }
      done += n;
      count_received(n);
      if (options.progress) options.progress(done, total);
      if (options.daily_bytes_max > 0 && received_today() + uncounted_ >= options.daily_bytes_max) return false;
      return options.wait(Nanos::zero());
    };
    const auto piece = hub.download(path, had, etag, options.bytes_per_s_max, begin, data);
    count_received(0);
    if (!ready.empty()) {
      std::error_code ignored;
      fs::remove(part, ignored);
      fs::remove(tag_file, ignored);
      fs::last_write_time(ready, fs::file_time_type::clock::now(), ignored);
      if (verify_slice(ready.string())) return ready;
      fs::remove(ready, ignored);  // damaged since
      return fetch(hub, model, experts, options);
    }
    if (refused) return std::unexpected(*refused);
    if (!options.wait(Nanos::zero())) return retry_later("stopped.");
    if (piece && piece->complete) {
      const std::string name = file_of_etag(read_line(tag_file));
      const Status whole =
          name.empty() || !file.sync() ? retry_later("the file could not be written.") : verify_slice(part.string());
      if (whole) {
        std::error_code error;
        fs::rename(part, folder_ / name, error);
        if (error) return fix_input(std::format("cannot rename '{}': {}.", part.string(), error.message()));
        fs::remove(tag_file, error);
        return folder_ / name;
      }
      options.log(
          std::format("the slice is not what its hashes say ({}); it is fetched again.", whole.error().message));
      file.truncate();
      if (++bad_files >= kBadFilesMax)
        return whole.error().action == ErrorAction::kFixInput ? std::unexpected(whole.error())
                                                              : fix_input(whole.error().message);
      continue;
    }
    if (!piece && piece.error().action == ErrorAction::kFixInput) return std::unexpected(piece.error());
    if (piece && piece->status == 416) {
      // Nothing is left to fetch: it was whole when the process ended, or it is another's.
      const std::string name = file_of_etag(etag);
      std::error_code error;
      if (!name.empty() && verify_slice(part.string())) {
        fs::rename(part, folder_ / name, error);
        if (!error) return folder_ / name;
      }
      if (!file.truncate()) return fix_input(std::format("cannot write '{}': {}.", part.string(), errno_text(errno)));
      continue;
    }
    if (piece && (piece->status == 400 || piece->status == 401 || piece->status == 403 || piece->status == 404))
      return fix_input(piece->error);
    // Bytes that came are progress: the next attempt comes soon.
    if (done > had) backoff = kBackoffMin;
    const std::string why = !piece                  ? piece.error().message
                            : !piece->error.empty() ? piece->error
                                                    : "the line broke off.";
    const Nanos pause = piece && piece->retry_after ? std::max(backoff, *piece->retry_after) : backoff;
    options.log(std::format("download at {} of {} bytes: {} trying again in {} s.", done, total, why,
                            std::chrono::ceil<std::chrono::seconds>(pause).count()));
    if (!options.wait(pause)) return retry_later("stopped.");
    backoff = std::min(backoff * 2, kBackoffMax);
  }
}

}  // namespace kvasir::join
