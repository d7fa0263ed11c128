#include "cuda/boxed.cuh"

namespace jax_scan {
template cudaError_t launch_boxed<double, double, double>(const Problem&, const BoxedPlan&, void*,
                                                          cudaStream_t);
}  // namespace jax_scan
