// The scan of problems that the shared memory of all multiprocessors holds at once, from compute
// capability 9.0 on: too long for a cluster of blocks, too short for a pipeline.
//
// One wave. Time is cut into as many pieces as there are multiprocessors for each strip of
// channels; a block has one piece of one strip, each thread a segment of consecutive steps of one
// channel. With the state s that enters a segment, A s + B leaves it, where (A, B) composes the
// steps' affine maps. A block
//   1. orders all of its operands at once, into its shared memory,
//   2. composes its segments' maps as these arrive, and publishes the map of its piece,
//   3. meets all the others, once,
//   4. applies the maps of the pieces before its own to the initial state, and
//   5. runs the recurrence through its segments from there, out of shared memory, and writes.
// So each element is read once, and nothing that could be on its way waits for anything else.
//
// The blocks are those of a cooperative launch: all of them run, and the barrier at which they meet
// needs nothing that would have to be cleared before.
//
// A s + B stands for the step-by-step recurrence only while nothing comes near to overflow. A block
// that is not certain of that for the pieces before its own waits for the state that the last of
// them leaves, which every block tells in the end; if it is not for its own piece, its segments
// take turns, in order. The choice depends on the data alone.
#pragma once

#include <cooperative_groups.h>

#include <type_traits>

#include "cuda/cluster.cuh"
#include "cuda/device.cuh"
#include "cuda/launch.h"
#include "cuda/tma.cuh"

namespace jax_scan {
namespace resident {

// What a piece tells of its map, and when one is certain: within a piece, from piece to piece of
// those that a thread puts together, and from thread to thread of a warp.
using Message = cluster::Message<float>;
using Limits = cluster::Limits<float>;
__device__ __forceinline__ bool within(float product, float local) {
  return product <= Limits::product && local <= Limits::local;
}
// The largest state that a warp's pieces may be applied to: with these three one in another its
// products stay below 2^120, and what they make of the state zero below 2^118.
inline constexpr float kMostState = 0x1p60f;
static_assert(kMostState * Limits::product * Limits::product * Limits::product <= 0x1p120f);

// The state that leaves a piece, once it is there.
struct alignas(8) Left {
  float state;
  uint32_t is_there;
};

// A state of each channel.
struct States {
  const float* data;
  int32_t outer, inner;  // strides
  __device__ float at(int o, int i) const { return data[o * outer + i * inner]; }
};

// What the kernel needs of the problem, together: each line of arguments that is touched costs a
// miss.
struct Args {
  const void *a, *x, *h;
  void *y, *da_out;
  States init, h0;
  float* final;
  Message* maps;  // [strip][piece][channel]
  Left* left;
  int32_t time, inner;
  int32_t pieces;      // of a strip
  int32_t strips;      // of an outer index
  int32_t lanes_log2;  // channels of a strip
  int32_t steps;       // of a segment, in shared memory
  bool boxes;          // strips are parts of rows; else they are whole rows, and runs of memory
  bool has_h0, reverse, descending;
};
struct Tensors {
  CUtensorMap a, x, h;
};

// kLine: fewer channels than make a sector of memory. kHeld: steps of a segment, the first ones,
// that are in registers.
template <Op kOp, class T, bool kLine, int kHeld>
__device__ __forceinline__ void scan_piece(const Args& p, const Tensors& tensors) {
  using S = float;
  constexpr bool kCotangent = kOp == Op::kCotangent;
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));  // elements that are copied in one
  static_assert(kHeld == 0 || !(kLine || kCotangent));

  extern __shared__ __align__(128) char shared[];
  __shared__ Barrier arrived[kResidentWarps], h_arrived[kResidentWarps];
  __shared__ Composed<S> maps[kResidentWarps][32];  // [][channel]: a warp's, then of all before it
  __shared__ Affine<S> bounds[kResidentWarps][32];
  __shared__ Message earlier_pieces[kResidentWarps][32];
  __shared__ bool certain_here[32];
  __shared__ S carry[32];
  static_assert(sizeof(arrived) + sizeof(h_arrived) + sizeof(maps) + sizeof(bounds) +
                    sizeof(earlier_pieces) + sizeof(certain_here) + sizeof(carry) <=
                kResidentBytes - 128);

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  // Lanes side by side are neighbouring channels; the warp has `rows` segments of each.
  const int width = 1 << p.lanes_log2, column = lane & (width - 1);
  const int row = lane >> p.lanes_log2, rows = 32 >> p.lanes_log2;
  const int piece = static_cast<int>(blockIdx.x) % p.pieces;
  const int strip = static_cast<int>(blockIdx.x) / p.pieces;
  const int o = strip / p.strips, i0 = (strip - o * p.strips) * width, i = i0 + column;
  const bool valid = i < p.inner;

