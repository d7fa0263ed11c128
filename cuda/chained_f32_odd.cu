#include "cuda/chained.cuh"

namespace jax_scan {
template cudaError_t launch_chained<float, float, float, chained::Rows<1>>(const Problem&,
                                                                           const Device&, void*,
                                                                           cudaStream_t);
}  // namespace jax_scan
