// The FFI handlers of the CPU targets.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_scan::cpu {

XLA_FFI_Error* scan_handler(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* tangent_handler(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* cotangent_handler(XLA_FFI_CallFrame* call_frame);

}  // namespace jax_scan::cpu
