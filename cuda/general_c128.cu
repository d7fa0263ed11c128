#include "cuda/general.cuh"

namespace jax_scan {
template cudaError_t launch_general<Complex128>(const Problem&, const Device&, void*, cudaStream_t);
}  // namespace jax_scan
