#include "cuda/boxed.cuh"

namespace jax_scan {
template cudaError_t launch_boxed<Float16, Float16, Float16>(const Problem&, const BoxedPlan&,
                                                             void*, cudaStream_t);
}  // namespace jax_scan
