// The CUDA kernels' host interface. No allocation, no synchronisation: everything is queued on the
// given stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/problem.h"
#include "cuda/plan.h"

namespace jax_scan {

// kAuto picks the fastest; tests and measurements ask for one by name.
enum class Path {
  kAuto,
  kBoxed,
  kWalked,
  kCluster,
  kSequential,
  kResident,
  kLined,
  kPiped,
  kChained,
  kGeneral
};

// Queues the whole of one call. `workspace` has at least workspace_bytes(...). A path that the
// problem does not fit is cudaErrorNotSupported.
cudaError_t launch(const Problem& problem, void* workspace, cudaStream_t stream,
                   Path path = Path::kAuto);

// Whether the kernels sum da over the runs that the problem asks for. The answer does not depend on
// the GPU or on where operands lie: of pointers it matters only whether they are there.
bool sums_da(const Problem& problem);

// The workspace that a call needs.
size_t workspace_bytes(const Problem& problem);

// What a launch needs to know of the GPU.
struct Device {
  int multiprocessors = 0;
  int shared_bytes = 0;  // the most that one block can have
  int multiprocessor_shared_bytes = 0;
  int capability_major = 0;
  int cooperative = 0;  // kernels whose blocks all run at a time can be launched
};

// One path each, instantiated per type of the operands, or of the state, in its own file.

template <class A, class B, class H>
cudaError_t launch_sequential(const Problem& problem, const SequentialPlan& plan, void* workspace,
                              cudaStream_t stream);

// Scan and cotangent.
template <class A, class B, class H>
cudaError_t launch_boxed(const Problem& problem, const BoxedPlan& plan, void* workspace,
                         cudaStream_t stream);

// Scan and cotangent of operands that lie in full and contiguous, time last.
template <class T>
cudaError_t launch_lined(const Problem& problem, const LinedPlan& plan, cudaStream_t stream);

// Scan and cotangent of any strides; a thread has V channels, for V > 1 neighbours in memory.
template <class A, class B, int V>
cudaError_t launch_walked(const Problem& problem, cudaStream_t stream);

namespace chained {

// Neighbouring channels are neighbours in memory: a thread holds kChannels of them at each step,
// a warp rows of them.
template <int kChannels_>
struct Rows {
  static constexpr int kChannels = kChannels_;
  static constexpr bool kLine = false;
};

// Neighbouring times are neighbours in memory: a thread holds one channel, a warp a line of time.
struct Line {
  static constexpr int kChannels = 1;
  static constexpr bool kLine = true;
};

}  // namespace chained

// Scan and cotangent.
template <class A, class B, class H, class Layout>
cudaError_t launch_chained(const Problem& problem, const Device& device, void* workspace,
                           cudaStream_t stream);

// Scan and cotangent; a thread holds kSteps steps.
template <class A, class B, class H, class Layout, int kSteps>
cudaError_t launch_cluster(const Problem& problem, const ClusterPlan& plan, cudaStream_t stream);

// Scan and cotangent of operands that lie in full and contiguous.
template <class T>
cudaError_t launch_resident(const Problem& problem, const ResidentPlan& plan, void* workspace,
                            cudaStream_t stream);

// Scan and cotangent of operands that lie in full and contiguous, but for a; a thread holds kVector
// channels.
template <class A, class B, class H, int kVector>
cudaError_t launch_piped(const Problem& problem, const PipedTiling& tiling, void* workspace,
                         cudaStream_t stream);

template <class S>
cudaError_t launch_general(const Problem& problem, const Device& device, void* workspace,
                           cudaStream_t stream);

}  // namespace jax_scan
