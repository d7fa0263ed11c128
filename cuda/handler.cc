#include "cuda/handler.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/operands.h"
#include "cuda/launch.h"
#include "cuda/summary.h"

namespace jax_scan {
namespace {

namespace ffi = xla::ffi;

ffi::Error cuda_error(cudaError_t error) {
  std::string message = std::string("jax_scan: CUDA launch failed: ") + cudaGetErrorName(error) +
                        ": " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice) {
    message += "; the extension was compiled for " JAX_SCAN_CUDA_ARCHITECTURES;
  }
  return ffi::Error::Internal(message);
}

template <Op kOp>
ffi::Error run(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
               std::string_view operands, std::string_view results, std::string_view state,
               int64_t axis, int64_t length, bool reverse, bool has_h0, bool time_last,
               ffi::Span<const int64_t> repeated) {
  Call call;
  const ffi::Error error = decode(kOp, args, rets,
                                  {operands, results, state, axis, length, reverse, has_h0,
                                   time_last, std::span(repeated.begin(), repeated.size())},
                                  sums_da, call);
  if (error.failure()) return error;
  const Problem& p = call.problem;
  if (p.outer == 0 || p.time == 0 || p.inner == 0) {
    return ffi::Error::InvalidArgument("jax_scan: a call without elements must not reach the GPU");
  }
  const size_t needed = workspace_bytes(p);
  if (call.workspace.bytes < needed) {
    return ffi::Error::InvalidArgument("jax_scan: result 'workspace' has " +
                                       std::to_string(call.workspace.bytes) +
                                       " bytes, expected at least " + std::to_string(needed));
  }
  const cudaError_t queued = launch(p, call.workspace.data, stream);
  return queued == cudaSuccess ? ffi::Error::Success() : cuda_error(queued);
}

// Operands a, x and possibly reset -> A and H, of the full shape with one step, and a workspace.
// See cuda/summary.h.
ffi::Error run_summary(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       bool is_cotangent, int64_t axis, bool descending,
                       ffi::Span<const int64_t> prefixes) {
  const auto error = [](std::string_view message) {
    return ffi::Error::InvalidArgument("jax_scan.v1.summary: " + std::string(message));
  };
  if (args.size() < 2 || args.size() > 3 || rets.size() != 3) {
    return error("takes a, x and possibly reset, and has results A, H and workspace");
  }
  SummaryProblem p;
  p.is_cotangent = is_cotangent;
  p.descending = descending;
  std::vector<int64_t> full;
  for (size_t k = 0; k < args.size(); ++k) {
    const auto dims = args.get<ffi::AnyBuffer>(k)->dimensions();
    full.resize(std::max(full.size(), dims.size()), 1);
    for (size_t j = 0; j < dims.size(); ++j) full[j] = std::max(full[j], dims[j]);
  }
  if (axis < 0 || axis >= static_cast<int64_t>(full.size())) {
    return error("operands have no axis " + std::to_string(axis));
  }
  Input* const slots[] = {&p.a, &p.x, &p.reset};
  for (size_t k = 0; k < args.size(); ++k) {
    const ffi::AnyBuffer buffer = *args.get<ffi::AnyBuffer>(k);
    const std::span<const int64_t> dims(buffer.dimensions().begin(), buffer.dimensions().end());
    bool fits = dims.size() == full.size();
    for (size_t j = 0; fits && j < full.size(); ++j) fits = dims[j] == 1 || dims[j] == full[j];
    if (!fits || !broadcast(dims, 0, full, axis, slots[k]->at)) {
      return error("operand " + std::to_string(k) + " does not have the shape of the others");
    }
    const std::optional<DType> dtype = dtype_of(buffer.element_type());
    const bool is_reset = k == 2;
    if (is_reset ? buffer.element_type() != ffi::PRED : !dtype.has_value()) {
      return error("operand " + std::to_string(k) + " has a dtype that it can't have");
    }
    slots[k]->dtype = dtype.value_or(DType::kF32);
    slots[k]->data = buffer.untyped_data();
  }
  p.outer = p.inner = 1;
  for (size_t k = 0; k < full.size(); ++k) {
    if (static_cast<int64_t>(k) < axis) p.outer *= full[k];
    if (static_cast<int64_t>(k) > axis) p.inner *= full[k];
  }
  p.time = full[static_cast<size_t>(axis)];
  const int64_t channels = p.outer * p.inner;
  if (channels * p.time == 0) return error("operands are empty");

  const ffi::AnyBuffer product = **rets.get<ffi::AnyBuffer>(0);
  const ffi::AnyBuffer result = **rets.get<ffi::AnyBuffer>(1);
  const ffi::AnyBuffer workspace = **rets.get<ffi::AnyBuffer>(2);
  const std::optional<DType> state = dtype_of(product.element_type());
  if (!state || byte_size(*state) < 4 || result.element_type() != product.element_type() ||
      !readable(p.a.dtype, *state) || !readable(p.x.dtype, *state) ||
      is_complex(*state) != is_complex(p.x.dtype) || !has_summary(p.a.dtype, p.x.dtype, p.time)) {
    return error("there is no kernel for these dtypes or so many steps");
  }
  p.state = *state;
  if (static_cast<int64_t>(product.element_count()) != channels ||
      static_cast<int64_t>(result.element_count()) != channels) {
    return error("results A and H must have a number per channel");
  }
  p.product = product.untyped_data();
  p.result = result.untyped_data();
  if (prefixes.size() > kMostPrefixes) return error("attribute 'prefixes' has too many");
  int64_t last = 0;
  for (const int64_t prefix : prefixes) {
    if (prefix <= last || prefix > p.time) {
      return error("attribute 'prefixes' must increase from above 0 to the length at most");
    }
    p.prefix[p.prefixes++] = last = prefix;
  }
  const size_t needed =
      plan_summary(p.outer, p.time, p.inner, p.a.dtype, p.x.dtype, p.prefixes).bytes;
  if (workspace.size_bytes() < needed) {
    return error("result 'workspace' has " + std::to_string(workspace.size_bytes()) +
                 " bytes, expected at least " + std::to_string(needed));
  }
  const cudaError_t queued = launch_summary(p, workspace.untyped_data(), stream);
  return queued == cudaSuccess ? ffi::Error::Success() : cuda_error(queued);
}

auto summary_binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<bool>("is_cotangent")
      .Attr<int64_t>("axis")
      .Attr<bool>("descending")
      .Attr<ffi::Span<const int64_t>>("prefixes");
}

auto binding() { return bind_operands(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()); }

}  // namespace
}  // namespace jax_scan

// Command buffers may capture the handlers: they only queue work on the stream that they are given.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_scan_cuda_scan, jax_scan::run<jax_scan::Op::kScan>,
                              jax_scan::binding(), {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_scan_cuda_tangent, jax_scan::run<jax_scan::Op::kTangent>,
                              jax_scan::binding(), {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_scan_cuda_cotangent, jax_scan::run<jax_scan::Op::kCotangent>,
                              jax_scan::binding(), {xla::ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_scan_cuda_summary, jax_scan::run_summary,
                              jax_scan::summary_binding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
