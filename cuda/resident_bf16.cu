#include "cuda/resident.cuh"

namespace jax_scan {
template cudaError_t launch_resident<BFloat16>(const Problem&, const ResidentPlan&, void*,
                                               cudaStream_t);
}  // namespace jax_scan
