#include "cuda/sequential.cuh"

namespace jax_scan {
template cudaError_t launch_sequential<double, double, double>(const Problem&,
                                                               const SequentialPlan&, void*,
                                                               cudaStream_t);
}  // namespace jax_scan
