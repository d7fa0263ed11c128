// The scan that walks each channel's time in order, whose operands the tensor memory accelerator of
// compute capability 9.0 and later brings to shared memory, a box of steps x channels at a time.
//
// A block has neighbouring channels of one outer index, a thread one of them, or two of 16 bits.
// One warp orders boxes as fast as slots of the ring become free, with one instruction for each
// operand. The others form teams, which take the boxes by turns: a team takes a box's steps to
// registers, gives the slot back, waits for the state from the team before it, runs the recurrence,
// hands the state on, and then writes. So all but the recurrence overlaps. Beside sequential.cuh,
// which copies in 16-byte pieces and so serves every layout, this serves whole arrays. Only a may
// be shared (BoxedA in plan.h), and resets are the same for all inner indices: a warp's lanes load
// those of a box, a turn ahead, and a box without any is walked as if there were none. da is summed
// over time in registers, or over inner indices by a warp and then by a second kernel. Kernels
// without all that are apart: in a stage of theirs there is less to do and to read of the program.
//
// Barriers: `full`, for each slot, that its box has come; `empty`, that all warps of the team have
// it; a named one, for each warp, that the state of its channels lies in `states`.
#pragma once

#include "cuda/device.cuh"
#include "cuda/launch.h"
#include "cuda/sum_over_tiles.cuh"
#include "cuda/tma.cuh"

namespace jax_scan {
namespace boxed {

// The types of a, x, h, y and da_out.
template <Op kOp, class A_, class B, class H_>
struct Types {
  static constexpr bool kCotangent = kOp == Op::kCotangent;
  using A = A_;
  using X = std::conditional_t<kCotangent, H_, B>;
  using H = H_;
  using Y = std::conditional_t<kCotangent, B, H_>;
  using S = StateOf<B>;
  static constexpr int kVector = channels_of_lane(sizeof(B));
};

// What a kernel needs besides the problem.
struct Boxes {
  CUtensorMap a, x, h;
  int32_t width;   // channels of a block
  int32_t strips;  // blocks side by side
  int32_t slots, teams;
  int32_t a_bytes, x_bytes, h_bytes;  // of a box, or of the place of a run of a
  BoxedA way_of_a;
  bool outer_shares_a;
  bool sums_lanes;  // da_out are sums over a warp's channels, (outer, inner / of a warp, time)
};

// A thread's channels of an operand at one time, in the state's type.
template <class S, class T, int V>
__device__ __forceinline__ void unpack(S (&out)[V], Pack<T, V> pack) {
  if constexpr (std::is_same_v<T, BFloat16> && V == 2) {
    const auto word = internal::bit_cast<uint32_t>(pack);
    out[0] = __uint_as_float(word << 16);
    out[1] = __uint_as_float(word & 0xffff0000u);
  } else {
#pragma unroll
    for (int v = 0; v < V; ++v) out[v] = load_as<S>(pack.v[v]);
  }
}

// A slot of the ring, and whether it is used for an even or an odd time.
struct Turn {
  int slot;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int by, int slots) {
    slot += by;
    if (slot >= slots) {
      slot -= slots;
      parity ^= 1;
    }
  }
};

template <bool kPlain, Op kOp, class A_, class B_, class H_, int kSteps>
__device__ __forceinline__ void walk_boxes(const Problem& p, const Boxes& boxes) {
  using T = Types<kOp, A_, B_, H_>;
  using A = typename T::A;
  using X = typename T::X;
  using H = typename T::H;
  using Y = typename T::Y;
  using S = typename T::S;
  constexpr int V = T::kVector;

  extern __shared__ __align__(128) char ring[];
  __shared__ Barrier full[kMostBoxSlots], empty[kMostBoxSlots];
  __shared__ S states[kWidestBox];
  const int outer = static_cast<int>(blockIdx.x) / boxes.strips;
  const int first = (static_cast<int>(blockIdx.x) - outer * boxes.strips) * boxes.width;
  const int time = static_cast<int>(p.time), stages = (time + kSteps - 1) / kSteps;
  const Walk walk(p);
  const bool uses_h = kOp == Op::kCotangent && p.h.data;
  const int slot_bytes = boxes.a_bytes + boxes.x_bytes + (uses_h ? boxes.h_bytes : 0);
  const bool by_boxes = kPlain || boxes.way_of_a == BoxedA::kBoxes;
  const bool by_runs = !kPlain && boxes.way_of_a == BoxedA::kRuns;
  const int workers = static_cast<int>(blockDim.x) - 32, of_team = workers / boxes.teams;
  if (threadIdx.x == 0) {
    for (int k = 0; k < boxes.slots; ++k) {
      full[k].init(1);
      empty[k].init(of_team / 32);
    }
    barriers_are_ready();
  }
  __syncthreads();

  // The lowest time of a stage's box.
  const auto lowest = [&](int stage) {
    return walk.descending ? time - (stage + 1) * kSteps : stage * kSteps;
  };
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread >= workers) {
    if (thread > workers) return;
    constexpr int kRunBytes = kSteps * static_cast<int>(sizeof(A));
    const int bytes = slot_bytes - (by_runs ? boxes.a_bytes - kRunBytes : 0);
    const int outer_of_a = boxes.outer_shares_a ? 0 : outer;
    Turn turn{0};
    for (int stage = 0; stage < stages; ++stage, turn.advance(1, boxes.slots)) {
      if (stage >= boxes.slots) empty[turn.slot].wait(turn.parity ^ 1);
      Barrier& here = full[turn.slot];
      char* to = ring + turn.slot * slot_bytes;
      const int low = lowest(stage);
      here.arrive_and_expect(static_cast<uint32_t>(bytes));
      if (by_boxes) {
        copy_box(to, &boxes.a, first, low, outer_of_a, here);
      } else if (by_runs) {
        copy_box(to, &boxes.a, low, 0, outer_of_a, here);
      }
      copy_box(to + boxes.a_bytes, &boxes.x, first, low, outer, here);
      if (uses_h) {
        to += boxes.a_bytes + boxes.x_bytes;
        copy_box(to, &boxes.h, first, low - walk.past, outer, here);
      }
    }
    return;
  }

