// The scan of many channels whose time is contiguous in memory, from compute capability 9.0 on.
//
// An array is taken as rows of 128 bytes. A stage is up to 32 consecutive rows of one channel, of
// which each lane of a warp has one. A block takes whole channels, one after the other, stage by
// stage, in a ring in shared memory:
//   one thread orders the rows of stages by the tensor memory accelerator, so many ahead,
//   warps take stages by turns. A warp composes the affine map of each row and, by shuffles, of all
//   rows before it, waits for the state that the warp of the stage before leaves, hands on the one
//   that comes out, runs the recurrence through its rows, gives the slot back, and writes.
// So all but the application of a map overlaps, and no state has to travel between blocks.
//
// Rows are those of the whole array, wherever channels begin: what a row has of a neighbouring
// channel counts as steps that change nothing. Whether a map may be applied is settled as in
// chained.cuh; if not, lanes take turns, in order.
//
// Barriers: `empty`, for each slot, that its warp is through; for each stage, `full`, that its rows
// have come, `begun`, that its warp has begun with them, and `left`, that it has left the state. Of
// the latter three there are so many that none is waited for while an earlier use of it is not
// over.
#pragma once

#include <type_traits>

#include "cuda/device.cuh"
#include "cuda/launch.h"
#include "cuda/tma.cuh"

namespace jax_scan {
namespace lined {

// What a kernel needs besides the problem.
struct Lines {
  CUtensorMap a, x, h;
  int64_t rows_of_array;  // whole ones
  int32_t rows, stages;   // of a stage, of a channel
  int32_t slots;
  uint32_t ahead;         // stages that are on their way at a time
  int32_t operand_bytes;  // of a slot
};

// Where a stage lies. Elements and rows are those of the array.
struct Stage {
  uint32_t channel;
  int index;           // of the channel's stages
  int64_t begin, end;  // the channel's elements
  int64_t low;         // the lowest row, which may be one of a neighbour or none

