#include "cpu/handler.h"

#include <atomic>
#include <cstdint>
#include <exception>
#include <span>
#include <string_view>
#include <utility>

#include "core/operands.h"
#include "core/problem.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"
#include "xla/ffi/api/ffi.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jax_scan::cpu {
namespace {

namespace ffi = xla::ffi;

// Asks for huge pages under a large result, as NumPy does for its arrays. glibc maps large arrays
// afresh for each call, and a fault for every 4 KB then takes several times as long as the scan.
// Only advice: where it is not followed, nothing changes.
void advise_huge_pages([[maybe_unused]] const Output& output, [[maybe_unused]] int64_t elements) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kLeast = uintptr_t{4} << 20, kPage = uintptr_t{2} << 20;
  const uintptr_t bytes = elements * byte_size(output.dtype);
  if (!output.data || bytes < kLeast) return;
  const auto address = reinterpret_cast<uintptr_t>(output.data);
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage;
  const uintptr_t end = (address + bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

template <Op kOp>
ffi::Error run(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
               std::string_view operands, std::string_view results, std::string_view state,
               int64_t axis, int64_t length, bool reverse, bool has_h0, bool time_last,
               ffi::Span<const int64_t> repeated) {
  Call call;
  const ffi::Error error = decode(kOp, args, rets,
                                  {operands, results, state, axis, length, reverse, has_h0,
                                   time_last, std::span(repeated.begin(), repeated.size())},
                                  sums_da, call);
  if (error.failure()) return error;
  const Problem& problem = call.problem;
  advise_huge_pages(problem.y, problem.channels() * problem.time);
  if (!problem.da_over_time && !problem.da_over_runs()) {
    advise_huge_pages(problem.da_out, problem.channels() * problem.time);
  }
  const bool serial = problem.channels() * problem.time < kSerialElements;
  const int64_t threads = serial ? 1 : pool.num_threads();
  const Tiling tiling(problem, threads);
  const InstructionSet set = best_instruction_set();
  std::atomic<bool> out_of_memory{!tiling.ready()};
  const int64_t tiles = tiling.ready() ? tiling.count() : 0;
  parallel_for(
      tiles, threads - 1, [&](auto task) { pool.Schedule(std::move(task)); },
      [&](int64_t index) {
        if (!run_tile(problem, tiling.blocks(), tiling.tile(index), set)) {
          out_of_memory.store(true, std::memory_order_relaxed);
        }
      });
  if (out_of_memory.load(std::memory_order_relaxed)) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jax_scan: no memory for buffers");
  }
  tiling.finish(problem);
  return ffi::Error::Success();
}

template <Op kOp>
XLA_FFI_Error* handle(XLA_FFI_CallFrame* call_frame) {
  static const auto* handler =
      bind_operands(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()).To(run<kOp>).release();
  return handler->Call(call_frame);
}

}  // namespace

XLA_FFI_Error* scan_handler(XLA_FFI_CallFrame* call_frame) { return handle<Op::kScan>(call_frame); }
XLA_FFI_Error* tangent_handler(XLA_FFI_CallFrame* call_frame) {
  return handle<Op::kTangent>(call_frame);
}
XLA_FFI_Error* cotangent_handler(XLA_FFI_CallFrame* call_frame) {
  return handle<Op::kCotangent>(call_frame);
}

}  // namespace jax_scan::cpu
