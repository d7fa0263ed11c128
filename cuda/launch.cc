#include "cuda/launch.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace jax_scan {
namespace {

// The types of a, b and h; what an operation doesn't have takes the type of what it has.
StreamTypes stream_types(const Problem& p) {
  const DType streamed_h = p.x.data ? p.x.dtype : p.h.dtype;
  if (p.op == Op::kCotangent) {
    return {p.a.dtype, p.y.data ? p.y.dtype : streamed_h, streamed_h};
  }
  const DType streamed_b = p.x.data ? p.x.dtype : p.y.dtype;
  return {p.a.dtype, streamed_b, p.y.data ? p.y.dtype : streamed_b};
}

// The dtype of the state that a 16-bit or wider type of operand asks for.
DType state_of(DType t) { return byte_size(t) == 2 ? DType::kF32 : t; }

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// The operand's rows can be copied in 16-byte pieces.
bool in_pieces(const Problem& p, const Input& in) {
  const int64_t vector = 16 / byte_size(in.dtype);
  if (!aligned(in.data) || !in.at.inner_contiguous() || p.inner % vector != 0 ||
      in.at.time_stride % vector != 0) {
    return false;
  }
  for (int k = 0; k < in.at.outer_axes; ++k) {
    if (in.at.outer[k].stride % vector != 0) return false;
  }
  return true;
}

Copies copies(const Problem& p, const Input& in) {
  if (in_pieces(p, in)) return Copies::kPieces;
  const int size = byte_size(in.dtype);
  int64_t elements = in.at.time_stride == 0 ? 1 : p.time;
  for (int k = 0; k < in.at.outer_axes; ++k) {
    if (in.at.outer[k].stride != 0) elements *= in.at.outer[k].size;
  }
  for (int k = 0; k < in.at.inner_axes; ++k) {
    if (in.at.inner[k].stride != 0) elements *= in.at.inner[k].size;
  }
  const bool words =
      reinterpret_cast<uintptr_t>(in.data) % std::max(size, 4) == 0 && elements * size % 4 == 0;
  return words ? Copies::kWords : Copies::kNone;
}

// A warp's threads read neighbouring channels: these must share at least sectors of memory.
bool has_rows(const Problem& p, StreamTypes types) { return p.inner * byte_size(types.b) >= 32; }

// All that is there has the types that the kernel is compiled for.
bool fits_sequential(const Problem& p, StreamTypes types) {
  const bool cotangent = p.op == Op::kCotangent;
  const auto is = [](const auto& array, DType type) { return !array.data || array.dtype == type; };
  constexpr int64_t kMost = INT32_MAX / 2;
  return p.time <= kMost && p.channels() <= kMost && is(p.a, types.a) &&
         is(p.x, cotangent ? types.h : types.b) && is(p.da, types.a) && is(p.h, types.h) &&
         is(p.y, cotangent ? types.b : types.h) &&
         (p.da_over_time || p.da_over_runs() || is(p.da_out, types.a));
}

Traffic sequential_traffic(const Problem& p) {
  Traffic traffic;
  for (const Input* in : {&p.a, &p.x, &p.da, &p.h}) {
    if (!in->data || in->at.time_stride == 0) continue;
    // What is the same for all outer indices comes from the L2 cache.
    if (p.outer > 1 && in->at.outer_axes == 1 && in->at.outer[0].stride == 0) continue;
    if (in_pieces(p, *in)) traffic.copied += byte_size(in->dtype);
    if (in->at.inner_contiguous()) traffic.read += byte_size(in->dtype);
  }
  if (p.y.data) traffic.written += byte_size(p.y.dtype);
  if (p.da_out.data && !p.da_over_time && !p.da_over_runs()) {
    traffic.written += byte_size(p.da_out.dtype);
  }
  return traffic;
}

// Kernels for operands of certain types, where there are any.
struct Kernels {
  using Piped = cudaError_t (*)(const Problem&, const PipedTiling&, void*, cudaStream_t);
  cudaError_t (*sequential)(const Problem&, const SequentialPlan&, void*, cudaStream_t) = nullptr;
  cudaError_t (*boxed)(const Problem&, const BoxedPlan&, void*, cudaStream_t) = nullptr;
  Piped piped = nullptr;
  Piped piped_pairs = nullptr;  // a thread holds two channels
  cudaError_t (*resident)(const Problem&, const ResidentPlan&, void*, cudaStream_t) = nullptr;
  cudaError_t (*lined)(const Problem&, const LinedPlan&, cudaStream_t) = nullptr;
  cudaError_t (*walked)(const Problem&, cudaStream_t) = nullptr;
  cudaError_t (*walked_vectors)(const Problem&, cudaStream_t) = nullptr;
  int vector = 1;  // channels of its threads
};

template <class A, class B>
Kernels kernels() {
  Kernels k;
  k.sequential = launch_sequential<A, B, B>;
  k.boxed = launch_boxed<A, B, B>;
  k.piped = launch_piped<A, B, B, 1>;
  if constexpr (sizeof(B) == 2) k.piped_pairs = launch_piped<A, B, B, 2>;
  if constexpr (std::is_same_v<A, B>) {
    k.lined = launch_lined<A>;
    if constexpr (sizeof(A) <= 4) k.resident = launch_resident<A>;
  }
  constexpr int kVector = walked_vector(sizeof(B));
  k.walked = launch_walked<A, B, 1>;
  k.walked_vectors = launch_walked<A, B, kVector>;
  k.vector = kVector;
  return k;
}

Kernels kernels_for(StreamTypes t) {
  if (t.b != t.h) return {};
  if (t.a != t.b) {
    const bool mixed = t.a == DType::kF32 && t.b == DType::kBF16;
    return mixed ? kernels<float, BFloat16>() : Kernels{};
  }
  switch (t.a) {
    case DType::kF32:
      return kernels<float, float>();
    case DType::kF16:
      return kernels<Float16, Float16>();
    case DType::kBF16:
      return kernels<BFloat16, BFloat16>();
    case DType::kF64:
      return kernels<double, double>();
    case DType::kC64:
      return kernels<Complex64, Complex64>();
    case DType::kC128:
      break;
  }
  return {};
}

bool same_for_inner(const Input& in) {
  return in.at.inner_axes == 0 || (in.at.inner_axes == 1 && in.at.inner[0].stride == 0);
}
bool outer_shares(const Input& in) { return in.at.outer_axes == 1 && in.at.outer[0].stride == 0; }

// The operand's outer indices lie `stride` apart, or share it.
bool outer_apart(const Problem& p, const Input& in, int64_t stride) {
  return p.outer == 1 || (in.at.outer_axes == 1 && in.at.outer[0].stride == stride);
}

// Rows that lie in 16-byte pieces without gaps.
bool whole_rows(const Problem& p, const Input& in) {
  return in_pieces(p, in) && in.at.time_stride == p.inner && in.at.inner_axes == 1;
}

BoxedA way_of_a(const Problem& p) {
  if (!p.a.data) return BoxedA::kNone;
  if (p.a.at.time_stride == 0) return BoxedA::kFixed;
  const auto apart = [&](int64_t stride) {
    return outer_shares(p.a) || outer_apart(p, p.a, stride);
  };
  if (whole_rows(p, p.a) && apart(p.time * p.inner)) return BoxedA::kBoxes;
  const bool runs = aligned(p.a.data) && p.time * byte_size(p.a.dtype) % 16 == 0 &&
                    p.a.at.time_stride == 1 && same_for_inner(p.a) && apart(p.time);
  return runs ? BoxedA::kRuns : BoxedA::kNone;
}

// Whole arrays but for a, resets and sums of da as boxed.cuh has them, and results that are written
// two 16-bit channels at a time.
bool fits_boxed(const Problem& p, StreamTypes types) {
  const auto whole = [&](const Input& in) {
    return !in.data || (whole_rows(p, in) && outer_apart(p, in, p.time * p.inner));
  };
  const int vector = channels_of_lane(byte_size(types.b));
  const auto in_packs = [&](const Output& out) {
    return reinterpret_cast<uintptr_t>(out.data) % (vector * byte_size(out.dtype)) == 0;
  };
  const bool sums = da_sum(p) == DaSum::kNone ||
                    (da_sum(p) == DaSum::kInner && p.da_inner_run % (32 * vector) == 0);
  return p.op != Op::kTangent && p.x.data && way_of_a(p) != BoxedA::kNone && whole(p.x) &&
         whole(p.h) && (!p.reset.data || same_for_inner(p.reset)) && in_packs(p.y) &&
         (in_packs(p.da_out) || p.da_over_time || p.da_over_runs()) && sums;
}

// What boxed.cuh copies to slots, and what of it comes from memory.
Traffic boxed_traffic(const Problem& p) {
  Traffic traffic;
  const auto add = [&](const Input& in, bool cached) {
    const int bytes = in.data ? byte_size(in.dtype) : 0;
    traffic.copied += bytes;
    if (!cached) traffic.read += bytes;
  };
  if (way_of_a(p) == BoxedA::kBoxes) add(p.a, p.outer > 1 && outer_shares(p.a));
  add(p.x, false);
  add(p.h, false);
  traffic.written = sequential_traffic(p).written;
  return traffic;
}

// The problem can run in sequential.cuh, however slowly.
bool is_sequential(const Problem& p, StreamTypes types) {
  return kernels_for(types).sequential && state_of(types.b) == p.state && fits_sequential(p, types);
}

cudaError_t current_device(Device& device) {
  int ordinal = 0;
  cudaError_t error = cudaGetDevice(&ordinal);
  const auto ask = [&](cudaDeviceAttr attribute, int& value) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, ordinal);
  };
  ask(cudaDevAttrMultiProcessorCount, device.multiprocessors);
  ask(cudaDevAttrMaxSharedMemoryPerBlockOptin, device.shared_bytes);
  ask(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device.multiprocessor_shared_bytes);
  ask(cudaDevAttrComputeCapabilityMajor, device.capability_major);
  ask(cudaDevAttrCooperativeLaunch, device.cooperative);
  // Older drivers have no such kernels in the bodies of a graph's conditionals, where XLA may put a
  // call: https://github.com/NVIDIA-NeMo/Speech/pull/9869
  int driver = 0;
  if (error == cudaSuccess) error = cudaDriverGetVersion(&driver);
  if (driver < 12060) device.cooperative = 0;
  return error;
}

