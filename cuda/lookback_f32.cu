#include "cuda/lookback.cuh"

namespace jax_scan {
template cudaError_t launch_lookback<float>(const Problem&, const Tiling&, const Device&, void*,
                                            cudaStream_t);
}  // namespace jax_scan
