// The single pass over memory that is parallel in time as a pipeline through a multiprocessor's
// shared memory: for few channels of float32 in rows, from compute capability 9.0 on.
//
// Time is cut into tiles as in chained.cuh, and states go from tile to tile through the same chain
// (chain.cuh). There a block reads a tile, composes its map, waits for the state, and runs the
// steps, one after the other. Here one block has all of a multiprocessor, and its warps do one
// thing each, tile after tile, in a ring of stages in shared memory:
//   one thread takes tiles in the order of time, and has each copied to a stage in bulk
//   (cp.async.bulk), as soon as there is one,
//   eight warps compose the maps of tiles as they arrive, and send them to the chain,
//   eight warps wait for the state that enters, run the recurrence, write, and free the stage.
// No map waits for a state, so that what is read ahead is limited by shared memory alone, and a
// state's way through the chain and back is hidden behind the tiles that follow.
//
// A thread walks kSteps consecutive steps of one channel, neighbours neighbouring channels; with
// fewer channels than threads the tile's time is divided into segments, whose maps are composed in
// shared memory. Whether a map may be applied to a state is settled as in chained.cuh: if not, the
// segments of that channel take turns, in order, and send the state that comes out. All blocks have
// tiles in order, so that the first tile without its state is one that some block runs next.
#pragma once

#include "cuda/chain.cuh"
#include "cuda/device.cuh"
#include "cuda/launch.h"
#include "cuda/tma.cuh"