// The operand's elements at one time and neighbouring channels, `vector` of them, can be copied in
// one piece.
bool in_vectors(const Problem& p, const Input& in, DType expected, int vector) {
  if (!in.data) return true;
  if (in.dtype != expected || in.at.outer_axes > 1 || in.at.inner_axes > 1) return false;
  if (vector == 1) return true;
  const auto bytes = static_cast<uintptr_t>(vector * byte_size(in.dtype));
  if (reinterpret_cast<uintptr_t>(in.data) % bytes != 0 || !in.at.inner_contiguous() ||
      p.inner % vector != 0 || in.at.time_stride % vector != 0) {
    return false;
  }
  for (int k = 0; k < in.at.outer_axes; ++k) {
    if (in.at.outer[k].stride % vector != 0) return false;
  }
  return true;
}

bool in_lines(const Input& in) { return !in.data || in.at.time_stride == 1; }

// Types that have kernels of chained.cuh, and how many channels a thread of theirs holds.
struct ChainedKernel {
  cudaError_t (*launch)(const Problem&, const Device&, void*, cudaStream_t) = nullptr;
  int vector = 1;
  bool line = false;
};

bool fits(const Problem& p, StreamTypes types, int vector, bool line) {
  const bool cotangent = p.op == Op::kCotangent;
  const DType x = cotangent ? types.h : types.b, y = cotangent ? types.b : types.h;
  const auto aligned_to = [&](const Output& out) {
    return reinterpret_cast<uintptr_t>(out.data) % (vector * byte_size(out.dtype)) == 0;
  };
  const auto all = [&](auto&& f) { return f(p.a, types.a) && f(p.x, x) && f(p.h, types.h); };
  const bool outputs =
      (!p.y.data || (p.y.dtype == y && aligned_to(p.y))) &&
      (!p.da_out.data || p.da_over_time || (p.da_out.dtype == types.a && aligned_to(p.da_out)));
  if (!outputs || !p.x.data) return false;
  if (p.inner == 1 && (!line || p.time < kShortestLine)) return false;
  if (line) {
    return p.inner == 1 &&
           all([&](const Input& in, DType t) { return in_lines(in) && in_vectors(p, in, t, 1); });
  }
  return all([&](const Input& in, DType t) { return in_vectors(p, in, t, vector); });
}

