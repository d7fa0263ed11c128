#include "cuda/piped.cuh"

namespace jax_scan {
template cudaError_t launch_piped<Complex64, Complex64, Complex64, 1>(const Problem&,
                                                                      const PipedTiling&, void*,
                                                                      cudaStream_t);
}  // namespace jax_scan
