#include "cuda/lookback.cuh"

namespace jax_scan {
template cudaError_t launch_lookback<Complex64, Complex64, Complex64, lookback::Rows<2>>(
    const Problem&, const Device&, void*, cudaStream_t);
}  // namespace jax_scan