template <class A, class B, class H, class Layout>
ChainedKernel chained_kernel() {
  return {launch_chained<A, B, H, Layout>, Layout::kChannels, Layout::kLine};
}

// The kernel of chained.cuh that the problem fits, if there is one.
ChainedKernel chained_for(const Problem& p, StreamTypes t) {
  using chained::Line;
  using chained::Rows;
  if (p.op == Op::kTangent || state_of(t.b) != p.state || t.b != t.h) return {};
  const auto first = [&](std::initializer_list<ChainedKernel> kernels) {
    for (const ChainedKernel& k : kernels) {
      if (fits(p, t, k.vector, k.line)) return k;
    }
    return ChainedKernel{};
  };
  if (t.a == DType::kF32 && t.b == DType::kBF16) {
    return first({chained_kernel<float, BFloat16, BFloat16, Rows<4>>()});
  }
  if (t.a != t.b) return {};
  switch (t.a) {
    case DType::kF32:
      return first({chained_kernel<float, float, float, Line>(),
                    chained_kernel<float, float, float, Rows<4>>(),
                    chained_kernel<float, float, float, Rows<1>>()});
    case DType::kF16:
      return first({chained_kernel<Float16, Float16, Float16, Line>(),
                    chained_kernel<Float16, Float16, Float16, Rows<4>>()});
    case DType::kBF16:
      return first({chained_kernel<BFloat16, BFloat16, BFloat16, Line>(),
                    chained_kernel<BFloat16, BFloat16, BFloat16, Rows<4>>()});
    case DType::kF64:
      return first({chained_kernel<double, double, double, Line>(),
                    chained_kernel<double, double, double, Rows<2>>()});
    case DType::kC64:
      return first({chained_kernel<Complex64, Complex64, Complex64, Line>(),
                    chained_kernel<Complex64, Complex64, Complex64, Rows<2>>()});
    case DType::kC128:
      break;
  }
  return {};
}