  const int team = thread / of_team, in_team = thread - team * of_team;
  // Of this warp and that of the last team, and of this one and that of the next.
  const int warp = thread / 32;
  const NamedBarrier from_last(1 + warp, 64);
  const NamedBarrier to_next(1 + (team + 1 == boxes.teams ? in_team : thread + of_team) / 32, 64);
  const int column = in_team * V;
  const int64_t channel = first + column;
  const bool valid = column < boxes.width && channel < p.inner;
  S s[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    s[v] = valid && p.init.data ? load_one<S>(p.init, outer, channel + v, 0) : S(0);
  }
  // Before the first step of the recurrence h is h0.
  [[maybe_unused]] S h0[V];
  if constexpr (kOp == Op::kCotangent) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      h0[v] = valid && uses_h && p.h0.data ? load_one<S>(p.h0, outer, channel + v, 0) : S(0);
    }
  }
  // a without time.
  S a_of_all[V] = {};
  if (!by_boxes && !by_runs && valid) {
    const A* of_outer = static_cast<const A*>(p.a.data) + p.a.at.outer_offset(outer);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      a_of_all[v] = load_as<S>(of_outer[p.a.at.inner_offset(channel + v)]);
    }
  }
  // Lane k's: whether the k-th step of a stage is cut.
  const int lane = thread % 32;
  const uint8_t* resets = kPlain ? nullptr : static_cast<const uint8_t*>(p.reset.data);
  const int64_t reset_stride = walk.step() * p.reset.at.time_stride;
  if (resets) resets += p.reset.at.outer_offset(outer) + walk.at(0) * p.reset.at.time_stride;
  const auto reset_in = [&](int stage) -> uint8_t {
    const int s = stage * kSteps + lane;
    return resets && lane < kSteps && s < time ? resets[s * reset_stride] : 0;
  };
  uint8_t reset = reset_in(team);

  const int64_t row = walk.step() * p.inner;
  const int64_t start = (int64_t{outer} * p.time + walk.at(0)) * p.inner + channel;
  const int64_t own = team * kSteps * row;
  Y* y = static_cast<Y*>(p.y.data) + start + own;
  A* da = static_cast<A*>(p.da_out.data) + start + own;
  const int64_t others = (boxes.teams - 1) * kSteps * row;
  const bool writes_y = valid && p.y.data;
  const bool sums = !kPlain && (p.da_over_time || boxes.sums_lanes);
  const bool writes_da = valid && p.da_out.data && !sums;
  [[maybe_unused]] S da_sum[V] = {};

  Turn turn{team};
  for (int stage = team; stage < stages; stage += boxes.teams) {
    // The steps in the order of the walk, in the state's type: what is left to do once the state is
    // there is to be no more than the recurrence. Results take the places of x and h.
    S a[kSteps][V], x[kSteps][V];
    [[maybe_unused]] S h[kSteps][V];
    const char* const slot = ring + turn.slot * slot_bytes;
    const auto take = [&](auto tag, auto& values, const char* box) {
      using Packed = Pack<decltype(tag), V>;
      constexpr int kBytes = sizeof(Packed) / V;
      const int jump = walk.step() * boxes.width * kBytes;
      const char* from = box + column * kBytes - (walk.descending ? (kSteps - 1) * jump : 0);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        unpack(values[k], *reinterpret_cast<const Packed*>(from));
        from += jump;
      }
    };
    // Bit k: the k-th step is cut.
    uint32_t cuts = 0;
    if (resets) {
      cuts = __ballot_sync(kAllLanes, reset != 0);
      reset = reset_in(stage + boxes.teams);
    }
    full[turn.slot].wait(turn.parity);
    if (by_boxes) {
      take(A{}, a, slot);
    } else if (by_runs) {
      const A* const run = reinterpret_cast<const A*>(slot);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const S same = load_as<S>(run[walk.descending ? kSteps - 1 - k : k]);
#pragma unroll
        for (int v = 0; v < V; ++v) a[k][v] = same;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int v = 0; v < V; ++v) a[k][v] = a_of_all[v];
      }
    }
    take(X{}, x, slot + boxes.a_bytes);
    if constexpr (kOp == Op::kCotangent) {
      if (uses_h) {
        take(H{}, h, slot + boxes.a_bytes + boxes.x_bytes);
      } else {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
          for (int v = 0; v < V; ++v) h[k][v] = S(0);
        }
      }
    }
    __syncwarp();
    if (lane == 0) empty[turn.slot].arrive();
    turn.advance(boxes.teams, boxes.slots);

    const int s0 = stage * kSteps, left = time - s0;
    const int first_step = static_cast<int>(walk.first_step(kOp)) - s0;
    if (first_step >= 0 && first_step < kSteps) {
      if (!p.has_h0) cuts |= 1u << first_step;
      if constexpr (kOp == Op::kCotangent) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
          for (int v = 0; v < V; ++v) h[k][v] = k == first_step ? h0[v] : h[k][v];
        }
      }
    }

    if (stage > 0 && boxes.teams > 1) {
      from_last.wait();
#pragma unroll
      for (int v = 0; v < V; ++v) s[v] = states[column + v];
    }
    const auto step = [&](int k, bool cut) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        Step<S> in{a[k][v], x[k][v], S(0), cut};
        if constexpr (kOp == Op::kCotangent) in.h = h[k][v];
        const Written<S> out = advance<kOp>(s[v], in);
        x[k][v] = out.y;
        if constexpr (kOp == Op::kCotangent) h[k][v] = out.da_out;
      }
    };
    if (left < kSteps) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (k < left) {
          step(k, (cuts >> k & 1u) != 0);
        } else if constexpr (kOp == Op::kCotangent) {
#pragma unroll
          for (int v = 0; v < V; ++v) h[k][v] = S(0);
        }
      }
    } else if (cuts != 0) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) step(k, (cuts >> k & 1u) != 0);
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) step(k, false);
    }

    if (stage + 1 < stages) {
      if (boxes.teams > 1) {
#pragma unroll
        for (int v = 0; v < V; ++v) states[column + v] = s[v];
        to_next.arrive();
      }
    } else if (valid && p.final.data) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        store_one(p.final, int64_t{outer} * p.inner + channel + v, s[v]);
      }
    }

    const auto write = [&](int k) {
      if (writes_y) {
        Pack<Y, V> pack;
#pragma unroll
        for (int v = 0; v < V; ++v) pack.v[v] = store_as<Y>(x[k][v]);
        *reinterpret_cast<Pack<Y, V>*>(y) = pack;
      }
      y += row;
      if constexpr (kOp == Op::kCotangent) {
        if (writes_da) {
          Pack<A, V> pack;
#pragma unroll
          for (int v = 0; v < V; ++v) pack.v[v] = store_as<A>(h[k][v]);
          *reinterpret_cast<Pack<A, V>*>(da) = pack;
        }
        da += row;
      }
    };
    if (left >= kSteps) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) write(k);
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (k < left) write(k);
      }
    }
    y += others;
    da += others;

    if constexpr (kOp == Op::kCotangent && !kPlain) {
      if (p.da_over_time) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          S sum = h[0][v];
#pragma unroll
          for (int k = 1; k < kSteps; ++k) sum = sum + h[k][v];
          da_sum[v] = da_sum[v] + sum;
        }
      } else if (boxes.sums_lanes) {
        S sums[kSteps];
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          sums[k] = h[k][0];
          if constexpr (V == 2) sums[k] = sums[k] + h[k][1];
        }
        const int k = LaneSums<S, kSteps>::add(sums, lane);
        if (valid && lane % LaneSums<S, kSteps>::kSame == 0 && k < left) {
          const int64_t of_all = (outer * p.inner + channel) / (32 * V);
          static_cast<S*>(p.da_out.data)[of_all * p.time + walk.at(s0 + k)] = sums[0];
        }
      }
    }
  }

  if constexpr (kOp == Op::kCotangent && !kPlain) {
    if (!p.da_over_time || !p.da_out.data) return;
    // From the team of the last stage on, each adds its sum to that of those before it.
    const int before = (team + boxes.teams - (stages - 1) % boxes.teams) % boxes.teams;
    if (before > 0) {
      from_last.wait();
#pragma unroll
      for (int v = 0; v < V; ++v) da_sum[v] = states[column + v] + da_sum[v];
    }
    if (before + 1 < boxes.teams) {
#pragma unroll
      for (int v = 0; v < V; ++v) states[column + v] = da_sum[v];
      to_next.arrive();
    } else if (valid) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        store_one(p.da_out, int64_t{outer} * p.inner + channel + v, da_sum[v]);
      }
    }
  }
}

}  // namespace boxed