  template <class T, bool kDescending>
  __device__ static Stage of(const Problem& p, const Lines& lines, uint32_t count) {
    constexpr int kRow = 128 / static_cast<int>(sizeof(T));
    Stage at;
    const uint32_t turn = count / lines.stages;
    at.index = static_cast<int>(count - turn * lines.stages);
    at.channel = blockIdx.x + turn * gridDim.x;
    at.begin = at.channel * p.time;
    at.end = at.begin + p.time;
    at.low = kDescending ? (at.end + kRow - 1) / kRow - int64_t{at.index + 1} * lines.rows
                         : at.begin / kRow + int64_t{at.index} * lines.rows;
    return at;
  }
};

// Elements of a row in the order of the walk, from piece to piece.
template <class T, bool kDescending>
struct Row {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  static constexpr int kPieces = 8, kSteps = kPieces * kElements;
  using Piece = Pack<T, kElements>;
  static __device__ __forceinline__ int piece(int v) { return kDescending ? kPieces - 1 - v : v; }
  static __device__ __forceinline__ constexpr int element(int e) {
    return kDescending ? kElements - 1 - e : e;
  }
  // Piece v of the walk through row `row`, of rows that begin at `rows`.
  static __device__ __forceinline__ Piece& at(char* rows, int row, int v) {
    return *reinterpret_cast<Piece*>(rows + row * 128 + (piece(v) ^ row % 8) * 16);
  }
};

template <Op kOp, class T, bool kDescending>
__device__ __forceinline__ void walk_lines(const Problem& p, const Lines& lines) {
  using S = StateOf<T>;
  using R = Real<S>;
  using Mine = Row<T, kDescending>;
  using Piece = typename Mine::Piece;
  constexpr bool kCotangent = kOp == Op::kCotangent;
  constexpr int kRow = Mine::kSteps, kPieces = Mine::kPieces, kElements = Mine::kElements;
  constexpr int kUnroll = line_unroll(sizeof(T));
  constexpr bool kCountsHalf = line_counts_half(kOp, sizeof(T));

  extern __shared__ __align__(1024) char ring[];
  __shared__ Barrier empty[kMostLineSlots], full[kLinesInFlight], begun[kLinesInFlight];
  __shared__ Barrier left[kLinesInFlight];
  __shared__ S states[kLinesInFlight];  // that stages leave
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(blockDim.x) / 32 - 1;
  const bool uses_h = kCotangent && p.h.data;
  const int operands = uses_h ? 3 : 2, slot_bytes = operands * lines.operand_bytes;
  if (threadIdx.x == 0) {
    for (int k = 0; k < lines.slots; ++k) empty[k].init(1);
    for (int k = 0; k < kLinesInFlight; ++k) {
      full[k].init(1);
      begun[k].init(1);
      left[k].init(1);
    }
    barriers_are_ready();
  }
  __syncthreads();

  const auto channels = static_cast<uint32_t>(p.outer);
  const uint32_t all = (channels - blockIdx.x + gridDim.x - 1) / gridDim.x * lines.stages;
  // Of the barriers for a stage.
  const auto parity_of = [](uint32_t stage) { return stage / kLinesInFlight & 1; };
  if (warp == warps) {
    if (lane > 0) return;
    int slot = 0;
    uint32_t parity = 0;
    for (uint32_t k = 0; k < all; ++k) {
      const auto low = static_cast<int>(Stage::of<T, kDescending>(p, lines, k).low);
      const uint32_t earlier = k - lines.ahead;
      if (k >= lines.ahead) begun[earlier % kLinesInFlight].wait(parity_of(earlier));
      empty[slot].wait(parity ^ 1);  // which a new barrier does not wait for
      Barrier& here = full[k % kLinesInFlight];
      char* const to = ring + slot * slot_bytes;
      here.arrive_and_expect(static_cast<uint32_t>(operands * lines.rows * 128));
      copy_rows(to, &lines.a, low, here);
      copy_rows(to + lines.operand_bytes, &lines.x, low, here);
      if (uses_h) copy_rows(to + 2 * lines.operand_bytes, &lines.h, low, here);
      if (++slot == lines.slots) {
        slot = 0;
        parity ^= 1;
      }
    }
    return;
  }

  // Where results meet before they are written: not in the operands' places, as bulk copies to
  // these would have to wait until all that the warp has written is in memory.
  char* const y_rows = ring + lines.slots * slot_bytes + warp * (uses_h ? 2 : 1) * kLineStageBytes;
  char* const da_rows = y_rows + (uses_h ? kLineStageBytes : 0);
  const bool used = lane < lines.rows;
  const int row = !used ? 0 : kDescending ? lines.rows - 1 - lane : lane;  // of a stage
  for (uint32_t k = warp; k < all; k += warps) {
    const Stage at = Stage::of<T, kDescending>(p, lines, k);
    const int64_t first = at.low * kRow, behind = first + lines.rows * kRow;  // elements
    // What takes long is asked for before the operands are there.
    S s = S(0);
    if (at.index == 0 && p.init.data) s = load_one<S>(p.init, at.channel, 0, 0);
    [[maybe_unused]] S h0 = S(0), h_after = S(0);  // h one step on from the last row
    if constexpr (kCotangent) {
      if (uses_h && p.h0.data && (kDescending ? first <= at.begin : behind >= at.end)) {
        h0 = load_one<S>(p.h0, at.channel, 0, 0);
      }
      const int64_t next = kDescending ? first - 1 : behind;
      if (uses_h && lane == lines.rows - 1 && next >= at.begin && next < at.end) {
        h_after = load_as<S>(static_cast<const T*>(p.h.data)[next]);
      }
    }
    // Steps [from, to) of this lane are the channel's.
    const int64_t low = first + row * kRow;
    const int below = static_cast<int>(min(max(at.begin - low, int64_t{0}), int64_t{kRow}));
    const int above = static_cast<int>(min(max(low + kRow - at.end, int64_t{0}), int64_t{kRow}));
    const int from = kDescending ? above : below, to = kRow - (kDescending ? below : above);
    const bool active = used && from < to;
    const bool has_low = active && low <= at.begin, has_high = active && low + kRow >= at.end;
    // The recurrence of h begins at this step.
    const bool has_start = p.reverse ? has_high : has_low;
    const int start = !has_start ? -1 : kCotangent ? to - 1 : from;
    const bool cuts = has_start && !p.has_h0;
    const bool inside = first >= at.begin && behind <= at.end;
    const bool plain = !__any_sync(0xffffffffu, active && to - from < kRow);

    const auto slot = static_cast<int>(k % lines.slots);
    char* const operand = ring + slot * slot_bytes;
    char* const a_rows = operand;
    char* const x_rows = operand + lines.operand_bytes;
    char* const h_rows = operand + (uses_h ? 2 : 1) * lines.operand_bytes;
    full[k % kLinesInFlight].wait(parity_of(k));
    // The stage is no longer on its way.
    const auto begin = [&] {
      __syncwarp();
      if (lane == 0) begun[k % kLinesInFlight].arrive();
    };
    if (!kCountsHalf) begin();
    // The array's last row, if it is not a whole one.
    if (at.low + lines.rows > lines.rows_of_array) {
      const auto last = static_cast<int>(lines.rows_of_array - at.low);
      for (int e = lane; e < kRow; e += 32) {
        const int64_t index = first + last * kRow + e;
        const int place = last * 128 + (e / kElements ^ last % 8) * 16;
        const auto bring = [&](char* rows, const Input& in) {
          reinterpret_cast<T*>(rows + place)[e % kElements] = static_cast<const T*>(in.data)[index];
        };
        if (last < 0 || index >= at.end) break;
        bring(a_rows, p.a);
        bring(x_rows, p.x);
        if (uses_h) bring(h_rows, p.h);
      }
      before_bulk_copies();
      __syncwarp();
    }
    if constexpr (kCotangent) {
      if (uses_h) {
        const S next = shuffle_down(load_as<S>(Mine::at(h_rows, row, 0).v[Mine::element(0)]), 1);
        if (lane != lines.rows - 1) h_after = next;
      }
      if (plain && has_start) h_after = h0;
    }

    // The map of this row, then of all rows up to it, and what no partial product and no partial
    // result exceeds.
    Composed<S> map;
    Affine<R> bound{R(1), R(0)};
    // Whether the step is the channel's, and whether it is cut from the past. A row that is the
    // channel's as a whole begins or ends with the start.
    const auto within = [&](auto is_plain, int step) {
      return is_plain.value ||
             static_cast<unsigned>(step - from) < static_cast<unsigned>(to - from);
    };
    const auto cut_at = [&](auto is_plain, int v, int e) {
      if (!is_plain.value) return cuts && v * kElements + e == start;
      return kCotangent ? e + 1 == kElements && v + 1 == kPieces && cuts : e == 0 && v == 0 && cuts;
    };
    const auto compose_row = [&](auto is_plain) {
#pragma unroll kUnroll
      for (int v = 0; v < kPieces; ++v) {
        if (kCountsHalf && v == kPieces / 2) begin();
        const Piece a = Mine::at(a_rows, row, v), x = Mine::at(x_rows, row, v);
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const bool cut = cut_at(is_plain, v, e);
          Step<S> in{load_as<S>(a.v[Mine::element(e)]), load_as<S>(x.v[Mine::element(e)]), S(0),
                     cut};
          if (!within(is_plain, v * kElements + e)) {
            in.a = S(1);
            in.x = S(0);
          }
          const Written<S> out = advance<kOp>(map.b, in);
          const Product<S> composed = product(in.a, map.a);
          // A select: a NaN before the cut ends there, and the bound would not tell of it.
          map.lost = cut ? S(0) : mul_add(in.a, map.lost, composed.lost);
          map.a = cut ? S(0) : composed.rounded;
          bound.a = larger<S>(bound.a, magnitude(map.a));
          bound.b = larger<S>(bound.b, reach<kOp>(map.b, out));
        }
      }
    };
    if (plain) {
      compose_row(std::true_type{});
    } else {
      compose_row(std::false_type{});
    }
    if (!active) {  // what it has composed is not the channel's
      map = {};
      bound = {R(1), R(0)};
    }
    __syncwarp();
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
      const Composed<S> earlier = shuffle_up(map, delta);
      const Affine<R> bound_of{shuffle_up(bound.a, delta), shuffle_up(bound.b, delta)};
      if (lane >= delta) {
        bound = bound_of_both(bound, earlier, bound_of);
        map = compose(map, earlier);
      }
    }
    // Of every row, as lanes put the same maps together in different ways.
    const bool certain =
        __all_sync(0xffffffffu, bound.a <= Bounds<R>::product && bound.b <= Bounds<R>::local);
    Composed<S> before = shuffle_up(map, 1);
    if (lane == 0) before = {};

