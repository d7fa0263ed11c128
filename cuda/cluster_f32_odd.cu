#include "cuda/cluster.cuh"

namespace jax_scan {
template cudaError_t launch_cluster<float, float, float, chained::Rows<1>, 8>(const Problem&,
                                                                              const ClusterPlan&,
                                                                              cudaStream_t);
}  // namespace jax_scan