// Kernels of cluster.cuh, and what a thread of theirs holds.
struct ClusterKernel {
  cudaError_t (*launch)(const Problem&, const ClusterPlan&, cudaStream_t) = nullptr;
  int vector = 1;
  bool line = false;
  int steps = 1;
};

bool fits_cluster(const Problem& p, StreamTypes types, int vector, bool line) {
  const auto is_state = [&](const auto& array) { return !array.data || array.dtype == p.state; };
  const auto one_axis = [](const Input& in) {
    return in.at.outer_axes <= 1 && in.at.inner_axes <= 1;
  };
  return p.op != Op::kTangent && !p.da_over_time && p.time <= INT32_MAX / 2 / p.channels() &&
         is_state(p.init) && is_state(p.h0) && is_state(p.final) && one_axis(p.init) &&
         one_axis(p.h0) && one_axis(p.reset) && fits(p, types, vector, line);
}

template <class A, class B, class H, class Layout, int kSteps>
ClusterKernel cluster_kernel() {
  return {launch_cluster<A, B, H, Layout, kSteps>, Layout::kChannels, Layout::kLine, kSteps};
}

// The kernel of cluster.cuh that the problem fits, if there is one.
ClusterKernel cluster_for(const Problem& p, StreamTypes t) {
  using chained::Line;
  using chained::Rows;
  if (p.op == Op::kTangent || state_of(t.b) != p.state || t.a != t.b || t.b != t.h) return {};
  const auto first = [&](std::initializer_list<ClusterKernel> kernels) {
    for (const ClusterKernel& k : kernels) {
      if (fits_cluster(p, t, k.vector, k.line)) return k;
    }
    return ClusterKernel{};
  };
  switch (t.a) {
    case DType::kF32:
      return first({cluster_kernel<float, float, float, Line, 16>(),
                    cluster_kernel<float, float, float, Rows<4>, 8>(),
                    cluster_kernel<float, float, float, Rows<1>, 8>()});
    case DType::kF16:
      return first({cluster_kernel<Float16, Float16, Float16, Rows<4>, 8>()});
    case DType::kBF16:
      return first({cluster_kernel<BFloat16, BFloat16, BFloat16, Rows<4>, 8>()});
    default:
      return {};
  }
}

// Row-major with no gaps, and from 16 bytes on.
bool contiguous(const Problem& p, const Input& in, DType expected) {
  if (!in.data) return true;
  const auto is = [](int axes, const Broadcast::Axis& axis, int64_t size, int64_t stride) {
    return size == 1 || (axes == 1 && axis.stride == stride);
  };
  return in.dtype == expected && aligned(in.data) &&
         (p.time == 1 || in.at.time_stride == p.inner) &&
         is(in.at.inner_axes, in.at.inner[0], p.inner, 1) &&
         is(in.at.outer_axes, in.at.outer[0], p.outer, p.time * p.inner);
}

// Resets that are the same for all inner indices, in lines from 16 bytes on.
bool in_reset_lines(const Problem& p) {
  const Broadcast& at = p.reset.at;
  return !p.reset.data || (aligned(p.reset.data) && at.outer_axes <= 1 && at.inner_axes <= 1 &&
                           at.inner[0].stride == 0 && (p.time == 1 || at.time_stride == 1));
}

// How a comes to piped.cuh.
PipedA piped_way_of_a(const Problem& p, StreamTypes types) {
  const Broadcast& at = p.a.at;
  if (p.a.dtype != types.a || at.outer_axes > 1 || at.inner_axes > 1) return PipedA::kNone;
  if (p.da_over_runs()) {
    const bool stacks = p.op == Op::kCotangent && p.da_out.data && p.h.data &&
                        p.da_outer_run == p.outer && outer_shares(p.a) && aligned(p.a.data) &&
                        at.time_stride == p.inner && at.inner_axes == 1 && at.inner[0].stride == 1;
    return stacks ? PipedA::kStack : PipedA::kNone;
  }
  const bool sums = p.op == Op::kCotangent && p.da_out.data && p.da_over_time;
  if (at.time_stride == 0) return sums || !p.da_out.data ? PipedA::kFixed : PipedA::kNone;
  if (sums) return PipedA::kNone;
  if (contiguous(p, p.a, types.a)) return PipedA::kRows;
  // The same for all outer indices.
  const auto apart = [&](int64_t stride) {
    return outer_shares(p.a) || outer_apart(p, p.a, stride);
  };
  if (!aligned(p.a.data)) return PipedA::kNone;
  if (at.time_stride == p.inner && at.inner_axes == 1 && at.inner[0].stride == 1 &&
      apart(p.time * p.inner)) {
    return PipedA::kRows;
  }
  return at.time_stride == 1 && same_for_inner(p.a) && apart(p.time) ? PipedA::kRuns
                                                                     : PipedA::kNone;
}

