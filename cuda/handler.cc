#include "cuda/handler.h"

#include <cuda_runtime_api.h>

#include <span>
#include <string>
#include <string_view>

#include "core/operands.h"
#include "cuda/launch.h"

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
  ffi::ErrorOr<Call> call = decode(kOp, args, rets,
                                   {operands, results, state, axis, length, reverse, has_h0,
                                    time_last, std::span(repeated.begin(), repeated.size())},
                                   sums_da);
  if (call.has_error()) return call.error();
  const Problem& p = call->problem;
  if (p.outer == 0 || p.time == 0 || p.inner == 0) {
    return ffi::Error::InvalidArgument("jax_scan: a call without elements must not reach the GPU");
  }
  const size_t needed = workspace_bytes(p);
  if (call->workspace.bytes < needed) {
    return ffi::Error::InvalidArgument("jax_scan: result 'workspace' has " +
                                       std::to_string(call->workspace.bytes) +
                                       " bytes, expected at least " + std::to_string(needed));
  }
  const cudaError_t error = launch(p, call->workspace.data, stream);
  return error == cudaSuccess ? ffi::Error::Success() : cuda_error(error);
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