  // The walk's steps of this thread: `n` from `first` on.
  const int steps = kHeld + p.steps, segment = warp * rows + row;
  const int first = (piece * warps * rows + segment) * steps;
  const int n = min(max(p.time - first, 0), steps);
  const int first_time = p.descending ? p.time - 1 - first : first;
  const int place = (o * p.time + first_time) * p.inner + i;
  const int jump = p.descending ? -width : width;  // in shared memory
  const int jump_outside = p.descending ? -p.inner : p.inner;
  // The recurrence of h begins at this step.
  const bool has_start = n > 0 && (kCotangent ? first + n == p.time : first == 0);
  const bool cuts = has_start && !p.has_h0;

  // Each operand of a warp, in the order of memory; where segments are held in part, each of these
  // for itself. h is read one step on in the walk: its elements are a step later or earlier, in
  // lines a vector, of which some are not needed.
  const int of_warp = 32 * p.steps;
  const int h_more = kLine ? kVector : 0;
  T* const a_all = reinterpret_cast<T*>(shared) + warp * of_warp;
  T* const x_all = a_all + warps * of_warp;
  T* const h_all = x_all + warps * of_warp + warp * h_more;
  const bool apart = kHeld > 0;
  const int ascending_at = row * p.steps * width + column;
  const int at = !p.descending ? ascending_at
                 : apart       ? ascending_at + (p.steps - 1) * width
                               : of_warp - width - row * p.steps * width + column;
  const int h_at = at + (!kLine ? 0 : p.descending ? kVector - width : width);

  // One lane orders for its warp.
  const auto order = [&](const void* data, const CUtensorMap& tensor, T* to, int shift, int more,
                         Barrier& barrier) {
    // From the lowest time on, of the warp or of its run `r`.
    const int of_run = apart ? p.steps : rows * p.steps;
    const auto low_of = [&](int r) {
      const int begin = first + r * steps + kHeld;
      return p.descending ? p.time - begin - of_run : begin;
    };
    if (!kLine && p.boxes) {
      copy_box(to, &tensor, i0, low_of(0) + shift, o, barrier);
      return of_warp * static_cast<int>(sizeof(T));
    }
    int bytes = 0;
    for (int r = 0; r < (apart ? rows : 1); ++r) {
      const int low = low_of(r) * width + shift * (kLine ? 1 : width);
      const int from = max(low, 0), end = min(low + of_run * width + more, p.time * width);
      if (from >= end) continue;
      const auto size = static_cast<uint32_t>((end - from) * sizeof(T));
      copy_run(to + r * of_run * width + (from - low),
               static_cast<const T*>(data) + o * p.time * width + from, size, barrier);
      bytes += static_cast<int>(size);
    }
    return bytes;
  };
  if (lane == 0) {
    arrived[warp].init(1);
    if constexpr (kCotangent) h_arrived[warp].init(1);
    barriers_are_ready();
    const int bytes = order(p.a, tensors.a, a_all, 0, 0, arrived[warp]) +
                      order(p.x, tensors.x, x_all, 0, 0, arrived[warp]);
    arrived[warp].arrive_and_expect(static_cast<uint32_t>(bytes));
  }
  S a_held[kHeld > 0 ? kHeld : 1], x_held[kHeld > 0 ? kHeld : 1];
  if constexpr (kHeld > 0) {
    const T* a = static_cast<const T*>(p.a) + place;
    const T* x = static_cast<const T*>(p.x) + place;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const bool there = k < n && valid;
      a_held[k] = there ? load_as<S>(a[k * jump_outside]) : S(1);
      x_held[k] = there ? load_as<S>(x[k * jump_outside]) : S(0);
    }
  }
  S entering = S(0), h0 = S(0);
  if (p.init.data && valid) entering = p.init.at(o, i);
  if (kCotangent && has_start && p.h0.data && valid) h0 = p.h0.at(o, i);

  __syncwarp();

  // The segment's map, and what no partial product and no partial result exceeds.
  Composed<S> map;
  Affine<S> bound{S(1), S(0)};
  const auto compose_step = [&](S a, S x, bool cut) {
    const Written<S> out = advance<kOp>(map.b, Step<S>{a, x, S(0), cut});
    const Product<S> composed = product(a, map.a);
    map.lost = cut ? S(0) : mul_add(a, map.lost, composed.lost);
    map.a = cut ? S(0) : composed.rounded;
    bound.a = larger<S>(bound.a, magnitude(map.a));
    bound.b = larger<S>(bound.b, reach<kOp>(map.b, out));
  };
