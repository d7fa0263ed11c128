#include "cuda/lined.cuh"

namespace jax_scan {
template cudaError_t launch_lined<BFloat16>(const Problem&, const LinedPlan&, cudaStream_t);
}  // namespace jax_scan
