#include "cuda/walked.cuh"

namespace jax_scan {

template cudaError_t launch_walked<float, float, 1>(const Problem&, cudaStream_t);
template cudaError_t launch_walked<float, float, 4>(const Problem&, cudaStream_t);
template cudaError_t launch_walked<Float16, Float16, 1>(const Problem&, cudaStream_t);
template cudaError_t launch_walked<Float16, Float16, 2>(const Problem&, cudaStream_t);
template cudaError_t launch_walked<BFloat16, BFloat16, 1>(const Problem&, cudaStream_t);
template cudaError_t launch_walked<BFloat16, BFloat16, 2>(const Problem&, cudaStream_t);
template cudaError_t launch_walked<float, BFloat16, 1>(const Problem&, cudaStream_t);
template cudaError_t launch_walked<float, BFloat16, 2>(const Problem&, cudaStream_t);
template cudaError_t launch_walked<double, double, 1>(const Problem&, cudaStream_t);
template cudaError_t launch_walked<double, double, 2>(const Problem&, cudaStream_t);
template cudaError_t launch_walked<Complex64, Complex64, 1>(const Problem&, cudaStream_t);
template cudaError_t launch_walked<Complex64, Complex64, 2>(const Problem&, cudaStream_t);

}  // namespace jax_scan