#pragma unroll
  for (int k = 0; k < kHeld; ++k) compose_step(a_held[k], x_held[k], k == 0 && cuts);
  arrived[warp].wait(0);
  if constexpr (kCotangent) {
    // h is needed later, and comes later: before it, all have what they compose.
    if (lane == 0 && p.h) {
      const int past = p.reverse ? -1 : 1;
      const int shift = !kLine ? -past : p.descending ? -kVector : 0;
      const int bytes = order(p.h, tensors.h, h_all, shift, h_more, h_arrived[warp]);
      h_arrived[warp].arrive_and_expect(static_cast<uint32_t>(bytes));
    }
    __syncwarp();
  }
  {
    const T* a = a_all + at;
    const T* x = x_all + at;
    const auto compose_next = [&](bool cut) {
      compose_step(load_as<S>(*a), load_as<S>(*x), cut);
      a += jump;
      x += jump;
    };
    int left = n - kHeld;
    const bool cuts_first = !kCotangent && kHeld == 0 && cuts, cuts_last = kCotangent && cuts;
    if (cuts_first) compose_next(true);
    if (cuts_first || cuts_last) --left;
#pragma unroll 4
    for (; left > 0; --left) compose_next(false);
    if (cuts_last) compose_next(true);
  }
  // Of the warp's segments up to this one.
