// The scan in a single pass over memory that is parallel in time: right for every shape, type and
// stride.
//
// Time is cut into tiles; a block takes one tile of some channels, each of its threads `kSteps`
// consecutive steps of one channel in registers. With the state s_in that enters the tile, the one
// that leaves is A s_in + B, where (A, B) composes the steps' affine maps. A block
//   1. composes its tile's map and publishes it,
//   2. looks back: takes the state after the nearest tile that has published one and applies the
//   maps of the tiles between, in order,
//   3. publishes the state after its own tile, and
//   4. runs the recurrence through its registers from the state that enters, and writes.
// (Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back", 2016, for the
// scheme.) Unlike there, maps are applied to states one by one and in order, never composed with
// each other, so that the bits of the result do not depend on how far a block happened to look
// back. While it works on one tile, a block has the next one's operands copied to shared memory.
//
// A s_in + B stands for the step-by-step recurrence only while products and sums stay far from
// overflow (Bounds). A tile for which that is not certain publishes no map; it waits for its
// predecessor's state, walks its steps in order, and publishes what comes out. The choice depends
// on the data alone.
#pragma once

#include "cuda/copy.cuh"
#include "cuda/device.cuh"
#include "cuda/launch.h"
#include "cuda/mailbox.cuh"
#include "cuda/sum_over_tiles.cuh"

namespace jax_scan {

namespace general {

// Where one thread works in a tile.
struct Position {
  int tile_index;  // along time
  int group;       // of channels
  int count;       // its steps; 0 past the last channel or the last step
  int64_t o, i;    // its channel's outer and inner index; past the last channel, the last one's
  int64_t s0;      // the first of its steps of the walk

  __device__ Position(const Problem& p, const GeneralTiling& tiling, int64_t ticket, int steps)
      : tile_index(static_cast<int>(ticket / tiling.groups)),
        group(static_cast<int>(ticket % tiling.groups)) {
    const int thread = threadIdx.x;
    const int64_t lane = int64_t{group} * tiling.lanes + (thread & (tiling.lanes - 1));
    const int64_t channel = min(lane, p.channels() - 1);
    o = channel / p.inner;
    i = channel % p.inner;
    s0 = tile_index * tiling.tile_steps + (thread >> tiling.lanes_log2) * steps;
    const int64_t left = lane == channel ? p.time - s0 : 0;
    count = static_cast<int>(max(int64_t{0}, min(left, int64_t{steps})));
  }

  __device__ int64_t channel(const Problem& p) const { return o * p.inner + i; }
};

// An operand whose elements can be copied to shared memory ahead of their use: words, and not the
// same at every step.
__device__ __forceinline__ bool travels(const Input& in) {
#if __CUDA_ARCH__ >= 800
  return in.data && in.at.time_stride != 0 && byte_size(in.dtype) >= 4;
#else
  return false;
#endif
}

// One slot per step and thread; every thread copies, and later takes, its own.
template <class S, int kSteps>
class Slots {
 public:
  __device__ Slots(char* shared, int operand)
      : slots_(shared + (operand * kSteps * kGeneralThreads + threadIdx.x) * sizeof(S)) {}

  // Queues the copies of the steps of `at`; step s is at time at(s) - past.
  __device__ __forceinline__ void send(const Input& in, const Walk& walk, const Position& at,
                                       int past) const {
#if __CUDA_ARCH__ >= 800
    if (!travels(in)) return;
    const int64_t t0 = walk.at(at.s0) - past;
    visit<S>(in.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (sizeof(T) >= 4) {
        const T* from = static_cast<const T*>(in.data) + in.at.outer_offset(at.o) +
                        in.at.inner_offset(at.i) + t0 * in.at.time_stride;
        const int64_t jump = walk.step() * in.at.time_stride;
        const bool inside = past == 0 || (t0 >= 0 && t0 < walk.time);
#pragma unroll
        for (int r = 0; r < kSteps; ++r) {
          const bool last = past != 0 && at.s0 + r == walk.time - 1;
          if (r < at.count && (r > 0 || inside) && !(last && past == -walk.step())) {
            copy_async<sizeof(T)>(slots_ + r * kJump, from);
          }
          from += jump;
        }
      }
    });
#endif
  }

  __device__ __forceinline__ void take(S (&out)[kSteps], const Input& in, int count) const {
    visit<S>(in.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
#pragma unroll
      for (int r = 0; r < kSteps; ++r) {
        if (r < count) out[r] = load_as<S>(*reinterpret_cast<const T*>(slots_ + r * kJump));
      }
    });
  }

