#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/mutex.h"

namespace kvasir::plugin {

// Files that are replaced by a new state now and then, by a thread, and by a last one at the end of the
// process, while that thread may be in the middle of it. Any thread may call both.
class StateFiles {
 public:
  struct File {
    std::string path;
    std::function<std::string()> text;
  };
  explicit StateFiles(std::vector<File> files) : files_(std::move(files)) {}

  void write();
  // Stays: write() does nothing from then on.
  void write_last();

 private:
  void write_all() KVASIR_REQUIRES(mutex_);

  const std::vector<File> files_;
  Mutex mutex_;  // two at once would share the file beside it that becomes the new one
  bool ended_ KVASIR_GUARDED_BY(mutex_) = false;
};

}  // namespace kvasir::plugin