    if (at.index > 0) {
      left[(k - 1) % kLinesInFlight].wait(parity_of(k - 1));
      s = states[(k - 1) % kLinesInFlight];
    }
    const auto leave = [&](S state) {
      if (lane == 31) {
        states[k % kLinesInFlight] = state;
        left[k % kLinesInFlight].arrive();
      }
    };
    const bool in_turns = !certain || !state_within(s);
    if (!in_turns) {
      leave(apply(map, s));
      s = apply(before, s);
    }

    const auto run_row = [&](auto is_plain) {
      [[maybe_unused]] Piece h_next{};
      if constexpr (kCotangent) {
        if (uses_h) h_next = Mine::at(h_rows, row, 0);
      }
#pragma unroll kUnroll
      for (int v = 0; v < kPieces; ++v) {
        const Piece a = Mine::at(a_rows, row, v), x = Mine::at(x_rows, row, v);
        Piece y;
        [[maybe_unused]] const Piece h = h_next;
        [[maybe_unused]] Piece da;
        [[maybe_unused]] const bool is_last = v + 1 == kPieces;
        if constexpr (kCotangent) {
          if (uses_h && !is_last) h_next = Mine::at(h_rows, row, v + 1);
        }
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const int step = v * kElements + e;
          Step<S> in{load_as<S>(a.v[Mine::element(e)]), load_as<S>(x.v[Mine::element(e)]), S(0),
                     cut_at(is_plain, v, e)};
          if constexpr (kCotangent) {
            if (e + 1 < kElements) {
              in.h = load_as<S>(h.v[Mine::element(e + 1)]);
            } else {
              in.h = is_last ? h_after : load_as<S>(h_next.v[Mine::element(0)]);
            }
            if (!is_plain.value && step == start) in.h = h0;
          }
          [[maybe_unused]] const S earlier = s;
          const Written<S> out = advance<kOp>(s, in);
          if (!within(is_plain, step)) s = earlier;
          y.v[Mine::element(e)] = store_as<T>(out.y);
          if constexpr (kCotangent) da.v[Mine::element(e)] = store_as<T>(out.da_out);
        }
        Mine::at(y_rows, row, v) = y;
        if constexpr (kCotangent) {
          if (uses_h) Mine::at(da_rows, row, v) = da;
        }
      }
    };
    S carry = s;
    for (int turn = in_turns ? 0 : 31; turn < 32; ++turn) {
      if (in_turns) s = carry;
      if (active && (!in_turns || lane == turn)) {
        if (plain) {
          run_row(std::true_type{});
        } else {
          run_row(std::false_type{});
        }
      }
      __syncwarp();
      if (in_turns) carry = shuffle_from(s, turn);
    }
    if (lane == 0) empty[slot].arrive();
    if (in_turns) leave(carry);
    if (p.final.data && (kDescending ? has_low : has_high)) store_one(p.final, at.channel, s);

