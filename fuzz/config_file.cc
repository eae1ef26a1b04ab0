// Any bytes as a settings file (KVASIR_CONFIG), and as lists of workers.

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "dispatch/dispatcher.h"
#include "plugin/config.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvasir;
  static const int fd = ::memfd_create("settings", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(fd);
  KVASIR_CHECK(fd >= 0 && ::ftruncate(fd, 0) == 0);
  KVASIR_CHECK(::pwrite(fd, data, size, 0) == static_cast<ssize_t>(size));
  std::vector<std::string> warnings;
  const auto get = [](std::string_view name) -> std::optional<std::string> {
    if (name == "KVASIR_CONFIG") return path;
    return std::nullopt;
  };
  const Result<plugin::Config> config = plugin::load_config(get, {}, warnings);
  if (config) {
    KVASIR_CHECK(config->dispatch.workers.size() <= 1024);
    KVASIR_CHECK(config->dispatch.spot_check >= 0 && config->dispatch.spot_check <= 1);
    for (const dispatch::WorkerAddress& worker : config->dispatch.workers) KVASIR_CHECK(worker.port != 0);
  } else {
    KVASIR_CHECK(!config.error().message.empty());
  }
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto workers = dispatch::parse_workers(text))
    for (const dispatch::WorkerAddress& worker : *workers)
      KVASIR_CHECK(worker.port != 0 && (worker.fingerprint.empty() || worker.fingerprint.size() == 64));
  return 0;
}
