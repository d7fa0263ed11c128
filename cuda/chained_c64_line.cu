#include "cuda/chained.cuh"

namespace jax_scan {
template cudaError_t launch_chained<Complex64, Complex64, Complex64, chained::Line>(const Problem&,
                                                                                    const Device&,
                                                                                    void*,
                                                                                    cudaStream_t);
}  // namespace jax_scan