// The problem is one for piped.cuh, with `vector` channels to a thread.
bool fits_piped(const Problem& p, StreamTypes types, int vector) {
  const bool cotangent = p.op == Op::kCotangent;
  const DType x = cotangent ? types.h : types.b, y = cotangent ? types.b : types.h;
  const auto is = [&](const Output& out, DType type) {
    const auto bytes = static_cast<uintptr_t>(vector * byte_size(type));
    return !out.data || (out.dtype == type && reinterpret_cast<uintptr_t>(out.data) % bytes == 0);
  };
  const bool sums = p.da_over_time || (p.da_over_runs() && is(p.da_out, p.state));
  return p.op != Op::kTangent && p.a.data && p.x.data && p.inner >= kPipedLeastLanes * vector &&
         p.inner % vector == 0 && is(p.y, y) && (sums || is(p.da_out, types.a)) &&
         piped_takes(piped_way_of_a(p, types), byte_size(types.a), byte_size(types.b), vector) &&
         contiguous(p, p.x, x) && contiguous(p, p.h, types.h) && in_reset_lines(p) &&
         (p.y.data || cotangent) && (p.h.data || !p.da_out.data);
}

// The kernel of piped.cuh that the problem and the GPU fit, if there is one.
struct PipedCall {
  Kernels::Piped launch = nullptr;
  PipedTiling tiling{};
};
PipedCall piped_for(const Problem& p, StreamTypes t, const Device& device) {
  if (device.capability_major < 9 || state_of(t.b) != p.state) return {};
  const Kernels kernels = kernels_for(t);
  PipedCall call;
  int vector = 1;
  if (kernels.piped_pairs && fits_piped(p, t, 2)) {
    call.launch = kernels.piped_pairs;
    vector = 2;
  } else if (kernels.piped && fits_piped(p, t, 1)) {
    call.launch = kernels.piped;
  } else {
    return {};
  }
  const PipedKernel kernel =
      piped_kernel(byte_size(t.a), byte_size(t.b), t.b == DType::kC64, vector);
  call.tiling = plan_piped(p.op, kernel, piped_way_of_a(p, t), p.outer, p.time, p.inner,
                           device.multiprocessors, device.shared_bytes);
  call.tiling.outer_shares_a = outer_shares(p.a);
  if (p.da_over_runs() && call.tiling.bytes > da_sums_bytes(p)) return {};
  return call.tiling.width > 0 ? call : PipedCall{};
}

// The problem is one for walked.cuh, with `vector` channels to a thread.
bool fits_walked(const Problem& p, StreamTypes t, int vector) {
  const auto is = [&](const Output& out, DType type) {
    const auto bytes = static_cast<uintptr_t>(vector * byte_size(type));
    return !out.data || (out.dtype == type && reinterpret_cast<uintptr_t>(out.data) % bytes == 0);
  };
  if (p.op == Op::kTangent || state_of(t.b) != p.state || !p.a.data || !p.x.data ||
      p.channels() > INT32_MAX / 2 || p.da_over_runs() || !is(p.y, t.b) ||
      !(p.da_over_time || is(p.da_out, t.a)) || (p.da_out.data && !p.h.data) || p.a.dtype != t.a ||
      p.x.dtype != t.b || (p.h.data && p.h.dtype != t.b)) {
    return false;
  }
  if (vector == 1) return true;
  return p.inner % vector == 0 && in_vectors(p, p.x, t.b, vector) &&
         in_vectors(p, p.h, t.b, vector) &&
         (same_for_inner(p.a) || in_vectors(p, p.a, t.a, vector)) &&
         (!p.reset.data || same_for_inner(p.reset));
}

// Whole arrays of contiguous time, all of one type, from 16 bytes on.
bool fits_lined(const Problem& p, StreamTypes types) {
  const auto whole = [&](const Input& in) {
    return !in.data ||
           (in.dtype == types.a && aligned(in.data) && in.at.time_stride == 1 &&
            (p.outer == 1 || (in.at.outer_axes == 1 && in.at.outer[0].stride == p.time)));
  };
  const auto is = [&](const Output& out) {
    return !out.data || (out.dtype == types.a && aligned(out.data));
  };
  return p.inner == 1 && p.op != Op::kTangent && !p.reset.data && !p.da_over_time &&
         state_of(types.b) == p.state && p.a.data && p.x.data && whole(p.a) && whole(p.x) &&
         whole(p.h) && is(p.y) && is(p.da_out) && (p.h.data || !p.da_out.data);
}

