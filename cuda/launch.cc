#include "cuda/launch.h"

#include <cstdint>

namespace jax_scan {
namespace {

// The types of a, b and h; what an operation doesn't have takes the type of what it has.
StreamTypes stream_types(const Problem& p) {
  const DType streamed_h = p.x.data ? p.x.dtype : p.h.dtype;
  if (p.op == Op::kCotangent) {
    return {p.a.dtype, p.y.data ? p.y.dtype : streamed_h, streamed_h};
  }
  return {p.a.dtype, p.x.data ? p.x.dtype : p.y.dtype, p.y.dtype};
}

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

// All that is there has the types that the kernel is compiled for.
bool fits_sequential(const Problem& p, StreamTypes types) {
  const bool cotangent = p.op == Op::kCotangent;
  const auto is = [](const auto& array, DType type) { return !array.data || array.dtype == type; };
  constexpr int64_t kMost = INT32_MAX / 2;
  return p.time <= kMost && p.channels() <= kMost && is(p.a, types.a) &&
         is(p.x, cotangent ? types.h : types.b) && is(p.da, types.a) && is(p.h, types.h) &&
         is(p.y, cotangent ? types.b : types.h) && (p.da_over_time || is(p.da_out, types.a));
}

Traffic sequential_traffic(const Problem& p) {
  Traffic traffic;
  for (const Input* in : {&p.a, &p.x, &p.da, &p.h}) {
    if (!in->data || in->at.time_stride == 0) continue;
    if (in_pieces(p, *in)) traffic.copied += byte_size(in->dtype);
    if (in->at.inner_contiguous()) traffic.read += byte_size(in->dtype);
  }
  if (p.y.data) traffic.written += byte_size(p.y.dtype);
  if (p.da_out.data && !p.da_over_time) traffic.written += byte_size(p.da_out.dtype);
  return traffic;
}

using SequentialLauncher = cudaError_t (*)(const Problem&, const SequentialPlan&, cudaStream_t);

SequentialLauncher sequential_for(StreamTypes t) {
  if (t.b != t.h) return nullptr;
  if (t.a != t.b) {
    const bool mixed = t.a == DType::kF32 && t.b == DType::kBF16;
    return mixed ? launch_sequential<float, BFloat16, BFloat16> : nullptr;
  }
  switch (t.a) {
    case DType::kF32:
      return launch_sequential<float, float, float>;
    case DType::kF16:
      return launch_sequential<Float16, Float16, Float16>;
    case DType::kBF16:
      return launch_sequential<BFloat16, BFloat16, BFloat16>;
    case DType::kF64:
      return launch_sequential<double, double, double>;
    case DType::kC64:
      return launch_sequential<Complex64, Complex64, Complex64>;
    case DType::kC128:
      break;
  }
  return nullptr;
}

cudaError_t current_device(Device& device) {
  int ordinal = 0;
  cudaError_t error = cudaGetDevice(&ordinal);
  const auto ask = [&](cudaDeviceAttr attribute, int& value) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, ordinal);
  };
  ask(cudaDevAttrMultiProcessorCount, device.multiprocessors);
  ask(cudaDevAttrMaxSharedMemoryPerBlockOptin, device.shared_bytes);
  ask(cudaDevAttrComputeCapabilityMajor, device.capability_major);
  return error;
}

// The dtype of the state that a 16-bit or wider type of operand asks for.
DType state_of(DType t) { return byte_size(t) == 2 ? DType::kF32 : t; }

}  // namespace

cudaError_t launch(const Problem& p, void* workspace, cudaStream_t stream) {
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;

  const StreamTypes types = stream_types(p);
  const SequentialLauncher sequential = sequential_for(types);
  if (sequential && state_of(types.b) == p.state && fits_sequential(p, types)) {
    SequentialPlan plan = plan_sequential(p.op, types, sequential_traffic(p), p.channels(),
                                          device.multiprocessors, device.shared_bytes);
    if (plan.groups > 0) {
      plan.a_in_pieces = in_pieces(p, p.a);
      plan.x_in_pieces = in_pieces(p, p.x);
      plan.da_in_pieces = in_pieces(p, p.da);
      plan.h_in_pieces = in_pieces(p, p.h);
      return sequential(p, plan, stream);
    }
  }

  const Tiling tiling = tile(p.op, p.outer, p.time, p.inner, p.state);
  if (tiling.tiles > INT32_MAX || tiling.groups > INT32_MAX) return cudaErrorInvalidConfiguration;
  switch (p.state) {
    case DType::kF64:
      return launch_lookback<double>(p, tiling, device, workspace, stream);
    case DType::kC64:
      return launch_lookback<Complex64>(p, tiling, device, workspace, stream);
    case DType::kC128:
      return launch_lookback<Complex128>(p, tiling, device, workspace, stream);
    default:
      return launch_lookback<float>(p, tiling, device, workspace, stream);
  }
}

}  // namespace jax_scan
