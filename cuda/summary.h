// What a run of steps is as a whole: the map s -> A s + H from the state before it to the one after
// it. Host interface and plan; nothing here depends on the GPU, so that the workspace can be sized
// when JAX lowers a call.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/problem.h"
#include "cuda/plan.h"

namespace jax_scan {

inline constexpr int kMostPrefixes = 16;

// scan       s <- a s + x
// cotangent  s <- a (x + s)
// A reset takes s for zero: x and 0 are left. Steps are counted in the order of the walk.
//
// A channel forgets within its last prefix[k] steps if the product of their factors is so small
// that no finite state before them makes a difference (Bound in summary.cu). Then A is zero, and H
// is what these steps make of zero; what lies before them is not read.
struct SummaryProblem {
  bool is_cotangent = false;
  DType state = DType::kF32;
  int64_t outer = 0;
  int64_t time = 0;
  int64_t inner = 0;
  bool descending = false;  // the walk is from the last time to the first
  Input a, x, reset;        // reset may be absent
  int prefixes = 0;
  int64_t prefix[kMostPrefixes] = {};  // increasing
  void* product = nullptr;             // A, (outer, inner), of the state's dtype
  void* result = nullptr;              // H, likewise
};

// There are kernels for these types of a and x and so many steps.
constexpr bool has_summary(DType a, DType x, int64_t time) {
  return (a == x || (a == DType::kF32 && byte_size(x) == 2)) && time <= INT32_MAX;
}

// How a call is cut into pieces of time, whose sums of logarithms and maps are in the workspace.
struct SummaryPlan {
  int looks[kMostPrefixes] = {};  // pieces of what a prefix has beyond the one before it
  int64_t first_look[kMostPrefixes + 1] = {};  // the pieces before these
  int64_t pieces = 1;                          // of all of time
  size_t first_offset = 0;                     // after the counters: sums within the first prefix
  size_t sums_offset = 0;                      // of the other prefixes' pieces
  size_t maps_offset = 0;
  size_t bytes = 0;
};

inline constexpr int kSummaryThreads = 256;
inline constexpr int kSummaryLanes = 32;  // threads side by side across channels, at most
// Neighbouring channels that a thread holds where memory allows it.
constexpr int summary_vector(int bytes) { return std::clamp(16 / bytes, 1, 2); }
// Two for each multiprocessor of a large GPU, as many as it holds at a time.
inline constexpr int kSummaryBlocks = 264;

inline SummaryPlan plan_summary(int64_t outer, int64_t time, int64_t inner, DType a, DType x,
                                int prefixes) {
  SummaryPlan plan;
  const int vector = summary_vector(std::max(byte_size(a), byte_size(x)));
  const int64_t wide = outer * divide_up(inner, int64_t{kSummaryLanes} * vector);
  for (int k = 1; k < prefixes; ++k) {
    const int64_t most = int64_t{32} << std::min(k - 1, 3);
    plan.looks[k] = static_cast<int>(std::clamp<int64_t>(kSummaryBlocks / wide, 1, most));
    plan.first_look[k + 1] = plan.first_look[k] + plan.looks[k];
  }
  plan.pieces = std::clamp<int64_t>(kSummaryBlocks / wide, 1, divide_up(time, 256));
  const auto channels = static_cast<size_t>(outer) * static_cast<size_t>(inner);
  const auto counters = static_cast<size_t>(outer * divide_up(inner, kSummaryLanes));
  plan.first_offset = align_up(counters * sizeof(unsigned));
  plan.sums_offset = align_up(plan.first_offset + channels * 2 * sizeof(float));
  const size_t sums = static_cast<size_t>(plan.first_look[prefixes]) * channels;
  plan.maps_offset = align_up(plan.sums_offset + sums * 2 * sizeof(float));
  const size_t bytes = is_complex(x) ? 48 : 32;  // of a map in double precision
  plan.bytes = plan.maps_offset + static_cast<size_t>(plan.pieces) * channels * bytes;
  return plan;
}

// Queues the whole of one call. `workspace` has plan_summary(...).bytes.
cudaError_t launch_summary(const SummaryProblem& problem, void* workspace, cudaStream_t stream);

}  // namespace jax_scan
