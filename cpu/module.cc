// Python module _cpu: the handlers' capsules, the FFI version that they were compiled with, and
// what the lowering asks.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <string>

#include "core/operands.h"
#include "core/problem.h"
#include "cpu/handler.h"
#include "cpu/kernel.h"
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

bool sums_da(int64_t outer, int64_t time, int64_t inner, int64_t inner_run, int64_t outer_run,
             const std::string& state) {
  jax_scan::Problem p;
  p.op = jax_scan::Op::kCotangent;
  const std::optional<jax_scan::DType> dtype = jax_scan::state_dtype_of(state);
  if (!dtype) throw nb::value_error(("no dtype of a state: " + state).c_str());
  p.state = *dtype;
  p.outer = outer;
  p.time = time;
  p.inner = inner;
  p.da_inner_run = inner_run;
  p.da_outer_run = outer_run;
  return jax_scan::cpu::sums_da(p);
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
  m.def("sums_da", &sums_da, nb::arg("outer"), nb::arg("time"), nb::arg("inner"),
        nb::arg("inner_run"), nb::arg("outer_run"), nb::arg("state"),
        "Whether the kernel sums da over runs of neighbouring inner or outer indices.");
}
