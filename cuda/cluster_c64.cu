#include "cuda/cluster.cuh"

namespace jax_scan {
template cudaError_t launch_cluster<Complex64, Complex64, Complex64, chained::Rows<2>, 4>(
    const Problem&, const ClusterPlan&, cudaStream_t);
}  // namespace jax_scan
