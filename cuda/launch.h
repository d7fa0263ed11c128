// The CUDA kernels' host interface. No allocation, no synchronisation: everything is queued on the
// given stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/problem.h"
#include "cuda/plan.h"

namespace jax_scan {

// Queues the whole of one call. `workspace` has at least tile(...).bytes.
cudaError_t launch(const Problem& problem, void* workspace, cudaStream_t stream);

// What a launch needs to know of the GPU.
struct Device {
  int multiprocessors = 0;
  int shared_bytes = 0;  // the most that one block can have
  int capability_major = 0;
};

// One path each, instantiated per type of the state, or of the operands, in its own file.
template <class S>
cudaError_t launch_lookback(const Problem& problem, const Tiling& tiling, const Device& device,
                            void* workspace, cudaStream_t stream);

template <class A, class B, class H>
cudaError_t launch_sequential(const Problem& problem, const SequentialPlan& plan,
                              cudaStream_t stream);

}  // namespace jax_scan
