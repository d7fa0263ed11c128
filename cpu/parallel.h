// Runs independent items on a pool's threads and the caller's, without ever waiting for the pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace jax_scan::cpu {

// Calls item(0) ... item(count - 1), started in this order, on the calling thread and up to
// `helpers` tasks given to schedule(task). The caller claims items like any helper and waits only
// for items that a running thread has claimed: a helper that the pool starts late, or after the
// call, finds nothing left. So this ends on a pool whose threads are all busy, and when called from
// one of them.
template <class Schedule, class Item>
void parallel_for(int64_t count, int64_t helpers, Schedule&& schedule, Item&& item) {
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> finished{0};
  };
  if (helpers > count - 1) helpers = count - 1;
  if (helpers <= 0) {
    for (int64_t k = 0; k < count; ++k) item(k);
    return;
  }
  const auto state = std::make_shared<State>();
  // `body` lives on the caller's stack; it is used for claimed items only, and the caller outlives
  // those.
  const auto work = [count, body = &item](State& shared) {
    for (;;) {
      const int64_t k = shared.next.fetch_add(1, std::memory_order_relaxed);
      if (k >= count) return;
      (*body)(k);
      if (shared.finished.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
        shared.finished.notify_all();
      }
    }
  };
  try {
    for (int64_t h = 0; h < helpers; ++h) schedule([state, work] { work(*state); });
  } catch (...) {
    // No memory for another task: those that are under way do it, and `body` must outlive them.
  }
  work(*state);
  for (;;) {
    const int64_t finished = state->finished.load(std::memory_order_acquire);
    if (finished == count) return;
    state->finished.wait(finished, std::memory_order_acquire);
  }
}

}  // namespace jax_scan::cpu
