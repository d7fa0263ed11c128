#include "cuda/piped.cuh"

namespace jax_scan {
cudaError_t launch_piped(const Problem& problem, const Device& device, void* workspace,
                         cudaStream_t stream) {
  return problem.op == Op::kCotangent
             ? piped::launch_op<Op::kCotangent>(problem, device, workspace, stream)
             : piped::launch_op<Op::kScan>(problem, device, workspace, stream);
}
}  // namespace jax_scan
