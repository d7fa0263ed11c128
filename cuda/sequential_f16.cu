#include "cuda/sequential.cuh"

namespace jax_scan {
template cudaError_t launch_sequential<Float16, Float16, Float16>(const Problem&,
                                                                  const SequentialPlan&, void*,
                                                                  cudaStream_t);
}  // namespace jax_scan
