#include "cuda/piped.cuh"

namespace jax_scan {
template cudaError_t launch_piped<float, BFloat16, BFloat16, 2>(const Problem&, const PipedTiling&,
                                                                void*, cudaStream_t);
template cudaError_t launch_piped<float, BFloat16, BFloat16, 1>(const Problem&, const PipedTiling&,
                                                                void*, cudaStream_t);
}  // namespace jax_scan
