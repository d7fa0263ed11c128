#include "cuda/sequential.cuh"

namespace jax_scan {
template cudaError_t launch_sequential<float, BFloat16, BFloat16>(const Problem&,
                                                                  const SequentialPlan&, void*,
                                                                  cudaStream_t);
}  // namespace jax_scan
