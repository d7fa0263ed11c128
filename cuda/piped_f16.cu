#include "cuda/piped.cuh"

namespace jax_scan {
template cudaError_t launch_piped<Float16, Float16, Float16, 2>(const Problem&, const PipedTiling&,
                                                                void*, cudaStream_t);
template cudaError_t launch_piped<Float16, Float16, Float16, 1>(const Problem&, const PipedTiling&,
                                                                void*, cudaStream_t);
}  // namespace jax_scan