    // To memory, each eight lanes a row.
    const auto write = [&](T* to_array, const char* rows) {
      if (!to_array) return;
      const int piece = lane % 8, first_row = lane / 8;
      const auto piece_at = [&](int r, int v) -> const Piece& {
        return *reinterpret_cast<const Piece*>(rows + r * 128 + (v ^ r % 8) * 16);
      };
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int r = n * 4 + first_row;
        const int64_t index = first + r * kRow + piece * kElements;
        if (r < lines.rows && (inside || (index >= at.begin && index + kElements <= at.end))) {
          *reinterpret_cast<Piece*>(to_array + index) = piece_at(r, piece);
        }
      }
      if (inside) return;
      // The pieces in which the channel begins and ends.
      const int64_t of_piece = lane < 16 ? at.begin : at.end;
      const int64_t index = of_piece / kElements * kElements + lane % 16;
      if (lane % 16 < kElements && index >= max(at.begin, first) && index < min(at.end, behind)) {
        const auto e = static_cast<int>(index - first);
        to_array[index] = piece_at(e / kRow, e % kRow / kElements).v[e % kElements];
      }
    };
    write(static_cast<T*>(p.y.data), y_rows);
    if constexpr (kCotangent) {
      if (uses_h) write(static_cast<T*>(p.da_out.data), da_rows);
    }
    // synccheck asks for it: nobody takes the state that a channel's last stage leaves.
    if (at.index == 0 && k > 0) left[(k - 1) % kLinesInFlight].wait(parity_of(k - 1));
    __syncwarp();
  }
}

}  // namespace lined

