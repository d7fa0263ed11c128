// The FFI handlers of the CUDA module.
#pragma once

#include "xla/ffi/api/ffi.h"

extern "C" {
XLA_FFI_Error* jax_scan_cuda_scan(XLA_FFI_CallFrame*);
XLA_FFI_Error* jax_scan_cuda_tangent(XLA_FFI_CallFrame*);
XLA_FFI_Error* jax_scan_cuda_cotangent(XLA_FFI_CallFrame*);
XLA_FFI_Error* jax_scan_cuda_summary(XLA_FFI_CallFrame*);
}
