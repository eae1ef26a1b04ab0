// Mutexes whose use the compiler checks. A member that says KVASIR_GUARDED_BY(mutex_) is touched only under
// that lock, and a function that says KVASIR_REQUIRES(mutex_) is called only under it: clang's -Wthread-safety
// knows, and is an error in the fuzzers' build and ./dev tidy. To other compilers the words are nothing.
// (libstdc++'s own mutexes do not tell clang what they are, hence these.)
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define KVASIR_THREAD_SAFETY(attribute) __attribute__((attribute))
#else
#define KVASIR_THREAD_SAFETY(attribute)
#endif

#define KVASIR_GUARDED_BY(mutex) KVASIR_THREAD_SAFETY(guarded_by(mutex))
// Of a pointer: what it points to.
#define KVASIR_PT_GUARDED_BY(mutex) KVASIR_THREAD_SAFETY(pt_guarded_by(mutex))
// Of a function, after its parameters: to be called with the lock; without it, because it takes it itself.
#define KVASIR_REQUIRES(...) KVASIR_THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define KVASIR_EXCLUDES(...) KVASIR_THREAD_SAFETY(locks_excluded(__VA_ARGS__))

namespace kvasir {

class KVASIR_THREAD_SAFETY(capability("mutex")) Mutex {
 public:
  void lock() KVASIR_THREAD_SAFETY(acquire_capability()) { mutex_.lock(); }
  void unlock() KVASIR_THREAD_SAFETY(release_capability()) { mutex_.unlock(); }

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

// Holds it for a scope. May be let go and taken again in between.
class KVASIR_THREAD_SAFETY(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) KVASIR_THREAD_SAFETY(acquire_capability(mutex)) : lock_(mutex.mutex_) {}
  ~MutexLock() KVASIR_THREAD_SAFETY(release_capability()) = default;
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void lock() KVASIR_THREAD_SAFETY(acquire_capability()) { lock_.lock(); }
  void unlock() KVASIR_THREAD_SAFETY(release_capability()) { lock_.unlock(); }

 private:
  friend class Condition;
  std::unique_lock<std::mutex> lock_;
};

// Waits let the lock go meanwhile, and hold it again when they return. `done` is asked under the lock; a lambda
// says so itself: [this]() KVASIR_REQUIRES(mutex_) { return stopping_; }.
class Condition {
 public:
  template <typename Done>
  void wait(MutexLock& lock, Done done) {
    wake_.wait(lock.lock_, std::move(done));
  }
  // False: the time is over, and it is not done.
  template <typename Rep, typename Period, typename Done>
  bool wait_for(MutexLock& lock, std::chrono::duration<Rep, Period> time, Done done) {
    return wake_.wait_for(lock.lock_, time, std::move(done));
  }
  void notify_one() { wake_.notify_one(); }
  void notify_all() { wake_.notify_all(); }

 private:
  std::condition_variable wake_;
};

}  // namespace kvasir