template <bool kPlain, Op kOp, class A, class B, class H, int kSteps>
__global__ void __launch_bounds__(32 * box_warps(kSteps, sizeof(B)), 1)
    boxed_kernel(const __grid_constant__ Problem p, const __grid_constant__ boxed::Boxes boxes) {
  if constexpr (kHasBulkCopies) boxed::walk_boxes<kPlain, kOp, A, B, H, kSteps>(p, boxes);
}

namespace boxed {

template <bool kPlain, Op kOp, class A, class B, class H, int kSteps>
cudaError_t launch_op(const Problem& p, const BoxedPlan& plan, cudaStream_t stream) {
  using T = Types<kOp, A, B, H>;
  using X = typename T::X;
  const int elements = plan.width * plan.steps;
  Boxes boxes{};
  boxes.width = plan.width;
  boxes.strips = plan.strips;
  boxes.slots = plan.slots;
  boxes.teams = plan.teams;
  boxes.x_bytes = elements * static_cast<int>(sizeof(X));
  boxes.h_bytes = elements * static_cast<int>(sizeof(H));
  boxes.way_of_a = plan.a;
  boxes.outer_shares_a = plan.outer_shares_a;
  boxes.sums_lanes = p.da_over_runs();
  cudaError_t error = cudaSuccess;
  Problem of_a = p;
  if (plan.outer_shares_a) of_a.outer = 1;
  if (plan.a == BoxedA::kBoxes) {
    boxes.a_bytes = elements * static_cast<int>(sizeof(A));
    error = boxes_of<A>(of_a, p.a, plan.width, plan.steps, boxes.a);
  } else if (plan.a == BoxedA::kRuns) {
    // Time lies where inner indices do otherwise.
    of_a.inner = p.time;
    of_a.time = 1;
    boxes.a_bytes = kRunPlace;
    error = boxes_of<A>(of_a, p.a, plan.steps, 1, boxes.a);
  }
  if (error == cudaSuccess) error = boxes_of<X>(p, p.x, plan.width, plan.steps, boxes.x);
  if (error == cudaSuccess && p.h.data) {
    error = boxes_of<H>(p, p.h, plan.width, plan.steps, boxes.h);
  }
  if (error != cudaSuccess) return error;
  const auto kernel = boxed_kernel<kPlain, kOp, A, B, H, kSteps>;
  error = prepare_for_hopper(kernel, plan.most_bytes);
  if (error != cudaSuccess) return error;
  const int workers = plan.teams * static_cast<int>(divide_up(plan.width, 32 * T::kVector)) * 32;
  kernel<<<static_cast<unsigned>(plan.blocks), workers + 32, plan.shared_bytes, stream>>>(p, boxes);
  return cudaGetLastError();
}

template <class A, class B, class H, int kSteps>
cudaError_t launch_steps(const Problem& p, const BoxedPlan& plan, cudaStream_t stream) {
  if (p.op == Op::kCotangent) {
    return plan.plain ? launch_op<true, Op::kCotangent, A, B, H, kSteps>(p, plan, stream)
                      : launch_op<false, Op::kCotangent, A, B, H, kSteps>(p, plan, stream);
  }
  return plan.plain ? launch_op<true, Op::kScan, A, B, H, kSteps>(p, plan, stream)
                    : launch_op<false, Op::kScan, A, B, H, kSteps>(p, plan, stream);
}

}  // namespace boxed

template <class A, class B, class H>
cudaError_t launch_boxed(const Problem& problem, const BoxedPlan& plan, void* workspace,
                         cudaStream_t stream) {
  using S = StateOf<B>;
  constexpr int kLong = long_box(sizeof(B));
  Problem p = problem;
  if (p.da_over_runs()) p.da_out = {workspace, p.state};
  const cudaError_t error = plan.steps == kLong
                                ? boxed::launch_steps<A, B, H, kLong>(p, plan, stream)
                                : boxed::launch_steps<A, B, H, kLong / 2>(p, plan, stream);
  if (error != cudaSuccess || !p.da_over_runs()) return error;
  const int64_t beside = p.inner / p.da_inner_run, of_warp = 32 * channels_of_lane(sizeof(B));
  const TileSums sums{p.outer * beside, p.da_inner_run / of_warp, p.time, beside};
  return sum_over_tiles(problem.da_out, static_cast<const S*>(workspace), sums, stream);
}

}  // namespace jax_scan
