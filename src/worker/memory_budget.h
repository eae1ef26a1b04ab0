// Bytes that all connections together may hold for requests. Full means refuse.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

namespace kvasir::worker {

class MemoryBudget {
 public:
  explicit MemoryBudget(std::uint64_t bytes_max) : left_(bytes_max) {}

  // Gives its bytes back when it goes.
  class Share {
   public:
    Share() = default;
    Share(Share&& other) noexcept : budget_(std::exchange(other.budget_, nullptr)), bytes_(other.bytes_) {}
    Share& operator=(Share&& other) noexcept {
      if (this != &other) {
        release();
        budget_ = std::exchange(other.budget_, nullptr);
        bytes_ = other.bytes_;
      }
      return *this;
    }
    ~Share() { release(); }
    explicit operator bool() const { return budget_ != nullptr; }
    std::uint64_t bytes() const { return bytes_; }
    // Gives back all but `bytes`, if it has more.
    void shrink_to(std::uint64_t bytes) {
      if (budget_ && bytes < bytes_) budget_->left_.fetch_add(bytes_ - bytes, std::memory_order_relaxed);
      bytes_ = bytes < bytes_ ? bytes : bytes_;
    }
    // A share of its own for `bytes` of these, which must be there.
    Share split(std::uint64_t bytes) {
      bytes_ -= bytes;
      return {budget_, bytes};
    }

   private:
    friend class MemoryBudget;
    Share(MemoryBudget* budget, std::uint64_t bytes) : budget_(budget), bytes_(bytes) {}
    void release() {
      if (budget_) budget_->left_.fetch_add(bytes_, std::memory_order_relaxed);
      budget_ = nullptr;
    }
    MemoryBudget* budget_ = nullptr;
    std::uint64_t bytes_ = 0;
  };

  std::uint64_t left() const { return left_.load(std::memory_order_relaxed); }

  // An empty share if fewer than `bytes` are left.
  Share take(std::uint64_t bytes) {
    std::uint64_t left = left_.load(std::memory_order_relaxed);
    do {
      if (bytes > left) return {};
    } while (!left_.compare_exchange_weak(left, left - bytes, std::memory_order_relaxed));
    return {this, bytes};
  }

 private:
  std::atomic<std::uint64_t> left_;
};

}  // namespace kvasir::worker
