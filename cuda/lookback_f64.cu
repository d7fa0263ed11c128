#include "cuda/lookback.cuh"

namespace jax_scan {
template cudaError_t launch_lookback<double, double, double, lookback::Rows<2>>(const Problem&,
                                                                                const Device&,
                                                                                void*,
                                                                                cudaStream_t);
}  // namespace jax_scan
