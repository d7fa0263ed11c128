#include "cuda/resident.cuh"

namespace jax_scan {
template cudaError_t launch_resident<Float16>(const Problem&, const ResidentPlan&, void*,
                                              cudaStream_t);
}  // namespace jax_scan
