// What one block of time hands to the next: the state of each channel, and the sums so far. And who
// has which block.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jax_scan::cpu {

// Blocks are numbered in the order of the walk, and claimed in it.
class Claims {
 public:
  // Before a thread's first claim.
  void enter() { threads_.fetch_add(1, std::memory_order_relaxed); }
  // The next block that nobody has, or kNone: where other processes want the cores too, blocks wait
  // for the one whose thread has no core just then, and threads leave until one does the rest.
  static constexpr int64_t kNone = INT64_MAX;
  int64_t claim() {
    if (late_.load(std::memory_order_relaxed) >= kPatience) {
      if (threads_.fetch_sub(1, std::memory_order_relaxed) > 1) return kNone;
      threads_.fetch_add(1, std::memory_order_relaxed);
    }
    return claimed_.fetch_add(1, std::memory_order_relaxed);
  }
  // A thread has waited for more than a millisecond.
  void count_late() { late_.fetch_add(1, std::memory_order_relaxed); }

 private:
  static constexpr int64_t kPatience = 2;
  alignas(64) std::atomic<int64_t> claimed_{0};
  std::atomic<int64_t> threads_{0};
  std::atomic<int64_t> late_{0};
};

// Whoever has block n waits for what block n - 1 has left, and leaves what block n + 1 takes: so
// there is one writer at a time.
class Handoff {
 public:
  Handoff() = default;
  Handoff(Claims* claims, void* states, void* sums)
      : claims_(claims), states_(states), sums_(sums) {}
  void set(Claims* claims, void* states, void* sums) {
    claims_ = claims;
    states_ = states;
    sums_ = sums;
  }

  bool has_states(int64_t block) const {
    return states_of_.load(std::memory_order_acquire) == block;
  }
  // The values that block n starts from, to be replaced by those that it ends with.
  template <class S>
  S* take_states(int64_t block) {
    wait_until(states_of_, block);
    return static_cast<S*>(states_);
  }
  void leave_states(int64_t block) { leave(states_of_, block); }

  template <class S>
  S* take_sums(int64_t block) {
    wait_until(sums_of_, block);
    return static_cast<S*>(sums_);
  }
  void leave_sums(int64_t block) { leave(sums_of_, block); }

 private:
  // Short, for the block before is being worked on: its thread claimed it earlier.
  void wait_until(std::atomic<int64_t>& reached, int64_t block) {
    for (int spins = 0; spins < 1000; ++spins) {
      if (reached.load(std::memory_order_acquire) == block) return;
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    for (int64_t now; (now = reached.load(std::memory_order_acquire)) != block;) {
      reached.wait(now, std::memory_order_acquire);
    }
    // No block takes so long, not even one that meets its memory for the first time.
    if (Clock::now() - begin > std::chrono::milliseconds(1)) claims_->count_late();
  }
  static void leave(std::atomic<int64_t>& reached, int64_t block) {
    reached.store(block + 1, std::memory_order_release);
    reached.notify_all();
  }

  // On cache lines of their own, for one thread waits for what another is about to write.
  alignas(64) std::atomic<int64_t> states_of_{0};  // the block that may take them
  alignas(64) std::atomic<int64_t> sums_of_{0};
  Claims* claims_ = nullptr;
  void* states_ = nullptr;
  void* sums_ = nullptr;
};

}  // namespace jax_scan::cpu
