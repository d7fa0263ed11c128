#include "cuda/lookback.cuh"

namespace jax_scan {
template cudaError_t launch_lookback<Complex128>(const Problem&, const Tiling&, const Device&,
                                                 void*, cudaStream_t);
}  // namespace jax_scan
