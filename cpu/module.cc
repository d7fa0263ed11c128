// Python module _cpu: the handlers' capsules and the FFI version that they were compiled with.
#include <nanobind/nanobind.h>

#include "cpu/handler.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

namespace {

nb::capsule capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict registrations() {
  nb::dict targets;
  targets["jax_scan.v1.scan"] = capsule(jax_scan::cpu::scan_handler);
  targets["jax_scan.v1.tangent"] = capsule(jax_scan::cpu::tangent_handler);
  targets["jax_scan.v1.cotangent"] = capsule(jax_scan::cpu::cotangent_handler);
  return targets;
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.doc() = "The CPU kernels of jax_scan, as XLA FFI handlers";
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
#if defined(JAX_SCAN_CPU_ONLY)
  m.attr("cpu_only") = true;  // as the build was asked to be
#else
  m.attr("cpu_only") = false;
#endif
  m.def("registrations", &registrations, "FFI target name -> capsule of its handler");
}
