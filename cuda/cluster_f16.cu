#include "cuda/cluster.cuh"

namespace jax_scan {
template cudaError_t launch_cluster<Float16, Float16, Float16, chained::Rows<4>, 8>(
    const Problem&, const ClusterPlan&, cudaStream_t);
}  // namespace jax_scan