template <Op kOp, class T, bool kDescending>
__global__ void __launch_bounds__(32 * kMostLineWarps + 32, 1)
    lined_kernel(const __grid_constant__ Problem p, const __grid_constant__ lined::Lines lines) {
  if constexpr (kHasBulkCopies) lined::walk_lines<kOp, T, kDescending>(p, lines);
}

namespace lined {

template <Op kOp, class T, bool kDescending>
cudaError_t launch_op(const Problem& p, const LinedPlan& plan, cudaStream_t stream) {
  Lines lines{};
  lines.rows_of_array = p.channels() * p.time * static_cast<int64_t>(sizeof(T)) / 128;
  lines.rows = plan.rows;
  lines.stages = plan.stages;
  lines.slots = plan.slots;
  lines.ahead = static_cast<uint32_t>(plan.ahead);
  lines.operand_bytes = plan.operand_bytes;
  cudaError_t error = rows_of<T>(p.a.data, lines.rows_of_array, plan.rows, lines.a);
  if (error == cudaSuccess) error = rows_of<T>(p.x.data, lines.rows_of_array, plan.rows, lines.x);
  if (error == cudaSuccess && p.h.data) {
    error = rows_of<T>(p.h.data, lines.rows_of_array, plan.rows, lines.h);
  }
  if (error != cudaSuccess) return error;
  const auto kernel = lined_kernel<kOp, T, kDescending>;
  error = prepare_for_hopper(kernel, plan.most_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(plan.blocks), 32 * plan.warps + 32, plan.shared_bytes, stream>>>(
      p, lines);
  return cudaGetLastError();
}

}  // namespace lined

template <class T>
cudaError_t launch_lined(const Problem& p, const LinedPlan& plan, cudaStream_t stream) {
  if (p.op == Op::kCotangent) {
    return p.descending() ? lined::launch_op<Op::kCotangent, T, true>(p, plan, stream)
                          : lined::launch_op<Op::kCotangent, T, false>(p, plan, stream);
  }
  return p.descending() ? lined::launch_op<Op::kScan, T, true>(p, plan, stream)
                        : lined::launch_op<Op::kScan, T, false>(p, plan, stream);
}

}  // namespace jax_scan
