#include "cuda/sequential.cuh"

namespace jax_scan {
template cudaError_t launch_sequential<Complex64, Complex64, Complex64>(const Problem&,
                                                                        const SequentialPlan&,
                                                                        void*, cudaStream_t);
}  // namespace jax_scan