 private:
  static constexpr int kJump = kGeneralThreads * static_cast<int>(sizeof(S));
  char* slots_;
};

// The steps that one thread holds. A tangent's da h_prev is added to x as soon as it is there.
template <Op kOp, class S, int kSteps>
struct Run {
  S a[kSteps], x[kSteps];
  S h[kOp == Op::kCotangent ? kSteps : 1];
  uint32_t cuts = 0;

  // Queues the copies of what can be copied ahead.
  static __device__ __forceinline__ void send(const Problem& p, const Walk& walk,
                                              const Position& at, char* shared) {
    Slots<S, kSteps>(shared, 0).send(p.a, walk, at, 0);
    Slots<S, kSteps>(shared, 1).send(p.x, walk, at, 0);
    if constexpr (kOp != Op::kScan) Slots<S, kSteps>(shared, 2).send(p.h, walk, at, walk.past);
    if constexpr (kOp == Op::kTangent) Slots<S, kSteps>(shared, 3).send(p.da, walk, at, 0);
  }

  // Takes what has been copied, and loads the rest. Beyond `count` steps the run is padded with the
  // identity (a = 1, x = 0).
  __device__ __forceinline__ void take(const Problem& p, const Walk& walk, const Position& at,
                                       char* shared) {
    const int64_t t0 = walk.at(at.s0);
#pragma unroll
    for (int r = 0; r < kSteps; ++r) {
      a[r] = S(1);
      x[r] = S(0);
    }
    take_operand(a, p.a, walk, at, 0, Slots<S, kSteps>(shared, 0));
    take_operand(x, p.x, walk, at, 0, Slots<S, kSteps>(shared, 1));
    cuts = 0;
    if (p.reset.data) {
      const Broadcast& b = p.reset.at;
      const uint8_t* reset = static_cast<const uint8_t*>(p.reset.data) + b.outer_offset(at.o) +
                             b.inner_offset(at.i) + t0 * b.time_stride;
#pragma unroll
      for (int r = 0; r < kSteps; ++r) {
        if (r < at.count && reset[r * walk.step() * b.time_stride]) cuts |= 1u << r;
      }
    }
    const int64_t first = walk.first_step(kOp) - at.s0;
    if (!p.has_h0 && first >= 0 && first < at.count) cuts |= 1u << first;
    if constexpr (kOp == Op::kCotangent) {
      take_past(h, p, walk, at, first, Slots<S, kSteps>(shared, 2));
    }
    if constexpr (kOp == Op::kTangent) {
      if (p.da.data) {
        S da[kSteps], past[kSteps];
        take_past(past, p, walk, at, first, Slots<S, kSteps>(shared, 2));
        take_operand(da, p.da, walk, at, 0, Slots<S, kSteps>(shared, 3));
#pragma unroll
        for (int r = 0; r < kSteps; ++r) {
          if (r < at.count && !((cuts >> r) & 1u)) x[r] = mul_add(da[r], past[r], x[r]);
        }
      }
    }
  }

  __device__ __forceinline__ Step<S> operator[](int r) const {
    return {a[r], x[r], h[kOp == Op::kCotangent ? r : 0], ((cuts >> r) & 1u) != 0};
  }

 private:
  // Step s is at time at(s) - past, which must lie within the operand unless it travels.
  static __device__ __forceinline__ void take_operand(S (&out)[kSteps], const Input& in,
                                                      const Walk& walk, const Position& at,
                                                      int past, const Slots<S, kSteps>& slots) {
    if (travels(in)) {
      slots.take(out, in, at.count);
    } else if (in.data && at.count > 0) {
      load_run(out, in, at.o, at.i, walk.at(at.s0) - past, walk.step(), at.count);
    }
  }

  // h one step earlier in its recurrence; before its first step that is h0.
  static __device__ __forceinline__ void take_past(S (&out)[kSteps], const Problem& p,
                                                   const Walk& walk, const Position& at,
                                                   int64_t first, const Slots<S, kSteps>& slots) {
#pragma unroll
    for (int r = 0; r < kSteps; ++r) out[r] = S(0);
    const bool at_first = first >= 0 && first < at.count;
    if (!at_first || travels(p.h)) {
      take_operand(out, p.h, walk, at, walk.past, slots);
    } else if (p.h.data) {
#pragma unroll
      for (int r = 0; r < kSteps; ++r) {
        if (r < at.count && r != first) {
          out[r] = load_one<S>(p.h, at.o, at.i, walk.at(at.s0 + r) - walk.past);
        }
      }
    }
    if (at_first) {
      const S h0 = p.h0.data ? load_one<S>(p.h0, at.o, at.i, 0) : S(0);
#pragma unroll
      for (int r = 0; r < kSteps; ++r) out[r] = r == first ? h0 : out[r];
    }
  }
};

