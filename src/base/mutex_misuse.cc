// Must not compile with clang (CMakeLists.txt tries): a guarded member is read without its lock.
#include "base/mutex.h"

namespace kvasir {

class Counter {
 public:
#ifdef KVASIR_WITH_THE_LOCK
  int read() {
    const MutexLock lock(mutex_);
    return n_;
  }
#else
  int read() { return n_; }
#endif

 private:
  Mutex mutex_;
  int n_ KVASIR_GUARDED_BY(mutex_) = 0;
};

int read_it() { return Counter().read(); }

}  // namespace kvasir
