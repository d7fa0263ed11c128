// One call of the scan, as the kernels see it: sizes, where each operand's elements lie, and in
// which type.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace jax_scan {

// scan       s <- a s + x;               y = s
// tangent    s <- a s + (da h_prev + x); y = s
// cotangent  u = x + s; s <- a u;        y = u, da_out = u h_prev
// s is the state, x the streamed input (b, db or g), h_prev the value of h one step earlier in the
// scan of h.
enum class Op : uint8_t { kScan, kTangent, kCotangent };

inline constexpr int kMaxAxes = 6;

// Where the element (outer o, time t, inner i) of an operand lies, counted in elements. Axes in
// which the operand is broadcast have stride 0. Neighbouring axes are merged, minor axis first: a
// full operand has one outer and one inner axis.
struct Broadcast {
  struct Axis {
    int64_t size;
    int64_t stride;
  };
  int64_t time_stride = 0;
  int32_t outer_axes = 0;
  int32_t inner_axes = 0;
  Axis outer[kMaxAxes] = {};
  Axis inner[kMaxAxes] = {};

  JAX_SCAN_HD int64_t outer_offset(int64_t o) const { return offset(outer, outer_axes, o); }
  JAX_SCAN_HD int64_t inner_offset(int64_t i) const { return offset(inner, inner_axes, i); }

  // Elements of neighbouring inner indices are neighbours in memory.
  JAX_SCAN_HD bool inner_contiguous() const {
    return inner_axes == 0 || (inner_axes == 1 && inner[0].stride == 1);
  }

 private:
  JAX_SCAN_HD static int64_t offset(const Axis* axes, int count, int64_t index) {
    if (count == 0) return 0;
    if (count == 1) return index * axes[0].stride;
    int64_t sum = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (int k = 0; k < count; ++k) {
      sum += (index % axes[k].size) * axes[k].stride;
      index /= axes[k].size;
    }
    return sum;
  }
};

// data == nullptr: the operand is absent and counts as zero.
struct Input {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  Broadcast at;
};

// Row-major (outer, time, inner), or (outer, inner) for a state and for a sum over time. Where runs
// of indices are summed, a run counts as one. data == nullptr: not wanted.
struct Output {
  void* data = nullptr;
  DType dtype = DType::kF32;
};

struct Problem {
  Op op = Op::kScan;
  DType state = DType::kF32;
  int64_t outer = 0;
  int64_t time = 0;
  int64_t inner = 0;
  bool reverse = false;  // the recurrence of h runs from the last time to the first
  bool has_h0 = false;   // without h0 the first step of h is cut from the past: its a is never read

  Input a;
  Input x;      // b, db or g
  Input da;     // tangent only
  Input h;      // tangent (with da) and cotangent (when da_out is wanted)
  Input h0;     // the h before the first step
  Input init;   // the state that this call starts from: h0, dh0 or the cotangent of the last state
  Input reset;  // bool: true cuts the link to the past

  Output y;       // h, dh or db
  Output da_out;  // cotangent only
  Output final;   // the state that this call ends with: last h, last dh or dh0

  // What da_out is summed over: time, or runs of neighbouring inner or outer indices. At most one
  // of these; kernels that don't sum over runs are not asked for it.
  bool da_over_time = false;
  int64_t da_inner_run = 1;
  int64_t da_outer_run = 1;

  // This call walks time downwards.
  JAX_SCAN_HD bool descending() const { return (op == Op::kCotangent) != reverse; }
  JAX_SCAN_HD int64_t channels() const { return outer * inner; }
  JAX_SCAN_HD bool da_over_runs() const { return da_inner_run * da_outer_run > 1; }
};

}  // namespace jax_scan