// Shared memory of the copies.
constexpr int slots_bytes(Op op, int state_bytes) {
  const int operands = op == Op::kScan ? 2 : op == Op::kCotangent ? 3 : 4;
  return operands * steps_per_thread(state_bytes) * kGeneralThreads * state_bytes;
}

}  // namespace general

template <Op kOp, class S>
__global__ void __launch_bounds__(kGeneralThreads, general_blocks(sizeof(S)))
    general_kernel(const __grid_constant__ Problem p, const __grid_constant__ GeneralTiling tiling,
                   unsigned long long* counter, MapPacket* packets, S* sums_over_tiles) {
  using namespace general;
  constexpr int kSteps = steps_per_thread(sizeof(S));
  // Read by a thread at a time: as many as registers allow.
  constexpr int kMostPlaces = sizeof(S) == 4 ? 4 : kOp == Op::kCotangent ? 1 : 2;
  constexpr int kWindowPlaces = kGeneralWindowBytes / static_cast<int>(sizeof(Affine<S>));

  extern __shared__ __align__(16) char shared[];  // the operands on their way
  __shared__ Affine<S> window[kWindowPlaces];  // what predecessors have sent, [distance - 1][lane]
  __shared__ bool is_state[kWindowPlaces];
  __shared__ Composed<S> rows[kGeneralThreads];  // the map of each row of threads, [row][lane]
  __shared__ S carry[kGeneralThreads];           // the state that enters, [lane]
  __shared__ int uncertain[kGeneralThreads];     // [lane]: the map may not stand for the steps
  __shared__ int64_t tickets[2];

  const Walk walk(p);
  const int thread = threadIdx.x;
  const int lanes = tiling.lanes;
  const int lane = thread & (lanes - 1);
  const int segment = thread >> tiling.lanes_log2;
  const int segments = kGeneralThreads >> tiling.lanes_log2;

  // Tiles are handed out in order, so that whoever has a tile's predecessors is running.
  const int64_t all = tiling.tiles * tiling.groups;
  // With a block for each tile that rests on blocks starting in the order of their index, as they
  // do on every GPU so far, though CUDA does not promise it.
  const bool one_each = gridDim.x == all;
  if (thread == 0) {
    tickets[0] = one_each ? blockIdx.x : static_cast<int64_t>(atomicAdd(counter, 1ull));
    tickets[1] = one_each ? all : static_cast<int64_t>(atomicAdd(counter, 1ull));
  }
  __syncthreads();
  const auto send = [&](int64_t ticket) {
    if (ticket < all) {
      Run<kOp, S, kSteps>::send(p, walk, Position(p, tiling, ticket, kSteps), shared);
    }
  };
  send(tickets[0]);

  for (int turn = 0; tickets[turn] < all; turn ^= 1) {
    const Position at(p, tiling, tickets[turn], kSteps);
    Run<kOp, S, kSteps> run;
    wait_for_copies();
    run.take(p, walk, at, shared);
    send(tickets[turn ^ 1]);
    if (thread < lanes) uncertain[thread] = 0;

    // The map of this thread's steps, and the sums that bound every partial product and partial
    // result on the way.
    Composed<S> inclusive;
    Real<S> products = 0, locals = 0;
#pragma unroll
    for (int r = 0; r < kSteps; ++r) {
      const Step<S> in = run[r];
      const Written<S> out = advance<kOp>(inclusive.b, in);
      const Product<S> composed = product(coefficient(in), inclusive.a);
      inclusive.lost = mul_add(coefficient(in), inclusive.lost, composed.lost);
      inclusive.a = composed.rounded;
      products += magnitude(inclusive.a);
      locals += reach<kOp>(inclusive.b, out);
    }

    // `before`: the map of the tile's steps before this thread's. First within the warp (which
    // holds several rows of `lanes` threads, or a part of one), then over the rows of warps.
    for (int delta = lanes; delta < 32; delta *= 2) {
      const Composed<S> earlier = shuffle_up(inclusive, delta);
      if (thread % 32 >= delta) inclusive = compose(inclusive, earlier);
    }
    // The map of a row's steps may be too large though none from the tile's first step on is.
    const bool row_certain = magnitude(inclusive.a) <= Bounds<Real<S>>::product &&
                             magnitude(inclusive.b) <= Bounds<Real<S>>::local;
    Composed<S> before;
    if (lanes < 32) {
      before = shuffle_up(inclusive, lanes);
      if (thread % 32 < lanes) before = {};
    }
    const int row_threads = lanes < 32 ? 32 : lanes;
    const int row = thread / row_threads;
    const int row_count = kGeneralThreads / row_threads;
    if (thread % row_threads >= row_threads - lanes) rows[row * lanes + lane] = inclusive;
    __syncthreads();
    Composed<S> rows_before;
    for (int k = 0; k < row; ++k) rows_before = compose(rows[k * lanes + lane], rows_before);
    before = compose(before, rows_before);
    const bool certain = row_certain &&
                         magnitude(before.a) * products <= Bounds<Real<S>>::product &&
                         magnitude(before.b) * products + locals <= Bounds<Real<S>>::local;
    if (!certain) atomicOr(&uncertain[lane], 1);
    if (thread == 0)
      tickets[turn] = one_each ? all : static_cast<int64_t>(atomicAdd(counter, 1ull));
    __syncthreads();

    // Publish the map.
    const Mailbox<S> mailbox(packets, lanes, tiling.groups, at.group, lane);
    const bool followed = at.tile_index + 1 < tiling.tiles;
    Affine<S> total;  // the same for whoever applies it, so that no result depends on timing
    if (thread < lanes) {
      Composed<S> composed;
      for (int k = 0; k < row_count; ++k) composed = compose(rows[k * lanes + lane], composed);
      total = composed.rounded();
      if (at.tile_index > 0 && followed && !uncertain[lane]) mailbox.send(at.tile_index, total);
    }

    // Look back. Each thread reads what one predecessor has sent, later, if no state was among it,
    // what several have.
    if (at.tile_index == 0) {
      if (thread < lanes) {
        carry[lane] = p.init.data ? load_one<S>(p.init, at.o, at.i, 0) : S(0);
      }
    } else {
      int between = -1;  // the tiles between the nearest state and this tile
      for (int reached = 0, places = 1; true; reached += places * segments, places = kMostPlaces) {
        Affine<S> maps[kMostPlaces];
        bool missing = true;
        while (missing) {
          missing = false;
#pragma unroll
          for (int k = 0; k < kMostPlaces; ++k) {
            const int distance = reached + k * segments + segment + 1;
            if (k >= places || distance > tiling.window || distance > at.tile_index) continue;
            const Kind kind = mailbox.receive(at.tile_index - distance, maps[k]);
            is_state[(distance - 1) * lanes + lane] = kind == kState;
            missing = missing || kind == kNothing || (distance == tiling.window && kind != kState);
          }
        }
#pragma unroll
        for (int k = 0; k < kMostPlaces; ++k) {
          const int distance = reached + k * segments + segment + 1;
          if (k >= places || distance > tiling.window || distance > at.tile_index) continue;
          window[(distance - 1) * lanes + lane] = maps[k];
        }
        __syncthreads();
        if (thread < lanes) {
          for (int k = reached; k < reached + places * segments && between < 0; ++k) {
            if (k < tiling.window && k < at.tile_index && is_state[k * lanes + lane]) between = k;
          }
        }
        if (__syncthreads_and(thread >= lanes || between >= 0)) break;
      }
      if (thread < lanes) {
        S s = window[between * lanes + lane].b;
        bool within = true;
#pragma unroll 4
        for (int k = between - 1; k >= 0; --k) {
          within = within && state_within(s);
          s = apply(window[k * lanes + lane], s);
        }
        Affine<S> sent;
        while (!within) {  // a map can't be trusted with such a state: wait for the state behind it
          if (mailbox.receive(at.tile_index - 1, sent) == kState) {
            s = sent.b;
            within = true;
          }
        }
        carry[lane] = s;
      }
    }

    // Publish the state after this tile, unless it must come out of the steps themselves.
    bool from_steps = false;
    if (thread < lanes) {
      from_steps = uncertain[lane] || !state_within(carry[lane]);
      uncertain[lane] = from_steps;
      if (!from_steps && followed) mailbox.send(at.tile_index, apply(total, carry[lane]));
    }
    const bool in_order = __syncthreads_or(from_steps);

    // Run the steps; what they write takes the place of what they have read.
    S last = S(0);  // the state after this thread's last step
    const auto run_steps = [&](S s) {
#pragma unroll
      for (int r = 0; r < kSteps; ++r) {
        const Written<S> out = advance<kOp>(s, run[r]);
        run.x[r] = out.y;
        if (r == at.count - 1) last = s;
        if constexpr (kOp == Op::kCotangent) run.h[r] = out.da_out;
      }
      return s;
    };
    // A channel whose map can be trusted is not touched by what its neighbours in the tile hold.
    const bool trusted = !uncertain[lane];
    if (trusted) run_steps(apply(before, carry[lane]));
    if (in_order) {
#pragma unroll 1
      for (int k = 0; k < segments; ++k) {
        if (segment == k && !trusted) carry[lane] = run_steps(carry[lane]);
        __syncthreads();
      }
      if (from_steps && followed) mailbox.send(at.tile_index, carry[lane]);
    }

    // Write.
    if (at.count > 0) {
      const int64_t stride = walk.step() * p.inner;
      const int64_t offset = (at.o * p.time + walk.at(at.s0)) * p.inner + at.i;
      if (p.y.data) {
        visit<S>(p.y.dtype, [&](auto tag) {
          using T = typename decltype(tag)::type;
          store_run(run.x, static_cast<T*>(p.y.data) + offset, stride, at.count);
        });
      }
      if constexpr (kOp == Op::kCotangent) {
        if (p.da_out.data && !p.da_over_time) {
          visit<S>(p.da_out.dtype, [&](auto tag) {
            using T = typename decltype(tag)::type;
            store_run(run.h, static_cast<T*>(p.da_out.data) + offset, stride, at.count);
          });
        }
      }
      if (p.final.data && at.s0 + at.count == p.time) store_one(p.final, at.channel(p), last);
    }

    // Sum da over the tile's segments, in the order of a fixed tree.
    if constexpr (kOp == Op::kCotangent) {
      if (p.da_out.data && p.da_over_time) {
        S sum = S(0);
#pragma unroll
        for (int r = 0; r < kSteps; ++r) {
          if (r < at.count) sum = sum + run.h[r];
        }
        S* const sums = reinterpret_cast<S*>(rows);
        sums[thread] = sum;
        for (int half = kGeneralThreads / 2; half >= lanes; half /= 2) {
          __syncthreads();
          if (thread < half) sums[thread] = sums[thread] + sums[thread + half];
        }
        if (thread < lanes && at.count > 0) {  // the first segment of a tile is never empty
          sums_over_tiles[at.tile_index * p.channels() + at.channel(p)] = sums[thread];
        }
      }
    }
    __syncthreads();
  }
}