// Whole arrays, all of one type, from 16 bytes on.
bool fits_resident(const Problem& p, StreamTypes types) {
  const auto is = [&](const Output& out) {
    return !out.data || (out.dtype == types.a && aligned(out.data));
  };
  const auto is_state = [&](const Input& in) {
    return !in.data || (in.dtype == p.state && in.at.outer_axes <= 1 && in.at.inner_axes <= 1);
  };
  return p.state == DType::kF32 && p.op != Op::kTangent && !p.reset.data && !p.da_over_time &&
         !p.da_over_runs() && p.a.data && p.x.data && contiguous(p, p.a, types.a) &&
         contiguous(p, p.x, types.a) && contiguous(p, p.h, types.a) && is(p.y) && is(p.da_out) &&
         is_state(p.init) && is_state(p.h0) && (!p.final.data || p.final.dtype == p.state) &&
         (p.h.data || !p.da_out.data);
}

// A call, and what its path depends on.
struct Call {
  const Problem& p;
  StreamTypes types;
  Kernels kernels;
  Device device;
  bool by_name;  // a path that is asked for by name takes however few channels
  void* workspace;
  cudaStream_t stream;
  bool without_pipes = false;  // piped.cuh has turned out not to be there
};

// The paths. cudaErrorNotSupported: the problem is not one for it.

// See pays_to_walk().
bool walks(const Call& c) {
  const Problem& p = c.p;
  const bool shares_a =
      p.a.at.time_stride == 0 || outer_shares(p.a) || (p.inner > 1 && same_for_inner(p.a));
  return c.kernels.walked && fits_walked(p, c.types, 1) &&
         pays_to_walk(p.op, byte_size(c.types.b), shares_a, p.channels(), p.time, p.inner);
}

cudaError_t run_walked(const Call& c) {
  const Problem& p = c.p;
  if (!c.kernels.walked || !(c.by_name ? fits_walked(p, c.types, 1) : walks(c))) {
    return cudaErrorNotSupported;
  }
  const int vector = c.kernels.vector;
  const bool enough =
      p.channels() / vector >= (c.by_name ? 0 : kWalkedThreadsWanted * c.device.multiprocessors);
  return enough && fits_walked(p, c.types, vector) ? c.kernels.walked_vectors(p, c.stream)
                                                   : c.kernels.walked(p, c.stream);
}

cudaError_t run_boxed(const Call& c) {
  const Problem& p = c.p;
  const Device& device = c.device;
  if (device.capability_major < 9 || !is_sequential(p, c.types) || !fits_boxed(p, c.types)) {
    return cudaErrorNotSupported;
  }
  const BoxedA way = way_of_a(p);
  const bool plain = way == BoxedA::kBoxes && !p.reset.data && !p.da_over_time && !p.da_over_runs();
  BoxedPlan plan = plan_boxed(p.op, c.types, way, plain, boxed_traffic(p), p.outer, p.inner,
                              c.by_name ? 0 : device.multiprocessors, device.shared_bytes,
                              device.multiprocessor_shared_bytes);
  plan.outer_shares_a = outer_shares(p.a);
  const bool too_short = p.time * plan.width < least_boxed(byte_size(c.types.b)) &&
                         plan.blocks >= 4 * device.multiprocessors && !c.by_name;
  if (too_short && walks(c)) return cudaErrorNotSupported;
  // 8-byte types on few multiprocessors: of the limit on an H200 at (4,16384,512), forward and
  // backward, complex64 0.72 0.885 by boxes and 0.905 0.915 in piped.cuh, float64 0.93 0.915 and
  // 0.935 0.93, with resets backward 0.78 and 0.88, 0.82 and 0.92; complex64 with a of (D,) 0.46
  // 0.52 and 0.92 0.88, with (B,L,1) forward 0.40 and 0.84. But what a box's turns take is little
  // where time is short: 4.6 5.6 us and 7.4 10.8 at (64,128,32) in complex64, with a of (D,).
  const bool few =
      2 * plan.blocks <= device.multiprocessors && p.time > kShortBoxedTime && !c.by_name;
  if (few && byte_size(c.types.b) == 8 && piped_for(p, c.types, device).launch) {
    return cudaErrorNotSupported;
  }
  return plan.blocks > 0 ? c.kernels.boxed(p, plan, c.workspace, c.stream) : cudaErrorNotSupported;
}

