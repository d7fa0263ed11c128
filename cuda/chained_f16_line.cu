#include "cuda/chained.cuh"

namespace jax_scan {
template cudaError_t launch_chained<Float16, Float16, Float16, chained::Line>(const Problem&,
                                                                              const Device&, void*,
                                                                              cudaStream_t);
}  // namespace jax_scan
