#include "cuda/piped.cuh"

namespace jax_scan {
template cudaError_t launch_piped<double, double, double, 1>(const Problem&, const PipedTiling&,
                                                             void*, cudaStream_t);
}  // namespace jax_scan
