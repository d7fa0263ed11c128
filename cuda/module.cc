// The Python module jax_scan._cuda: the handlers as capsules, and what JAX needs to know when it
// lowers a call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <string>

#include "cuda/handler.h"
#include "cuda/launch.h"
#include "cuda/plan.h"
#include "cuda/summary.h"

namespace nb = nanobind;

namespace {

nb::capsule capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict registrations() {
  nb::dict targets;
  targets["jax_scan.v1.scan"] = capsule(jax_scan_cuda_scan);
  targets["jax_scan.v1.tangent"] = capsule(jax_scan_cuda_tangent);
  targets["jax_scan.v1.cotangent"] = capsule(jax_scan_cuda_cotangent);
  targets["jax_scan.v1.summary"] = capsule(jax_scan_cuda_summary);
  return targets;
}

jax_scan::Op op_named(const std::string& name) {
  if (name == "scan") return jax_scan::Op::kScan;
  if (name == "tangent") return jax_scan::Op::kTangent;
  if (name == "cotangent") return jax_scan::Op::kCotangent;
  throw nb::value_error(("op must be scan, tangent or cotangent, got " + name).c_str());
}

jax_scan::DType dtype_named(const std::string& text) {
  using jax_scan::DType;
  for (DType t : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64, DType::kC64, DType::kC128}) {
    if (text == jax_scan::name(t)) return t;
  }
  throw nb::value_error(("no dtype of an operand: " + text).c_str());
}

jax_scan::DType state_named(const std::string& text) {
  const jax_scan::DType state = dtype_named(text);
  if (jax_scan::byte_size(state) > 2) return state;
  throw nb::value_error(("state must be a dtype of 32-bit reals or wider, got " + text).c_str());
}

// Of an operand or result that is there, wherever it may lie; an empty name says that it is not.
template <class Array>
void declare(Array& array, const std::string& dtype) {
  static char place;
  if (dtype.empty()) return;
  array.data = &place;
  array.dtype = dtype_named(dtype);
}

std::optional<size_t> summed_workspace_bytes(int64_t outer, int64_t time, int64_t inner,
                                             int64_t inner_run, int64_t outer_run,
                                             const std::string& state, const std::string& a,
                                             const std::string& h, const std::string& g,
                                             const std::string& db) {
  jax_scan::Problem p;
  p.op = jax_scan::Op::kCotangent;
  p.state = state_named(state);
  p.outer = outer;
  p.time = time;
  p.inner = inner;
  p.da_inner_run = inner_run;
  p.da_outer_run = outer_run;
  declare(p.a, a);
  declare(p.h, h);
  declare(p.x, g);
  declare(p.y, db);
  declare(p.da_out, state);
  return jax_scan::sums_da(p) ? std::optional(jax_scan::workspace_bytes(p)) : std::nullopt;
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of jax_scan, as XLA FFI handlers.";
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("architectures") = JAX_SCAN_CUDA_ARCHITECTURES;
  m.def("registrations", registrations, "FFI target name -> handler.");
  m.def(
      "workspace_bytes",
      [](const std::string& op, int64_t outer, int64_t time, int64_t inner,
         const std::string& state) {
        return jax_scan::workspace_bytes(op_named(op), outer, time, inner, state_named(state));
      },
      nb::arg("op"), nb::arg("outer"), nb::arg("time"), nb::arg("inner"), nb::arg("state"),
      "Bytes of the result 'workspace' that a call of this size needs.");
  m.def(
      "workspace_bytes_per_channel",
      [](const std::string& op, int64_t time, const std::string& state) {
        op_named(op);  // the same for all, so far
        return jax_scan::workspace_bytes_per_channel(time, state_named(state));
      },
      nb::arg("op"), nb::arg("time"), nb::arg("state"),
      "Bytes that do for each channel of a call, in whatever way it is divided over devices.");
  m.def("summed_workspace_bytes", summed_workspace_bytes, nb::arg("outer"), nb::arg("time"),
        nb::arg("inner"), nb::arg("inner_run"), nb::arg("outer_run"), nb::arg("state"),
        nb::arg("a"), nb::arg("h"), nb::arg("g"), nb::arg("db"),
        "Bytes of the result 'workspace' of a cotangent that sums da over runs of neighbouring "
        "inner or outer indices; None where the kernels don't. Takes dtypes, '' for what is not "
        "there.");
  m.def(
      "summary_workspace_bytes",
      [](int64_t outer, int64_t time, int64_t inner, const std::string& a, const std::string& x,
         int prefixes) -> std::optional<size_t> {
        if (prefixes < 0 || prefixes > jax_scan::kMostPrefixes) {
          throw nb::value_error("too many prefixes");
        }
        const jax_scan::DType of_a = dtype_named(a), of_x = dtype_named(x);
        if (!jax_scan::has_summary(of_a, of_x, time)) return std::nullopt;
        return jax_scan::plan_summary(outer, time, inner, of_a, of_x, prefixes).bytes;
      },
      nb::arg("outer"), nb::arg("time"), nb::arg("inner"), nb::arg("a"), nb::arg("x"),
      nb::arg("prefixes"),
      "Bytes of the result 'workspace' of a summary of steps with operands of these dtypes; None "
      "where the kernels don't take them.");
}
