// FFI buffers and attributes -> Problem, with every check that keeps a kernel inside its buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "core/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jax_scan {

// The attributes of every target; see jax_scan/_lowering.py for the side that writes them.
struct Attributes {
  std::string_view operands;  // the names of the operands that are there, in order: "a b h0 reset"
  std::string_view results;   // likewise: "h state"
  std::string_view state;     // the state's dtype: "float32"
  int64_t axis;               // the time axis in memory, which is row-major
  int64_t length;             // its size
  bool reverse;
  bool has_h0;
  bool time_last;  // shapes are written with the time axis last, wherever it lies in memory
  // For each operand a set of axes in memory, axis k as bit k, in which its entries are all the
  // same: only the first is read, however many there are.
  std::span<const int64_t> repeated;
};

// A result named "workspace": bytes for the kernel's own use.
struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

struct Call {
  Problem problem;
  Workspace workspace;
};

// The dtype of what an operand or result holds; nothing for those that none may have.
std::optional<DType> dtype_of(xla::ffi::DataType type);
std::optional<DType> state_dtype_of(std::string_view name);

// Where the elements of a row-major operand of shape `dims` lie when it is broadcast to `full`,
// with time on `axis`; `repeated` as in Attributes. False when it takes too many axes.
bool broadcast(std::span<const int64_t> dims, int64_t repeated, std::span<const int64_t> full,
               int64_t axis, Broadcast& at);

// Fills in an empty `call`, or returns what is wrong. `sums_da` says of a problem that sums da over
// runs of indices whether there is a kernel for it.
xla::ffi::Error decode(Op op, xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                       const Attributes& attributes, bool (*sums_da)(const Problem&), Call& call);

// Adds the buffers and attributes of `Attributes` to a binding, in the order in which the handlers
// take them.
template <class Binding>
auto bind_operands(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::string_view>("operands")
      .template Attr<std::string_view>("results")
      .template Attr<std::string_view>("state")
      .template Attr<int64_t>("axis")
      .template Attr<int64_t>("length")
      .template Attr<bool>("reverse")
      .template Attr<bool>("has_h0")
      .template Attr<bool>("time_last")
      .template Attr<xla::ffi::Span<const int64_t>>("repeated");
}

}  // namespace jax_scan