#pragma unroll 1
  for (int delta = width; delta < 32; delta *= 2) {
    const Composed<S> earlier = shuffle_up(map, delta);
    const Affine<S> bound_of{shuffle_up(bound.a, delta), shuffle_up(bound.b, delta)};
    if (lane >= delta) {
      bound = bound_of_both(bound, earlier, bound_of);
      map = compose(map, earlier);
    }
  }
  // Whether it holds for all lanes that have this one's channel.
  const auto in_all_rows = [&](bool holds) {
    if (__all_sync(kAll, holds)) return true;
    int result = holds;
    for (int delta = width; delta < 32; delta *= 2) result &= __shfl_xor_sync(kAll, result, delta);
    return result != 0;
  };
  // Of every row, as lanes put the same maps together in different ways.
  if (!in_all_rows(within(bound.a, bound.b))) bound.a = __int_as_float(0x7f800000);
  Composed<S> before = shuffle_up(map, width % 32);
  if (lane < width) before = {};
  if (lane >= 32 - width) {
    maps[warp][column] = map;
    bounds[warp][column] = bound;
  }
  __syncthreads();

  const int of_strip = strip * p.pieces;
  if (warp == 0) {
    Composed<S> total;
    Affine<S> bound_of_total{S(1), S(0)};
#pragma unroll 4
    for (int k = 0; k < warps; ++k) {
      const Composed<S> next = maps[k][column];
      const Affine<S> bound_of_next = bounds[k][column];
      __syncwarp();
      if (lane < width) maps[k][column] = total;
      bound_of_total = bound_of_both(bound_of_next, total, bound_of_total);
      total = compose(next, total);
    }
    const bool certain = within(bound_of_total.a, bound_of_total.b);
    if (lane < width) {
      certain_here[column] = certain;
      const int at_piece = (of_strip + piece) * width + column;
      store_whole(&p.maps[at_piece], Message::of(total.rounded(), certain));
      store_whole(&p.left[at_piece], Left{S(0), 0});
    }
  }
  cooperative_groups::this_grid().sync();

  // The pieces before this one, some for each of the block's segments.
  if (piece > 0) {
    const int each = (p.pieces + warps * rows - 1) / (warps * rows);
    const int begin = segment * each, end = min(begin + each, piece);
    constexpr int kBatch = 10;
    Composed<S> total;
    bool certain = true;
    const auto follow = [&](Composed<S> second, Composed<S> first) {
      total = compose(second, first);
      certain = certain & within(magnitude(total.a), magnitude(total.b));
    };
#pragma unroll 1
    for (int k = begin; k < end; k += kBatch) {
      Message messages[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        messages[j] = Message::of({}, true);
        if (k + j < end) messages[j] = load_whole(&p.maps[(of_strip + k + j) * width + column]);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const Affine<S> next = messages[j].map();
        certain = certain & messages[j].certain();
        follow(Composed<S>{next.a, S(0), next.b}, total);
      }
    }
#pragma unroll 1
    for (int delta = width; delta < 32; delta *= 2) {
      const Composed<S> earlier = shuffle_up(total, delta);
      if (lane >= delta) follow(total, earlier);
    }
    certain = in_all_rows(certain);
    if (lane >= 32 - width) earlier_pieces[warp][column] = Message::of(total.rounded(), certain);
    __syncthreads();
    const int used = (piece - 1) / (each * rows) + 1;  // warps
    S s = entering;
    bool usual = true;
#pragma unroll 4
    for (int k = 0; k < used; ++k) {
      const Message message = earlier_pieces[k][column];
      usual = usual & message.certain() & (magnitude(s) <= kMostState);
      s = apply(message.map(), s);
    }
    if (!usual) {
      Left left;
      do {
        left = load_whole(&p.left[(of_strip + piece - 1) * width + column]);
      } while (left.is_there == 0);
      s = left.state;
    }
    entering = s;
  }

  // Runs the recurrence from `s`, and writes; lines to the places of the operands.
  S s = apply(before, apply(maps[warp][column], entering));
  const bool uses_h = kCotangent && p.h;
  const bool writes_y = p.y && valid, writes_da = uses_h && p.da_out && valid;
  const auto run = [&] {
    T* y = static_cast<T*>(p.y) + (kLine ? 0 : place);
    T* da_out = static_cast<T*>(p.da_out) + (kLine ? 0 : place);
    T* a = a_all + at;
    T* x = x_all + at;
    const T* h = h_all + h_at;
    const auto run_step = [&](S a_value, S x_value, S h_value, bool cut) {
      const Written<S> out = advance<kOp>(s, Step<S>{a_value, x_value, h_value, cut});
      if constexpr (kLine) {
        *x = store_as<T>(out.y);
        if constexpr (kCotangent) *a = store_as<T>(out.da_out);
      } else {
        if (writes_y) *y = store_as<T>(out.y);
        y += jump_outside;
        if constexpr (kCotangent) {
          if (writes_da) *da_out = store_as<T>(out.da_out);
          da_out += jump_outside;
        }
      }
    };
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (k < n) run_step(a_held[k], x_held[k], S(0), k == 0 && cuts);
      // The compiler would compute the addresses of all steps ahead.
      asm volatile("" : "+l"(y));
    }
    const auto run_next = [&](S h_value, bool cut) {
      run_step(load_as<S>(*a), load_as<S>(*x), h_value, cut);
      a += jump;
      x += jump;
      h += jump;
    };
    int left = n - kHeld;
    const bool starts_here = !kCotangent && kHeld == 0 && has_start;
    const bool ends_here = kCotangent && has_start;
    if (starts_here) run_next(S(0), cuts);
    if (starts_here || ends_here) --left;
#pragma unroll 4
    for (; left > 0; --left) run_next(uses_h ? load_as<S>(*h) : S(0), false);
    if (ends_here) run_next(h0, cuts);
  };
  if constexpr (kCotangent) {
    if (p.h) h_arrived[warp].wait(0);
  }
  // Channels whose segments take turns, the same for all warps.
  const bool takes_turns = !certain_here[column] || !state_within(entering);
  const bool any_turns = __any_sync(kAll, takes_turns);
  if (any_turns && warp == 0 && lane < width) carry[column] = entering;
  const int last_turn = any_turns ? warps * rows : 0;
#pragma unroll 1
  for (int turn = -1; turn < last_turn; ++turn) {
    if (turn >= 0) __syncthreads();
    if (takes_turns ? segment == turn : turn < 0) {
      if (takes_turns) s = carry[column];
      run();
      if (takes_turns) carry[column] = s;
    }
  }
  if (segment == warps * rows - 1 && piece + 1 < p.pieces) {
    store_whole(&p.left[(of_strip + piece) * width + column], Left{s, 1});
  }
  if (p.final && valid && n > 0 && first + n == p.time) p.final[o * p.inner + i] = s;
  if constexpr (kLine) {
    __syncwarp();
    const int begin = first - row * steps;
    const int low = (p.descending ? p.time - begin - rows * steps : begin) * width;
    const auto write = [&](void* to, const T* from) {
      if (!to) return;
      T* const channel = static_cast<T*>(to) + o * p.time * width;
#pragma unroll 4
      for (int e = lane * kVector; e < of_warp; e += 32 * kVector) {
        if (low + e < 0 || low + e >= p.time * width) continue;
        using Vector = Pack<T, kVector>;
        *reinterpret_cast<Vector*>(channel + low + e) = *reinterpret_cast<const Vector*>(from + e);
      }
    };
    write(p.y, x_all);
    if constexpr (kCotangent) {
      if (uses_h) write(p.da_out, a_all);
    }
  }
}

}  // namespace resident

