// The models in the operator's folder, found again when files come, go or change. A thread
// of its own looks, opens and hashes; the others only ask.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "hub/models/hosted_model.h"

namespace kvasir::hub {

using HostedModelPtr = std::shared_ptr<const HostedModel>;

inline constexpr Nanos kRescanInterval = std::chrono::seconds(5);
inline constexpr std::size_t kModelNameBytesMax = 128;

// "model.gguf" and "model-00001-of-00003.gguf" are both "model"; nullopt for files that are
// not the first part of a model, and for names with other characters than [A-Za-z0-9._-].
std::optional<std::string> model_name_of_file(std::string_view file);

class Catalogue {
 public:
  struct Listener {
    std::function<void(const HostedModelPtr&)> appeared;  // new, or another content
    std::function<void(const std::string& name)> vanished;
    std::function<void(const std::string& line)> log;
  };

  Catalogue(std::filesystem::path folder, std::filesystem::path cache_folder, Listener listener);
  ~Catalogue();

  // Looks once, so that what is there is known on return (not hashed yet), then starts the thread.
  Status start();
  // Looks again at once: someone met a file that has changed.
  void rescan_soon();

  HostedModelPtr find(std::string_view name) const;
  std::vector<HostedModelPtr> list() const;

 private:
  void work();
  void scan();
  void hash(HostedModel& model);
  bool stop_hashing() const;

  const std::filesystem::path folder_, cache_folder_;
  const Listener listener_;
  // Of whoever scans: file -> what was wrong with it.
  std::map<std::string, std::pair<FileIdentity, std::string>> refused_;
  mutable Mutex mutex_;
  Condition wake_;
  bool stopping_ KVASIR_GUARDED_BY(mutex_) = false;
  bool rescan_ KVASIR_GUARDED_BY(mutex_) = false;
  std::map<std::string, std::shared_ptr<HostedModel>, std::less<>> models_ KVASIR_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace kvasir::hub