// Where piped.cuh is faster than sequential.cuh. Of the limit on an H200, forward and backward:
// - Rows that are not whole 16 bytes: here their elements are copied one by one. fp32
//   (16,4096,250) 0.48 0.34 and 0.67 0.62, (32,4096,255) 0.68 0.55 and 0.69 0.63, bf16
//   (32,4096,250) 0.45 0.47 and 0.71 0.72; forward (1000,1000,33) 0.70 and 0.81, but
//   (128,4096,250) 0.66 and 0.61, (200,500,33) 0.59 and 0.52, fp64 (32,4096,255) 0.72 and 0.69.
// - In 16 bits a group of 32 channels for each multiprocessor keeps too little on its way. bf16
//   (16,4096,256) 0.64 0.715 and 0.75 0.79, (16,2048,256) 0.61 0.68 and 0.66 0.72; but
//   (16,1024,256) 0.56 0.63 and 0.52 0.63, (24,4096,256) 0.80 0.81 and 0.79 0.81. With a in fp32,
//   (16,2048,256) 0.72 0.81 and 0.66 0.78, but if a is of (D,) (16,4096,256) 0.50 0.51 and 0.69
//   0.67.
bool pipes_better(const Call& c) {
  const Problem& p = c.p;
  const StreamTypes t = c.types;
  if (c.by_name || c.without_pipes || p.da_over_runs() || !piped_for(p, t, c.device).launch) {
    return false;
  }
  const int bytes = byte_size(t.b), multiprocessors = c.device.multiprocessors;
  const int64_t groups = divide_up(p.channels(), 32);
  if (!in_pieces(p, p.x)) {
    const bool few_long = groups <= 3 * multiprocessors && p.time >= 1000;
    const bool narrow = p.inner <= 128 && p.channels() * p.time >= 8'000'000;
    return p.op == Op::kCotangent || bytes == 2 || (bytes == 4 && (few_long || narrow));
  }
  const bool shares_a = piped_way_of_a(p, t) != PipedA::kRows || outer_shares(p.a);
  return bytes == 2 && (byte_size(t.a) == 2 || shares_a) && 4 * groups < 5 * multiprocessors &&
         p.channels() * p.time >= 6'000'000;
}

cudaError_t run_sequential(const Call& c) {
  const Problem& p = c.p;
  if (!is_sequential(p, c.types) || !(has_rows(p, c.types) || c.by_name)) {
    return cudaErrorNotSupported;
  }
  const auto groups = static_cast<int>(std::min<int64_t>(divide_up(p.channels(), 32), 1 << 20));
  if (pipes_better(c)) return cudaErrorNotSupported;
  // For what no other path does, this one takes few channels, too.
  const int multiprocessors = c.by_name          ? 0
                              : p.da_over_runs() ? std::min(c.device.multiprocessors, groups)
                                                 : c.device.multiprocessors;
  const bool stacked = da_sum(p) == DaSum::kOuter;
  const int reserved = stacked ? kMaxSequentialWarps * stack_bytes(c.types) : 0;
  SequentialPlan plan = plan_sequential(p.op, c.types, sequential_traffic(p), p.channels(),
                                        multiprocessors, c.device.shared_bytes - reserved, stacked);
  if (plan.groups == 0) return cudaErrorNotSupported;
  // Stacks of two outer indices leave many sums to be added up. Of the limit on an H200, here and
  // in piped.cuh: fp32 (32,4096,256) 0.635 0.77, (4,4096,2048) 0.495 0.73, (100,2000,96) 0.43 0.67,
  // (32,1000,256) 0.615 0.625, fp64 and complex64 (16,4096,512) 0.63 0.74 0.73. Of four: fp32
  // (16,2048,1024) 0.675 0.673, (64,600,256) 0.69 0.65, but (8,2048,2048) 0.64 0.72. Short times:
  // (128,300,128) 0.62 0.49.
  const bool few = stacked && p.channels() * p.time >= 8'000'000 &&
                   (plan.groups == 2 || (p.inner >= 2048 && p.channels() <= 16384));
  if (few && !c.by_name && !c.without_pipes && piped_for(p, c.types, c.device).launch) {
    return cudaErrorNotSupported;
  }
  plan.most_bytes = c.device.shared_bytes;
  plan.a = copies(p, p.a);
  plan.x = copies(p, p.x);
  plan.da = copies(p, p.da);
  plan.h = copies(p, p.h);
  return c.kernels.sequential(p, plan, c.workspace, c.stream);
}

cudaError_t run_resident(const Call& c) {
  const Problem& p = c.p;
  if (c.device.capability_major < 9 || !c.device.cooperative || !c.kernels.resident ||
      !fits_resident(p, c.types)) {
    return cudaErrorNotSupported;
  }
  const ResidentPlan plan =
      plan_resident(p.op, byte_size(c.types.a), p.op == Op::kCotangent && p.h.data, p.outer, p.time,
                    p.inner, c.device.multiprocessors, c.device.shared_bytes);
  const bool taken = plan.blocks > 0 && (c.by_name || pays_to_reside(plan, byte_size(c.types.a),
                                                                     p.outer, p.time, p.inner));
  return taken ? c.kernels.resident(p, plan, c.workspace, c.stream) : cudaErrorNotSupported;
}

