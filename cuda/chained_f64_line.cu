#include "cuda/chained.cuh"

namespace jax_scan {
template cudaError_t launch_chained<double, double, double, chained::Line>(const Problem&,
                                                                           const Device&, void*,
                                                                           cudaStream_t);
}  // namespace jax_scan
