#include "plugin/state_files.h"

#include "base/metrics.h"

namespace kvasir::plugin {

void StateFiles::write() {
  const MutexLock lock(mutex_);
  if (!ended_) write_all();
}

void StateFiles::write_last() {
  const MutexLock lock(mutex_);
  write_all();
  ended_ = true;
}

void StateFiles::write_all() {
  for (const File& file : files_) replace_file(file.path, file.text());
}

}  // namespace kvasir::plugin