namespace general {

template <Op kOp, class S>
cudaError_t launch_op(const Problem& problem, const GeneralTiling& tiling, const Device& device,
                      void* workspace, cudaStream_t stream) {
  auto* bytes = static_cast<unsigned char*>(workspace);
  S* sums = reinterpret_cast<S*>(bytes + tiling.sums_offset);
  const int64_t blocks = std::min(tiling.tiles * tiling.groups,
                                  int64_t{device.multiprocessors} * general_blocks(sizeof(S)));
  const auto kernel = general_kernel<kOp, S>;
  const int slots = device.capability_major >= 8 ? slots_bytes(kOp, sizeof(S)) : 0;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, slots);
  if (error != cudaSuccess) return error;
  if (tiling.tiles > 1 || blocks < tiling.groups) {
    error = cudaMemsetAsync(workspace, 0, tiling.zeroed_bytes, stream);
    if (error != cudaSuccess) return error;
  }
  kernel<<<dim3(static_cast<unsigned>(blocks)), kGeneralThreads, slots, stream>>>(
      problem, tiling, reinterpret_cast<unsigned long long*>(bytes),
      reinterpret_cast<MapPacket*>(bytes + tiling.packets_offset), sums);
  if (problem.da_out.data && problem.da_over_time) {
    return sum_over_tiles(problem, sums, tiling.tiles, stream);
  }
  return cudaGetLastError();
}

}  // namespace general

template <class S>
cudaError_t launch_general(const Problem& problem, const Device& device, void* workspace,
                           cudaStream_t stream) {
  const GeneralTiling tiling =
      general_tiling(problem.op, problem.outer, problem.time, problem.inner, problem.state);
  if (tiling.tiles > INT32_MAX || tiling.groups > INT32_MAX) return cudaErrorInvalidConfiguration;
  switch (problem.op) {
    case Op::kTangent:
      return general::launch_op<Op::kTangent, S>(problem, tiling, device, workspace, stream);
    case Op::kCotangent:
      return general::launch_op<Op::kCotangent, S>(problem, tiling, device, workspace, stream);
    case Op::kScan:
      break;
  }
  return general::launch_op<Op::kScan, S>(problem, tiling, device, workspace, stream);
}

}  // namespace jax_scan
