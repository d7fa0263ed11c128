#include "cuda/lookback.cuh"

namespace jax_scan {
template cudaError_t launch_lookback<float, float, float, lookback::Rows<4>>(const Problem&,
                                                                             const Device&, void*,
                                                                             cudaStream_t);
}  // namespace jax_scan
