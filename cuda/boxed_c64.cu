#include "cuda/boxed.cuh"

namespace jax_scan {
template cudaError_t launch_boxed<Complex64, Complex64, Complex64>(const Problem&, const BoxedPlan&,
                                                                   void*, cudaStream_t);
}  // namespace jax_scan
