// A few threads that take part in a piece of work of the thread that owns them.
//
// Made for pieces of some tens of microseconds and more: whoever wakes late finds less left
// to do and holds nobody up, because the owner waits only for those that did begin.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace kvasir::ffn {

class Crew {
 public:
  explicit Crew(std::uint32_t n_helpers);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  std::uint32_t n_helpers() const { return static_cast<std::uint32_t>(threads_.size()); }

  // Calls work(0) on this thread, and meanwhile work(i) on at most `n_helpers` others, i from 1
  // to n_helpers(), each at most once. Any of those may not happen at all, so `work` takes what
  // there is to do from a common store. Returns when all have returned. One thread at a time.
  template <typename Work>
  void run(std::uint32_t n_helpers, Work&& work) {
    begin(n_helpers, [](void* context, std::uint32_t i) { (*static_cast<std::remove_reference_t<Work>*>(context))(i); }, &work);
    work(std::uint32_t{0});
    end();
  }

 private:
  using Call = void (*)(void* context, std::uint32_t i);
  void begin(std::uint32_t n_helpers, Call call, void* context);
  void end();
  void help(std::uint32_t i);
  void wait_for_change(std::uint32_t seen) const;

  // How many may still begin (high half) and have not returned (low half).
  std::atomic<std::uint32_t> places_ = 0;
  std::atomic<std::uint32_t> epoch_ = 0;  // of the work; helpers sleep on it
  std::atomic<bool> stop_ = false;
  Call call_ = nullptr;  // call_ and context_: written before places_ opens, read by those that got one
  void* context_ = nullptr;
  std::vector<std::thread> threads_;
};

}  // namespace kvasir::ffn
