// The product of a scan's factors over time, and after how many steps it is nothing. Host interface
// and plan; nothing here depends on the GPU, so that the workspace can be sized when JAX lowers a
// call.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "cuda/plan.h"

namespace jax_scan {

inline constexpr int kMostPrefixes = 16;
inline constexpr int kMostReach = INT32_MAX;

// Factors (outer, time, inner), row-major. A channel's state is forgotten within the k-th prefix,
// the first prefixes[k] steps in the order of the scan, if the product of these steps' factors is
// below the state's smallest normal number. Then its reach is k and its product zero; else its
// reach is the number of prefixes.
struct ProductProblem {
  const void* a = nullptr;
  DType dtype = DType::kF32;
  int64_t outer = 0;
  int64_t time = 0;
  int64_t inner = 0;
  bool reverse = false;  // the scan runs from the last time to the first
  int prefixes = 0;
  int64_t prefix[kMostPrefixes] = {};  // increasing
  float least = 0;  // log2 of what a smaller factor counts as where a product may be nothing
  // What is known of the reach already, (outer, inner): it is no more than that. May be absent.
  const int32_t* most = nullptr;
  void* product = nullptr;    // (outer, inner)
  DType state = DType::kF32;  // its dtype; complex as the factors are
  int32_t* reach = nullptr;   // (outer, inner)
};

// How a call is cut into pieces of time, whose products and sums of logarithms are in the
// workspace.
struct ProductPlan {
  int looks[kMostPrefixes] = {};  // pieces of what a prefix has beyond the one before it
  int64_t first_look[kMostPrefixes + 1] = {};  // the pieces before these
  int64_t pieces = 1;                          // of all of time
  size_t sums_offset = 0;
  size_t products_offset = 0;
  size_t bytes = 0;
};

inline constexpr int kProductThreads = 256;
inline constexpr int kProductLanes = 32;  // threads side by side across channels, at most
// Neighbouring channels that a thread holds where memory allows it.
constexpr int product_vector(int bytes) { return std::clamp(16 / bytes, 1, 4); }
// Three for each multiprocessor of a large GPU, which hold as much in flight as its memory asks
// for: a thread reads 8 or 16 rows at a time.
inline constexpr int kProductBlocks = 384;

inline ProductPlan plan_product(int64_t outer, int64_t time, int64_t inner, DType dtype,
                                int prefixes) {
  ProductPlan plan;
  const int64_t row = int64_t{kProductLanes} * product_vector(byte_size(dtype));
  const int64_t wide = outer * divide_up(inner, row);
  for (int k = 0; k < prefixes; ++k) {
    // The fewer the first one has, the sooner it is known that there is nothing more to do.
    const int64_t most = k == 0 ? 8 : k == 1 ? 32 : 64;
    plan.looks[k] = static_cast<int>(std::clamp<int64_t>(kProductBlocks / wide, 1, most));
    plan.first_look[k + 1] = plan.first_look[k] + plan.looks[k];
  }
  plan.pieces = std::clamp<int64_t>(kProductBlocks / wide, 1, divide_up(time, 256));
  const auto channels = static_cast<size_t>(outer) * static_cast<size_t>(inner);
  const auto counters = static_cast<size_t>(outer * divide_up(inner, kProductLanes));
  plan.sums_offset = align_up(counters * sizeof(unsigned));
  const size_t sums = static_cast<size_t>(plan.first_look[prefixes]) * channels;
  plan.products_offset = align_up(plan.sums_offset + sums * 2 * sizeof(float));
  const size_t bytes = is_complex(dtype) ? 24 : 16;  // a mantissa in double precision, an exponent
  plan.bytes = plan.products_offset + static_cast<size_t>(plan.pieces) * channels * bytes;
  return plan;
}

// Queues the whole of one call. `workspace` has plan_product(...).bytes.
cudaError_t launch_product(const ProductProblem& problem, void* workspace, cudaStream_t stream);

}  // namespace jax_scan