cudaError_t run_cluster(const Call& c) {
  const ClusterKernel cluster = cluster_for(c.p, c.types);
  if (c.device.capability_major < 9 || !cluster.launch) return cudaErrorNotSupported;
  // Where sequential.cuh has several groups of channels for each multiprocessor, and time is short:
  // fp32 (512,32,32) 0.32 0.35 of the limit here and 0.45 0.38 there, but (256,48,32) 0.47 0.52 and
  // 0.42 0.38, (128,32,32) 0.48 0.48 and 0.36 0.31.
  const bool many = c.p.channels() >= 96 * int64_t{c.device.multiprocessors} && !c.by_name;
  if (many && c.p.time < 48 && is_sequential(c.p, c.types) && !pipes_better(c)) {
    return cudaErrorNotSupported;
  }
  // Not every GPU has the largest clusters.
  for (const int most_ranks : {kMostRanks, kPortableRanks}) {
    const ClusterPlan plan =
        plan_cluster(cluster.line, cluster.vector, cluster.steps, byte_size(c.types.b),
                     c.p.channels(), c.p.time, c.device.multiprocessors, most_ranks);
    const cudaError_t queued =
        plan.groups > 0 ? cluster.launch(c.p, plan, c.stream) : cudaErrorNotSupported;
    if (queued != cudaErrorNotSupported) return queued;
  }
  return cudaErrorNotSupported;
}

cudaError_t run_lined(const Call& c) {
  if (c.device.capability_major < 9 || !c.kernels.lined || !fits_lined(c.p, c.types)) {
    return cudaErrorNotSupported;
  }
  const LinedPlan plan =
      plan_lined(c.p.op, byte_size(c.types.a), c.p.channels(), c.p.time,
                 c.by_name ? 0 : c.device.multiprocessors, c.device.shared_bytes);
  return plan.blocks > 0 ? c.kernels.lined(c.p, plan, c.stream) : cudaErrorNotSupported;
}

cudaError_t run_piped(const Call& c) {
  const PipedCall piped = piped_for(c.p, c.types, c.device);
  return piped.launch ? piped.launch(c.p, piped.tiling, c.workspace, c.stream)
                      : cudaErrorNotSupported;
}

cudaError_t run_chained(const Call& c) {
  const ChainedKernel chained = chained_for(c.p, c.types);
  return chained.launch ? chained.launch(c.p, c.device, c.workspace, c.stream)
                        : cudaErrorNotSupported;
}

cudaError_t run_general(const Call& c) {
  switch (c.p.state) {
    case DType::kF64:
      return launch_general<double>(c.p, c.device, c.workspace, c.stream);
    case DType::kC64:
      return launch_general<Complex64>(c.p, c.device, c.workspace, c.stream);
    case DType::kC128:
      return launch_general<Complex128>(c.p, c.device, c.workspace, c.stream);
    default:
      return launch_general<float>(c.p, c.device, c.workspace, c.stream);
  }
}

// In the order in which they are asked.
constexpr struct {
  Path path;
  cudaError_t (*run)(const Call&);
  bool sums_da;  // over runs of channels
} kPaths[] = {
    {Path::kBoxed, run_boxed, true},           {Path::kWalked, run_walked, false},
    {Path::kResident, run_resident, false},    {Path::kCluster, run_cluster, false},
    {Path::kSequential, run_sequential, true}, {Path::kLined, run_lined, false},
    {Path::kPiped, run_piped, true},           {Path::kChained, run_chained, false},
    {Path::kGeneral, run_general, false},
};

}  // namespace

bool sums_da(const Problem& p) {
  const StreamTypes types = stream_types(p);
  return is_sequential(p, types) && has_rows(p, types) && sums_over_runs(p);
}

size_t workspace_bytes(const Problem& p) {
  if (p.da_over_runs()) return da_sums_bytes(p);
  return workspace_bytes(p.op, p.outer, p.time, p.inner, p.state);
}

cudaError_t launch(const Problem& p, void* workspace, cudaStream_t stream, Path path) {
  const StreamTypes types = stream_types(p);
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  if (p.da_over_runs() && !sums_da(p)) return cudaErrorNotSupported;
  const Call call{p, types, kernels_for(types), device, path != Path::kAuto, workspace, stream};
  for (const auto& candidate : kPaths) {
    if (path != Path::kAuto && path != candidate.path) continue;
    if (p.da_over_runs() && !candidate.sums_da) continue;
    const cudaError_t queued = candidate.run(call);
    if (queued != cudaErrorNotSupported) return queued;
  }
  if (!p.da_over_runs() || path != Path::kAuto) return cudaErrorNotSupported;
  // What sequential.cuh has left to piped.cuh.
  Call without = call;
  without.without_pipes = true;
  return run_sequential(without);
}

}  // namespace jax_scan
