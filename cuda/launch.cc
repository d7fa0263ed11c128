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
bool streams(const Problem& p, const Input& in, DType expected) {
  if (!in.data) return true;
  const int64_t vector = 16 / byte_size(in.dtype);
  if (in.dtype != expected || !aligned(in.data) || !in.at.inner_contiguous() ||
      p.inner % vector != 0 || in.at.time_stride % vector != 0) {
    return false;
  }
  for (int k = 0; k < in.at.outer_axes; ++k) {
    if (in.at.outer[k].stride % vector != 0) return false;
  }
  return true;
}

bool shared_by_channels(const Broadcast& at) {
  for (int k = 0; k < at.inner_axes; ++k) {
    if (at.inner[k].stride != 0) return false;
  }
  return true;
}

bool fits_sequential(const Problem& p, StreamTypes types) {
  const bool cotangent = p.op == Op::kCotangent;
  const bool da_streams = p.op != Op::kTangent || streams(p, p.da, types.a);
  const bool h_streams = p.op == Op::kScan || streams(p, p.h, types.h);
  return streams(p, p.a, types.a) && streams(p, p.x, cotangent ? types.h : types.b) && da_streams &&
         h_streams && shared_by_channels(p.reset.at) && aligned(p.y.data) &&
         (!p.y.data || p.y.dtype == (cotangent ? types.b : types.h)) &&
         (!p.da_out.data || p.da_over_time ||
          (p.da_out.dtype == types.a && aligned(p.da_out.data)));
}

using SequentialLauncher = cudaError_t (*)(const Problem&, SequentialPlan, cudaStream_t);

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
    const SequentialPlan plan =
        plan_sequential(p.op, types, p.channels(), device.multiprocessors, device.shared_bytes);
    if (plan.warps > 0) return sequential(p, plan, stream);
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
