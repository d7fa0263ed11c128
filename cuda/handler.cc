#include "cuda/handler.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/operands.h"
#include "cuda/launch.h"
#include "cuda/product.h"

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

// a (outer axes, time, inner axes), and optionally most, as a but for time -> product and reach, as
// most, and a workspace. See cuda/product.h.
ffi::Error run_product(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                       int64_t axis, bool reverse, float least, ffi::Span<const int64_t> prefixes) {
  const auto error = [](std::string_view message) {
    return ffi::Error::InvalidArgument("jax_scan.v1.product: " + std::string(message));
  };
  if (args.size() < 1 || args.size() > 2 || rets.size() != 3) {
    return error("takes a and possibly most, and has results product, reach and workspace");
  }
  const ffi::AnyBuffer a = *args.get<ffi::AnyBuffer>(0);
  const ffi::AnyBuffer product = **rets.get<ffi::AnyBuffer>(0);
  const ffi::AnyBuffer reach = **rets.get<ffi::AnyBuffer>(1);
  const ffi::AnyBuffer workspace = **rets.get<ffi::AnyBuffer>(2);
  const std::span<const int64_t> dims(a.dimensions().begin(), a.dimensions().end());
  if (axis < 0 || axis >= static_cast<int64_t>(dims.size())) {
    return error("operand 'a' has no axis " + std::to_string(axis));
  }
  ProductProblem p;
  p.outer = p.inner = 1;
  for (size_t k = 0; k < dims.size(); ++k) {
    if (static_cast<int64_t>(k) < axis) p.outer *= dims[k];
    if (static_cast<int64_t>(k) > axis) p.inner *= dims[k];
  }
  p.time = dims[static_cast<size_t>(axis)];
  p.reverse = reverse;
  p.least = least;
  const std::optional<DType> dtype = dtype_of(a.element_type());
  const std::optional<DType> state = dtype_of(product.element_type());
  if (!dtype || !state || !readable(*dtype, *state) || byte_size(*state) < 4 ||
      is_complex(*state) != is_complex(*dtype)) {
    return error("operand 'a' or result 'product' has a dtype that it can't have");
  }
  p.dtype = *dtype;
  p.state = *state;
  p.a = a.untyped_data();
  p.product = product.untyped_data();
  const size_t channels = static_cast<size_t>(p.outer * p.inner);
  if (channels * static_cast<size_t>(p.time) == 0) return error("operand 'a' is empty");
  const auto is_reach = [&](const ffi::AnyBuffer& x) {
    return x.element_type() == ffi::S32 && x.element_count() == channels;
  };
  if (product.element_count() != channels || !is_reach(reach)) {
    return error("results 'product' and 'reach', the latter int32, must have a number per channel");
  }
  p.reach = static_cast<int32_t*>(reach.untyped_data());
  if (args.size() == 2) {
    const ffi::AnyBuffer most = *args.get<ffi::AnyBuffer>(1);
    if (!is_reach(most)) return error("operand 'most' must have an int32 per channel");
    p.most = static_cast<const int32_t*>(most.untyped_data());
  }
  if (prefixes.size() < 1 || prefixes.size() > kMostPrefixes) {
    return error("attribute 'prefixes' has none or too many");
  }
  int64_t last = 0;
  for (const int64_t prefix : prefixes) {
    if (prefix <= last || prefix > p.time) {
      return error("attribute 'prefixes' must increase from above 0 to the length at most");
    }
    p.prefix[p.prefixes++] = last = prefix;
  }
  const size_t needed = plan_product(p.outer, p.time, p.inner, p.dtype, p.prefixes).bytes;
  if (workspace.size_bytes() < needed) {
    return error("result 'workspace' has " + std::to_string(workspace.size_bytes()) +
                 " bytes, expected at least " + std::to_string(needed));
  }
  const cudaError_t queued = launch_product(p, workspace.untyped_data(), stream);
  return queued == cudaSuccess ? ffi::Error::Success() : cuda_error(queued);
}

auto product_binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("axis")
      .Attr<bool>("reverse")
      .Attr<float>("least")
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
XLA_FFI_DEFINE_HANDLER_SYMBOL(jax_scan_cuda_product, jax_scan::run_product,
                              jax_scan::product_binding(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
