#include "cuda/lined.cuh"

namespace jax_scan {
template cudaError_t launch_lined<Complex64>(const Problem&, const LinedPlan&, cudaStream_t);
}  // namespace jax_scan
