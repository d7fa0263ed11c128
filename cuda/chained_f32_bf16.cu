#include "cuda/chained.cuh"

namespace jax_scan {
template cudaError_t launch_chained<float, BFloat16, BFloat16, chained::Rows<4>>(const Problem&,
                                                                                 const Device&,
                                                                                 void*,
                                                                                 cudaStream_t);
}  // namespace jax_scan
