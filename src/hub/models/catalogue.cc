#include "hub/models/catalogue.h"

#include <algorithm>
#include <format>
#include <set>

#include "hub/store/private_folder.h"

namespace kvasir::hub {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kSuffix = ".gguf";

std::optional<FileIdentity> look_at(const fs::path& path) {
  struct stat info{};
  if (::stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) return std::nullopt;
  return identity_of(info);
}

}  // namespace

std::optional<std::string> model_name_of_file(std::string_view file) {
  if (!file.ends_with(kSuffix)) return std::nullopt;
  std::string name(file.substr(0, file.size() - kSuffix.size()));
  if (const auto part = gguf::PartName::parse(file)) {
    if (part->part != 1) return std::nullopt;
    name = part->prefix;
  }
  const auto allowed = [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
  };
  if (name.empty() || name[0] == '.' || name.size() > kModelNameBytesMax || !std::ranges::all_of(name, allowed))
    return std::nullopt;
  return name;
}

Catalogue::Catalogue(fs::path folder, fs::path cache_folder, Listener listener)
    : folder_(std::move(folder)), cache_folder_(std::move(cache_folder)), listener_(std::move(listener)) {}

Catalogue::~Catalogue() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Status Catalogue::start() {
  std::error_code error;
  if (!fs::is_directory(folder_, error))
    return fix_input(std::format("'{}' is not a folder; --models names the folder of GGUF files.", folder_.string()));
  KVASIR_TRY(make_private_folder(cache_folder_));
  scan();
  thread_ = std::thread([this] { work(); });
  return {};
}

void Catalogue::rescan_soon() {
  {
    const MutexLock lock(mutex_);
    rescan_ = true;
  }
  wake_.notify_all();
}

HostedModelPtr Catalogue::find(std::string_view name) const {
  const MutexLock lock(mutex_);
  const auto found = models_.find(name);
  return found == models_.end() ? nullptr : found->second;
}

std::vector<HostedModelPtr> Catalogue::list() const {
  const MutexLock lock(mutex_);
  std::vector<HostedModelPtr> out;
  for (const auto& [name, model] : models_) out.push_back(model);
  return out;
}

void Catalogue::work() {
  while (true) {
    std::vector<std::shared_ptr<HostedModel>> unfinished;
    {
      const MutexLock lock(mutex_);
      if (stopping_) return;
      for (const auto& [name, model] : models_)
        if (!model->ready()) unfinished.push_back(model);
    }
    for (const auto& model : unfinished) hash(*model);
    MutexLock lock(mutex_);
    if (unfinished.empty())
      wake_.wait_for(lock, kRescanInterval, [this]() KVASIR_REQUIRES(mutex_) { return stopping_ || rescan_; });
    rescan_ = false;
    if (stopping_) return;
    lock.unlock();
    scan();
  }
}

bool Catalogue::stop_hashing() const {
  const MutexLock lock(mutex_);
  return stopping_ || rescan_;
}

void Catalogue::hash(HostedModel& model) {
  const fs::path cache = cache_folder_ / (model.name() + ".hashes");
  if (model.load_hashes(cache)) return;
  if (!model.compute_hashes([&] { return stop_hashing(); })) return;
  if (const Status saved = model.save_hashes(cache); !saved) listener_.log(saved.error().message);
  listener_.log(std::format("model '{}': {} slabs hashed, ready to be served.", model.name(), model.slab_count()));
}

void Catalogue::scan() {
  std::error_code error;
  std::set<std::string> seen;
  std::vector<std::string> files;
  for (fs::directory_iterator entry(folder_, error), end; !error && entry != end; entry.increment(error))
    files.push_back(entry->path().filename().string());
  if (error) {
    listener_.log(std::format("the models folder cannot be read: {}; models stay as they are.", error.message()));
    return;
  }
  std::ranges::sort(files);
  for (const std::string& file : files) {
    const auto name = model_name_of_file(file);
    const auto identity = look_at(folder_ / file);
    if (!name || !identity || !seen.insert(*name).second) continue;
    std::shared_ptr<HostedModel> known;
    {
      const MutexLock lock(mutex_);
      if (const auto found = models_.find(*name); found != models_.end()) known = found->second;
    }
    if (known != nullptr) {
      bool same = true;
      for (std::size_t i = 0; same && i < known->identity().size(); ++i)
        same = look_at(folder_ / known->moe().files().files()[i].name()) == known->identity()[i];
      if (same) continue;
    }
    const auto refused = refused_.find(file);
    if (known == nullptr && refused != refused_.end() && refused->second.first == *identity) continue;
    auto opened = HostedModel::open(folder_, file, *name);
    if (!opened) {
      // While it is being copied here it is not a whole file: it is looked at again as it grows.
      if (refused == refused_.end() || refused->second.second != opened.error().message)
        listener_.log(std::format("'{}' is not served: {}", file, opened.error().message));
      refused_[file] = {*identity, opened.error().message};
      seen.erase(*name);
      continue;
    }
    refused_.erase(file);
    {
      const MutexLock lock(mutex_);
      models_.insert_or_assign(*name, *opened);
    }
    listener_.appeared(*opened);
  }
  std::vector<std::string> gone;
  {
    const MutexLock lock(mutex_);
    for (const auto& [name, model] : models_)
      if (!seen.contains(name)) gone.push_back(name);
    for (const std::string& name : gone) models_.erase(name);
  }
  for (const std::string& name : gone) listener_.vanished(name);
}

}  // namespace kvasir::hub