template <Op kOp, class T, bool kLine, int kHeld>
__global__ void __launch_bounds__(32 * kResidentWarps, 1)
    resident_kernel([[maybe_unused]] const __grid_constant__ resident::Args args,
                    [[maybe_unused]] const __grid_constant__ resident::Tensors tensors) {
  if constexpr (kHasBulkCopies) resident::scan_piece<kOp, T, kLine, kHeld>(args, tensors);
}

namespace resident {

template <Op kOp, class T, bool kLine, int kHeld>
cudaError_t launch_op(const Problem& p, const ResidentPlan& plan, void* workspace,
                      cudaStream_t stream) {
  const int64_t width = int64_t{1} << plan.lanes_log2;
  const auto states = [](const Input& in) {
    return States{static_cast<const float*>(in.data),
                  static_cast<int32_t>(in.at.outer_axes > 0 ? in.at.outer[0].stride : 0),
                  static_cast<int32_t>(in.at.inner_axes > 0 ? in.at.inner[0].stride : 0)};
  };
  Args args{};
  args.a = p.a.data;
  args.x = p.x.data;
  args.h = p.h.data;
  args.y = p.y.data;
  args.da_out = p.da_out.data;
  args.init = states(p.init);
  args.h0 = states(p.h0);
  args.final = static_cast<float*>(p.final.data);
  args.maps = static_cast<Message*>(workspace);
  args.left = reinterpret_cast<Left*>(args.maps + plan.blocks * width);
  args.time = static_cast<int32_t>(p.time);
  args.inner = static_cast<int32_t>(p.inner);
  args.pieces = plan.pieces;
  args.strips = plan.strips;
  args.lanes_log2 = plan.lanes_log2;
  args.steps = plan.steps;
  args.boxes = plan.boxes;
  args.has_h0 = p.has_h0;
  args.reverse = p.reverse;
  args.descending = p.descending();
  Tensors tensors{};
  cudaError_t error = cudaSuccess;
  if (plan.boxes) {
    error = boxes_of<T>(p, p.a, width, plan.steps, tensors.a);
    if (error == cudaSuccess) error = boxes_of<T>(p, p.x, width, plan.steps, tensors.x);
    if (error == cudaSuccess && p.h.data) {
      error = boxes_of<T>(p, p.h, width, plan.steps, tensors.h);
    }
    if (error != cudaSuccess) return error;
  }
  const auto kernel = resident_kernel<kOp, T, kLine, kHeld>;
  error = prepare_for_hopper(kernel, plan.most_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute together{};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks));
  config.blockDim = dim3(static_cast<unsigned>(32 * plan.warps));
  config.dynamicSmemBytes = static_cast<size_t>(plan.shared_bytes);
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = 1;
  int blocks = 0;  // that run at a time on a multiprocessor
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 32 * plan.warps,
                                                        config.dynamicSmemBytes);
  if (error == cudaSuccess && blocks == 0) return cudaErrorNotSupported;
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, args, tensors);
  // Of the GPU's multiprocessors a context may have a part.
  if (error != cudaErrorCooperativeLaunchTooLarge) return error;
  cudaGetLastError();
  return cudaErrorNotSupported;
}

}  // namespace resident

template <class T>
cudaError_t launch_resident(const Problem& p, const ResidentPlan& plan, void* workspace,
                            cudaStream_t stream) {
  using resident::launch_op;
  constexpr Op kScan = Op::kScan, kCotangent = Op::kCotangent;
  const auto launch = p.op == kCotangent ? plan.line ? launch_op<kCotangent, T, true, 0>
                                                     : launch_op<kCotangent, T, false, 0>
                      : plan.line        ? launch_op<kScan, T, true, 0>
                                         : launch_op<kScan, T, false, 0>;
  if constexpr (sizeof(T) == 4) {
    if (plan.held > 0) return launch_op<kScan, T, false, kResidentHeld>(p, plan, workspace, stream);
  }
  return launch(p, plan, workspace, stream);
}

}  // namespace jax_scan