namespace jax_scan {

namespace piped {

inline constexpr int kWalkingWarps = kPipedWalkers / 32;
inline constexpr int kReader = 2 * kWalkingWarps;  // the warp
inline constexpr int kThreads = 2 * kPipedWalkers + 32;
static_assert(kPipedChainWarps <= kThreads / 32);

// Barriers among the warps that compose, or among those that run steps.
enum Group : int { kComposers = 1, kRunners = 2 };
template <Group kGroup>
__device__ __forceinline__ void meet() {
  __syncwarp();
  asm volatile("bar.sync %0, %1;" ::"n"(static_cast<int>(kGroup)), "n"(kPipedWalkers) : "memory");
}
template <Group kGroup>
__device__ __forceinline__ bool meet_or(bool mine) {
  int any;
  __syncwarp();
  asm volatile(
      "{ .reg .pred p, q;\n\t"
      "setp.ne.s32 p, %1, 0;\n\t"
      "bar.red.or.pred q, %2, %3, p;\n\t"
      "selp.s32 %0, 1, 0, q; }"
      : "=r"(any)
      : "r"(static_cast<int>(mine)), "n"(static_cast<int>(kGroup)), "n"(kPipedWalkers)
      : "memory");
  return any != 0;
}

template <Op kOp>
struct Shared {
  static constexpr int kSteps = piped_steps(kOp), kStages = piped_stages(kOp);
  static constexpr int kOperands = kOp == Op::kCotangent ? 3 : 2;  // a, x, h
  // Room for up to three elements before a run, and to begin where boxes may.
  struct alignas(128) Slots {
    float of[kPipedWalkers * kSteps + 32];
  };
  Slots slots[kOperands][kStages];
  Composed<float> before[kStages][kPipedWalkers];  // the map of the segments before a thread's
  bool certain[kStages][kPipedWalkers];            // [column]: the tile's map does
  Affine<float> bounds[2][kPipedWalkers];          // by turns
  float carry[2][kPipedWalkers];                   // [column], by turns: the state that enters
  uint32_t ticket[kStages];
  Barrier full[kStages], mapped[kStages], empty[kStages];
};

// The stages in turn.
template <int kStages>
struct Turn {
  int stage = 0;
  uint32_t parity = 0, twin = 0;
  __device__ void next() {
    twin ^= 1;
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

struct Tile {
  uint32_t index, o;
  int i, columns, rows;
  int64_t low;  // its lowest time
  __device__ Tile(const Problem& p, const PipedTiling& t, uint32_t ticket) {
    index = ticket / t.groups;
    const uint32_t group = ticket - index * t.groups;
    o = group / t.strips;
    i = static_cast<int>(group - o * t.strips) * t.width;
    columns = min(t.width, static_cast<int>(p.inner) - i);
    const int64_t s0 = int64_t{index} * t.tile_steps;
    rows = static_cast<int>(min(int64_t{t.tile_steps}, p.time - s0));
    low = p.descending() ? p.time - s0 - rows : s0;
  }
  // Of its first element in memory, if its rows are one run.
  __device__ int64_t begin(const Problem& p) const { return (o * p.time + low) * p.inner; }
};

// From a time to the one before it in the recurrence of h, which for a cotangent is the next one of
// the walk: in elements.
__device__ __forceinline__ int64_t to_past(const Problem& p) {
  return p.descending() ? -p.inner : p.inner;
}

// A thread's share of a tile: `count` steps of one channel, from the tile's step s0 on.
template <Op kOp>
struct Share {
  int segment, column;
  int s0, count, first, jump;  // `first`, `jump`: in an operand's slots
  bool active, owner;          // it has a channel; it speaks for it
  bool followed;               // by another tile
  int h_first;                 // the step at which the recurrence of h begins, or -1
  uint32_t flat;               // the channel
  float *a, *x, *h;

  __device__ Share(Shared<kOp>& shared, const Problem& p, const PipedTiling& t, const Tile& at,
                   int stage) {
    constexpr int kSteps = piped_steps(kOp);
    const int thread = threadIdx.x % kPipedWalkers;
    const bool descending = p.descending();
    segment = thread / t.width;
    column = thread - segment * t.width;
    active = segment < t.segments && column < at.columns;
    owner = active && segment == 0;
    followed = at.index + 1 < t.tiles;
    s0 = segment * kSteps;
    count = active ? max(min(at.rows - s0, kSteps), 0) : 0;
    h_first = kOp == Op::kCotangent && !followed && s0 + count == at.rows ? count - 1 : -1;
    flat = at.o * static_cast<uint32_t>(p.inner) + at.i + column;
    const int pitch = t.boxes ? t.width : static_cast<int>(p.inner);
    const int last_row = (t.boxes ? t.tile_steps : at.rows) - 1;
    first = (descending ? last_row - s0 : s0) * pitch + column;
    jump = descending ? -pitch : pitch;
    // A run is copied from the 16 bytes on in which it begins.
    const int64_t begin = at.begin(p);
    const int shift = t.boxes ? 0 : static_cast<int>(begin & 3);
    a = shared.slots[0][stage].of + shift + first;
    x = shared.slots[1][stage].of + shift + first;
    h = nullptr;
    if constexpr (kOp == Op::kCotangent) {
      const int h_shift = t.boxes ? 0 : static_cast<int>((begin + to_past(p)) & 3);
      h = shared.slots[2][stage].of + h_shift + first;
    }
  }
};

// One thread: takes tiles, and has them copied.
template <Op kOp>
__device__ void read_tiles(Shared<kOp>& shared, const Problem& p, const PipedTiling& t,
                           const CUtensorMap* a_map, const CUtensorMap* x_map,
                           const CUtensorMap* h_map, unsigned* counter) {
  const bool uses_h = kOp == Op::kCotangent && p.h.data;
  const int past = p.descending() ? -1 : 1;  // see to_past()
  const auto* a = static_cast<const float*>(p.a.data);
  const auto* x = static_cast<const float*>(p.x.data);
  const auto* h = static_cast<const float*>(p.h.data);
  for (Turn<piped_stages(kOp)> turn;; turn.next()) {
    const int stage = turn.stage;
    shared.empty[stage].wait(turn.parity ^ 1);           // which a new barrier does not wait for
    const uint32_t ticket = atomicAdd(counter, 1u) + 1;  // it starts with all bits set
    shared.ticket[stage] = ticket;
    Barrier& arrival = shared.full[stage];
    if (ticket >= t.tiles * t.groups) {
      arrival.arrive();
      return;
    }
    const Tile at(p, t, ticket);
    float* const to_h = shared.slots[kOp == Op::kCotangent ? 2 : 1][stage].of;
    if (t.boxes) {
      // The last tile of a descending walk reaches below time 0.
      const int low = static_cast<int>(p.descending() ? at.low + at.rows - t.tile_steps : at.low);
      const uint32_t bytes = sizeof(float) * t.width * t.tile_steps;
      arrival.arrive_and_expect((uses_h ? 3 : 2) * bytes);
      copy_box(shared.slots[0][stage].of, a_map, at.i, low, at.o, arrival);
      copy_box(shared.slots[1][stage].of, x_map, at.i, low, at.o, arrival);
      if (uses_h) copy_box(to_h, h_map, at.i, low + past, at.o, arrival);
    } else {
      // In whole 16 bytes within the array. Those of h begin a row before it at the first tile, and
      // end a row behind it at the last.
      const auto floor4 = [](int64_t n) { return n & ~int64_t{3}; };
      const int64_t begin = at.begin(p), end = begin + at.rows * p.inner;
      const int64_t whole = floor4(p.channels() * p.time);
      const int64_t from = floor4(begin), to = min(floor4(end + 3), whole);
      const int64_t h_base = floor4(begin + to_past(p)), h_from = max(h_base, int64_t{0});
      const int64_t h_to = min(floor4(end + to_past(p) + 3), whole);
      const auto bytes = static_cast<uint32_t>(sizeof(float) * (to - from));
      const auto h_bytes =
          static_cast<uint32_t>(uses_h && h_to > h_from ? sizeof(float) * (h_to - h_from) : 0);
      arrival.arrive_and_expect(2 * bytes + h_bytes);
      copy_run(shared.slots[0][stage].of, a + from, bytes, arrival);
      copy_run(shared.slots[1][stage].of, x + from, bytes, arrival);
      if (h_bytes > 0) copy_run(to_h + (h_from - h_base), h + h_from, h_bytes, arrival);
    }
  }
}

// What bulk copies could not bring to a thread's slots.
template <Op kOp>
__device__ __forceinline__ void complete(const Problem& p, const PipedTiling& t, const Tile& at,
                                         const Share<kOp>& mine) {
  const bool uses_h = kOp == Op::kCotangent && p.h.data;
  // The last elements of an array whose size is not a multiple of 16 bytes.
  const int64_t n = p.channels() * p.time, whole = n & ~int64_t{3};
  const int64_t ahead = uses_h ? to_past(p) : 0, begin = at.begin(p);
  if (!t.boxes && begin + max(ahead, int64_t{0}) + at.rows * p.inner > whole) {
    for (int k = 0; k < mine.count; ++k) {
      const int64_t index = begin + mine.first + k * mine.jump;
      if (index >= whole) {
        mine.a[k * mine.jump] = static_cast<const float*>(p.a.data)[index];
        mine.x[k * mine.jump] = static_cast<const float*>(p.x.data)[index];
      }
      if (uses_h && index + ahead >= whole && index + ahead < n) {
        mine.h[k * mine.jump] = static_cast<const float*>(p.h.data)[index + ahead];
      }
    }
    before_bulk_copies();
  }
  if (kOp == Op::kScan && at.index == 0 && mine.owner && !p.has_h0) {
    *mine.a = 0.f;  // cut from the past: what is there may be anything
    before_bulk_copies();
  }
  if (uses_h && mine.h_first >= 0 && p.has_h0) {
    mine.h[mine.h_first * mine.jump] =
        p.h0.data ? load_one<float>(p.h0, at.o, at.i + mine.column, 0) : 0.f;
    before_bulk_copies();
  }
}

// Calls f with 0, 1, ..., mine.count - 1.
template <int kSteps, class F>
__device__ __forceinline__ void for_steps(int count, F&& f) {
  if (count == kSteps) {
#pragma unroll 8
    for (int k = 0; k < kSteps; ++k) f(k);
  } else {
    for (int k = 0; k < count; ++k) f(k);
  }
}

// Eight warps: the maps of all tiles.
template <Op kOp>
__device__ void compose_maps(Shared<kOp>& shared, const Problem& p, const PipedTiling& t,
                             const Mail<float>& mail) {
  const int thread = threadIdx.x % kPipedWalkers;
  for (Turn<piped_stages(kOp)> turn;; turn.next()) {
    const int stage = turn.stage;
    shared.full[stage].wait(turn.parity);
    const uint32_t ticket = shared.ticket[stage];
    if (ticket < t.tiles * t.groups) {
      const Tile at(p, t, ticket);
      const Share<kOp> mine(shared, p, t, at, stage);
      complete(p, t, at, mine);
      Composed<float> map;
      Affine<float> bound{1.f, 0.f};  // what no partial product and no partial result exceeds
      for_steps<piped_steps(kOp)>(mine.count, [&](int k) {
        const float a = mine.a[k * mine.jump];
        advance<kOp>(map.b, Step<float>{a, mine.x[k * mine.jump], 0.f, false});
        const Product<float> composed = product(a, map.a);
        map.lost = mul_add(a, map.lost, composed.lost);
        map.a = composed.rounded;
        bound.a = fmaxf(bound.a, magnitude(map.a));
        bound.b = fmaxf(bound.b, magnitude(map.b));
      });
      if (t.segments > 1) {
        shared.before[stage][thread] = map;
        shared.bounds[turn.twin][thread] = bound;
        meet<kComposers>();
        if (mine.owner) {
          Composed<float> total;
          Affine<float> of_total{1.f, 0.f};
#pragma unroll 4
          for (int k = 0; k < t.segments; ++k) {
            const int of = k * t.width + mine.column;
            const Composed<float> next = shared.before[stage][of];
            of_total = bound_of_both(shared.bounds[turn.twin][of], total, of_total);
            shared.before[stage][of] = total;
            total = compose(next, total);
          }
          map = total;
          bound = of_total;
        }
      }
      if (mine.owner) {
        const bool certain = bound.a <= Bounds<float>::product && bound.b <= Bounds<float>::local;
        if (mine.followed) {
          send(mail.at(at.index, mine.flat), certain ? Packet<float>::map(map.rounded())
                                                     : Packet<float>::tagged(Sent::kUnknown, 0.f));
        }
        shared.certain[stage][mine.column] = certain;
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.mapped[stage].arrive();
    if (ticket >= t.tiles * t.groups) return;
  }
}

// Eight warps: the steps of all tiles.
template <Op kOp, class F>
__device__ void run_tiles(Shared<kOp>& shared, const Problem& p, const PipedTiling& t,
                          const Mail<float>& mail, F&& init_of) {
  constexpr int kSteps = piped_steps(kOp), kChunk = 8;
  static_assert(kSteps % kChunk == 0);
  const int thread = threadIdx.x % kPipedWalkers;
  const bool uses_h = kOp == Op::kCotangent && p.h.data;
  for (Turn<piped_stages(kOp)> turn;; turn.next()) {
    const int stage = turn.stage;
    shared.mapped[stage].wait(turn.parity);
    const uint32_t ticket = shared.ticket[stage];
    if (ticket >= t.tiles * t.groups) return;
    const Tile at(p, t, ticket);
    const Share<kOp> mine(shared, p, t, at, stage);
    float s = 0.f;
    bool from_steps = false;
    if (mine.owner) {
      if (at.index == 0) {
        s = init_of(mine.flat);
      } else {
        const Packet<float>* last = mail.at(at.index - 1, mine.flat);
        Packet<float> entering;
        do {
          entering = receive(last);
        } while (!entering.is(Sent::kState));
        s = entering.state();
      }
      from_steps = !shared.certain[stage][mine.column] || !state_within(s);
    }

    const int64_t row = at.low + (p.descending() ? at.rows - 1 - mine.s0 : mine.s0);
    const int64_t offset = (at.o * p.time + row) * p.inner + at.i + mine.column;
    const int64_t out_jump = p.descending() ? -p.inner : p.inner;
    const auto run = [&] {
      float* y = static_cast<float*>(p.y.data) + offset;
      float* da = static_cast<float*>(p.da_out.data) + offset;
      const bool write_y = p.y.data, write_da = uses_h && p.da_out.data;
      const auto step = [&](int k, float a, float x, float h) {
        const bool cut = kOp == Op::kCotangent && !p.has_h0 && k == mine.h_first;
        const Written<float> out = advance<kOp>(s, Step<float>{a, x, h, cut});
        if (write_y) *y = out.y;
        y += out_jump;
        if (kOp == Op::kCotangent && write_da) *da = out.da_out;
        da += out_jump;
      };
      if (mine.count == kSteps) {
#pragma unroll 1
        for (int begin = 0; begin < kSteps; begin += kChunk) {
          float a[kChunk], x[kChunk], h[kChunk];
#pragma unroll
          for (int k = 0; k < kChunk; ++k) {
            a[k] = mine.a[(begin + k) * mine.jump];
            x[k] = mine.x[(begin + k) * mine.jump];
            h[k] = uses_h ? mine.h[(begin + k) * mine.jump] : 0.f;
          }
#pragma unroll
          for (int k = 0; k < kChunk; ++k) step(begin + k, a[k], x[k], h[k]);
        }
      } else {
        for (int k = 0; k < mine.count; ++k) {
          step(k, mine.a[k * mine.jump], mine.x[k * mine.jump],
               uses_h ? mine.h[k * mine.jump] : 0.f);
        }
      }
    };

    // A channel whose map can be trusted is not touched by what its neighbours hold; the segments
    // of the others take turns.
    float& carry = shared.carry[turn.twin][mine.column];
    bool in_turns = false;
    int rounds = 0;
    if (t.segments > 1) {
      if (mine.owner) {
        carry = s;
        shared.certain[stage][mine.column] = !from_steps;
      }
      rounds = meet_or<kRunners>(from_steps) ? t.segments : 0;
      in_turns = mine.active && !shared.certain[stage][mine.column];
      if (mine.active && !in_turns) s = apply(shared.before[stage][thread], carry);
    }
    for (int round = -1; round < rounds; ++round) {
      if (in_turns ? mine.segment == round : round < 0) {
        if (in_turns) s = carry;
        run();
        if (in_turns) carry = s;
      }
      if (round >= 0) meet<kRunners>();
    }
    if (from_steps && mine.followed) {
      const float leaving = t.segments > 1 ? carry : s;
      send(mail.at(at.index, mine.flat), Packet<float>::tagged(Sent::kState, leaving));
    }
    if (p.final.data && !mine.followed && mine.count > 0 && mine.s0 + mine.count == at.rows) {
      store_one(p.final, mine.flat, s);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.empty[stage].arrive();
  }
}

}  // namespace piped

// `counter` hands out the tiles. The first `tiling.chain_blocks` blocks are the chain.
template <Op kOp>
__global__ void __launch_bounds__(piped::kThreads, 1)
    piped_kernel(const __grid_constant__ Problem p, const __grid_constant__ PipedTiling tiling,
                 const __grid_constant__ CUtensorMap a_map,
                 const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap h_map, unsigned* counter, Mail<float> mail) {
  using namespace piped;
  if constexpr (kHasBulkCopies) {
    extern __shared__ __align__(128) char memory[];
    const int warp = threadIdx.x / 32;
    const auto init_of = [&](uint32_t flat) {
      const uint32_t o = flat / static_cast<uint32_t>(p.inner);
      return p.init.data ? load_one<float>(p.init, o, flat - o * static_cast<uint32_t>(p.inner), 0)
                         : 0.f;
    };
    if (blockIdx.x < tiling.chain_blocks) {
      if (warp < kPipedChainWarps) {
        carry_states<kPipedChainWarps, kPipedBatch>(mail, tiling.chain_team, blockIdx.x,
                                                    tiling.chain_blocks, memory, init_of);
      }
      return;
    }
    auto& shared = *reinterpret_cast<Shared<kOp>*>(memory);
    if (threadIdx.x == 0) {
      for (int k = 0; k < piped_stages(kOp); ++k) {
        shared.full[k].init(1);
        shared.mapped[k].init(kWalkingWarps);
        shared.empty[k].init(kWalkingWarps);
      }
      barriers_are_ready();
      before_bulk_copies();
    }
    __syncthreads();
    if (warp == kReader) {
      if (threadIdx.x % 32 == 0) read_tiles(shared, p, tiling, &a_map, &x_map, &h_map, counter);
    } else if (warp < kWalkingWarps) {
      compose_maps(shared, p, tiling, mail);
    } else {
      run_tiles(shared, p, tiling, mail, init_of);
    }
  }
}

namespace piped {

template <Op kOp>
cudaError_t launch_op(const Problem& problem, const Device& device, void* workspace,
                      cudaStream_t stream) {
  PipedTiling t = piped_tiling(kOp, problem.outer, problem.time, problem.inner);
  constexpr int kBytes = sizeof(Shared<kOp>);
  static_assert(kMostTurns * kPipedChainWarps * Baton<float>::kBytes <= kBytes);
  if (t.width == 0 || kBytes > device.shared_bytes) return cudaErrorNotSupported;
  const int64_t channels = problem.channels(), tiles = t.tiles;
  const Chain chain = plan_chain(tiles, divide_up(channels, kBundle), kPipedChainWarps, kPipedTeam,
                                 device.multiprocessors);
  // Not where the chain would leave no multiprocessor to the tiles.
  if (device.multiprocessors < 16 || (tiles > 1 && chain.blocks == 0)) return cudaErrorNotSupported;
  t.chain_blocks = static_cast<uint32_t>(chain.blocks);
  t.chain_team = chain.team;
  const int64_t blocks = std::min(tiles * t.groups, device.multiprocessors - chain.blocks);

  CUtensorMap maps[3] = {};
  cudaError_t error = cudaSuccess;
  const Input* const operands[] = {&problem.a, &problem.x, &problem.h};
  for (int k = 0; t.boxes && k < 3 && error == cudaSuccess; ++k) {
    if (operands[k]->data)
      error = boxes_of<float>(problem, *operands[k], t.width, t.tile_steps, maps[k],
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
  }
  if (error != cudaSuccess) return error;
  const auto kernel = piped_kernel<kOp>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  auto* memory = static_cast<unsigned char*>(workspace);
  error = cudaMemsetAsync(memory, 0xff, t.bytes, stream);
  if (error != cudaSuccess) return error;
  const Mail<float> mail{reinterpret_cast<Packet<float>*>(memory + kPipedPlacesOffset), tiles,
                         static_cast<uint32_t>(channels)};
  kernel<<<static_cast<unsigned>(chain.blocks + blocks), kThreads, kBytes, stream>>>(
      problem, t, maps[0], maps[1], maps[2], reinterpret_cast<unsigned*>(memory), mail);
  return cudaGetLastError();
}

}  // namespace piped

}  // namespace jax_scan
