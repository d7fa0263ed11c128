// The single pass over memory that is parallel in time as a pipeline through a multiprocessor's
// shared memory: for few channels in rows, from compute capability 9.0 on.
//
// Time is cut into tiles as in chained.cuh, and states go from tile to tile through the same chain
// (chain.cuh). There a block reads a tile, composes its map, waits for the state, and runs the
// steps, one after the other. Here one block has all of a multiprocessor, and its warps do one
// thing each, tile after tile, in a ring of stages in shared memory:
//   one thread takes tiles in the order of time, and has each copied to a stage in bulk
//   (cp.async.bulk), as soon as there is one,
//   eight warps compose the maps of tiles as they arrive, and send them to the chain,
//   eight warps wait for the state that enters, run the recurrence, write, and free the stage.
// No map waits for a state, so that a state's way through the chain and back is hidden behind the
// tiles that follow. How much is read ahead is limited by shared memory, so that a stage should not
// be empty for long: its next tile is taken while the last one's steps run, unless there are
// resets. Operands come one by one, and a limited number of them is on its way at a time, since
// states come through the same memory (kPipedBytesAhead).
//
// A thread walks kSteps consecutive steps of one channel, or of two that are neighbours, in 16
// bits; neighbours neighbouring channels. With fewer channels than threads the tile's time is
// divided into segments, whose maps are composed in shared memory. Whether a map may be applied to
// a state is settled as in chained.cuh: if not, the segments of that channel take turns, in order,
// and send the state that comes out. All blocks have tiles in order, so that the first tile without
// its state is one that some block runs next.
//
// `a` comes as x does, from an array in full or one that is the same for all outer indices. Without
// time it is not copied: a thread has its channel's factor in a register, and their product over
// its steps from few multiplications, unless there is a cut. Its gradient is then summed: by each
// thread over its steps, over segments in order, and over tiles by a second kernel. Where `a` is
// the same for all inner indices, its run of a tile's times is copied.
//
// Where it is the same for all outer indices, and its gradient summed over these, a block has
// stacks: the tiles of all outer indices, or of a part of them, at the same times and channels, one
// after the other. Threads hold a and the sums in registers, for which their loops are unrolled,
// and compose the factors once for a stack. Since all stacks have outer indices in the same order,
// a tile's state is one of an earlier stack, or of its own. The tiles are short: another warp waits
// for states, so that those of the next tile are there when steps have run. Sums of parts are added
// up by a second kernel.
//
// Resets that are the same for all inner indices come with a tile, a byte for each of its times.
// Threads of one segment share its cuts, a bit for each step. Where no lane of a warp has any
// within a few steps, these run without.
#pragma once

#include "cuda/chain.cuh"
#include "cuda/device.cuh"
#include "cuda/launch.h"
#include "cuda/sum_over_tiles.cuh"
#include "cuda/tma.cuh"

namespace jax_scan {

namespace piped {

inline constexpr int kWalkingWarps = kPipedWalkers / 32;
inline constexpr int kReader = 2 * kWalkingWarps;  // the warp
inline constexpr int kHerald = kReader + 1;
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

// The types of a, x, h, y and da_out, how a comes, and a thread's share of a tile: kSteps steps of
// kVector neighbouring channels.
template <Op kOp_, class A_, class B, class H_, int kVector_, PipedA kWay_>
struct Types {
  static constexpr Op kOp = kOp_;
  static constexpr bool kCotangent = kOp == Op::kCotangent;
  using A = A_;
  using X = std::conditional_t<kCotangent, H_, B>;
  using H = H_;
  using Y = std::conditional_t<kCotangent, B, H_>;
  using S = StateOf<B>;
  using R = Real<S>;
  static_assert(sizeof(B) == sizeof(H));
  static constexpr int kVector = kVector_;
  static constexpr PipedA kWay = kWay_;
  static constexpr bool kSums = kWay == PipedA::kFixed && kCotangent;  // da over time
  static constexpr bool kStack = kWay == PipedA::kStack;               // da over outer indices
  static constexpr int kBlock = kThreads + (kStack ? 32 : 0);          // threads
  static constexpr PipedKernel kKernel =
      piped_kernel(sizeof(A), sizeof(B), !std::is_same_v<S, R>, kVector);
  // What a stage waits for, each by itself: x, with what is small, then rows of a, and h.
  static constexpr int kX = 0, kRowsOfA = 1, kH = kWay == PipedA::kRows ? 2 : 1;
  static constexpr int kSteps = kKernel.ring(kOp, kWay).steps;
  static constexpr int kStages = kKernel.ring(kOp, kWay).stages;
  // Steps whose operands are in registers at a time. Seven are spilled on 10.0 and 12.0.
  static constexpr bool kFewRegisters = kMajor >= 10 && sizeof(S) == 8 && kWay == PipedA::kRuns;
  static constexpr int kChunk = kStack            ? (sizeof(S) == 8 ? 1 : 4)
                                : kSteps % 8 == 0 ? 8
                                : kFewRegisters   ? 2
                                                  : kSteps / 2;
  static_assert(kSteps % kChunk == 0 && kSteps <= 32);
};

// What a thread has of a row: neighbouring channels, read in one access.
template <class E, int V>
struct Channels {
  Pack<E, V> pack;
  template <class S>
  __device__ __forceinline__ S at(int v) const {
    return load_as<S>(pack.v[v]);
  }
};
// As one word: as two numbers of 16 bits it would be taken apart with more instructions.
template <class E>
  requires(sizeof(E) == 2)
struct Channels<E, 2> {
  uint32_t word;
  template <class S>
  __device__ __forceinline__ S at(int v) const {
    if constexpr (std::is_same_v<E, BFloat16>) {
      return S(__uint_as_float(v == 0 ? word << 16 : word & 0xffff0000u));
    } else {
      return load_as<S>(E{static_cast<uint16_t>(word >> (16 * v))});
    }
  }
};

// What all of a thread's channels share.
template <class E>
struct Common {
  E value;
  template <class S>
  __device__ __forceinline__ S at(int) const {
    return load_as<S>(value);
  }
};
// What a thread holds of a stack: for each of its steps.
template <class E, int V, int kSteps>
struct HeldRows {
  Channels<E, V> of[kSteps];
};
// What a thread holds for all of its steps.
template <class E, int V>
struct Held {
  E value[V];
  template <class S>
  __device__ __forceinline__ S at(int v) const {
    return load_as<S>(value[v]);
  }
};

// Elements of T in 16 bytes, the unit of bulk copies.
template <class T>
inline constexpr int kPiece = 16 / static_cast<int>(sizeof(T));

// The one thread that takes tiles leaves this for all others, when the stage is empty.
struct alignas(16) Tile {
  uint32_t o;
  uint32_t left;  // tiles of its stack behind it
  int rows;       // none: there is no such tile
  bool begins;    // a stack
  int64_t low;    // its lowest time
  uint32_t index;
  int i, columns;
  Tile() = default;
  // The first one of a ticket's.
  __device__ Tile(const Problem& p, const PipedTiling& t, uint32_t ticket) {
    const uint32_t part = t.parts > 1 ? ticket / (t.tiles * t.groups) : 0;
    ticket -= part * t.tiles * t.groups;
    index = ticket / t.groups;
    const uint32_t group = ticket - index * t.groups;
    const uint32_t stack = group / t.strips;
    o = part * t.outer_part + stack;
    left = min(t.outer_part, static_cast<uint32_t>(p.outer) - part * t.outer_part) - 1;
    begins = true;
    i = static_cast<int>(group - stack * t.strips) * t.width;
    columns = min(t.width, static_cast<int>(p.inner) - i);
    const int64_t s0 = int64_t{index} * t.tile_steps;
    rows = static_cast<int>(min(int64_t{t.tile_steps}, p.time - s0));
    low = p.descending() ? p.time - s0 - rows : s0;
  }
  __device__ void next_of_stack() {
    ++o;
    --left;
    begins = false;
  }
  __device__ bool followed(const PipedTiling& t) const { return index + 1 < t.tiles; }
  // Of its first element in memory, if its rows are one run.
  __device__ int64_t begin(const Problem& p) const { return (o * p.time + low) * p.inner; }
};

// What a thread has of it. In kernels for stacks, which hold much else, it looks it up.
template <class T>
using TileOf = std::conditional_t<T::kStack, const Tile&, Tile>;

template <class T>
struct Shared {
  static constexpr int kElements = kPipedWalkers * T::kVector * T::kSteps;
  // Room for what lies before a run in its first 16 bytes, and behind it in its last; and to begin
  // where boxes may.
  template <class E, int kCount = kElements>
  struct alignas(128) Slots {
    E of[kCount + 2 * kPiece<E>];
  };
  struct None {};
  static constexpr int kSegments = kPipedWalkers / kPipedLeastLanes;
  static constexpr int kTimes = kSegments * T::kSteps;      // of the longest tile
  static constexpr int kMaps = kPipedWalkers * T::kVector;  // [segment][column]
  using S = typename T::S;
  using A = typename T::A;

  std::conditional_t<T::kWay == PipedA::kFixed || T::kStack, None,
                     std::conditional_t<T::kWay == PipedA::kRuns, Slots<A, kTimes>, Slots<A>>>
      a[T::kStages];
  Slots<typename T::X> x[T::kStages];
  std::conditional_t<T::kCotangent, Slots<typename T::H>, None> h[T::kStages];
  alignas(16) uint8_t resets[T::kStages][kTimes + 2 * 16];
  Composed<S> before[T::kStages][kMaps];   // the map of the segments before this one
  Affine<typename T::R> bounds[2][kMaps];  // by turns
  // [column]: the state that enters.
  S carry[T::kStack ? T::kStages : 2][T::kStack ? kMostStackWidth : kPipedWalkers];
  bool in_turns[T::kStages];  // of a stack: segments of some channels take turns
  // [column]: the tile's map does; then, whether it may be applied to the state that enters.
  bool certain[T::kStages][kPipedWalkers];
  Tile tile[T::kStages];
  // That an operand has come; that the tile's map is composed; that the state has come that enters
  // it; that the tile is through.
  Barrier full[T::kStages][T::kH + 1], mapped[T::kStages], entered[T::kStages], empty[T::kStages];
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

// Of what is copied of a, the outer index, the tile's first element and how many there are in all.
template <class T>
struct OfA {
  uint32_t o;
  int64_t begin, all;
  __device__ OfA(const Problem& p, const PipedTiling& t, const Tile& at)
      : o(t.outer_shares_a ? 0 : at.o) {
    const int64_t row = T::kWay == PipedA::kRuns ? 1 : p.inner;
    begin = (o * p.time + at.low) * row;
    all = (t.outer_shares_a ? 1 : p.outer) * p.time * row;
  }
};

// From a time to the one before it in the recurrence of h, which for a cotangent is the next one of
// the walk: in elements.
__device__ __forceinline__ int64_t to_past(const Problem& p) {
  return p.descending() ? -p.inner : p.inner;
}

// The elements from `begin` to `end` of an array of `all` as a bulk copy: whole 16 bytes within the
// array. They may begin before it, and end behind it.
template <class T>
struct Run {
  int64_t base, from;  // where slots begin, and what is copied to them
  uint32_t bytes;
  __device__ Run(int64_t begin, int64_t end, int64_t all) {
    base = floor(begin);
    from = max(base, int64_t{0});
    const int64_t to = min(floor(end + kPiece<T> - 1), floor(all));
    bytes = to > from ? static_cast<uint32_t>((to - from) * sizeof(T)) : 0;
  }
  __device__ void copy(T* slots, const void* data, const Barrier& arrival) const {
    if (bytes == 0) return;
    copy_run(slots + (from - base), static_cast<const T*>(data) + from, bytes, arrival);
  }
  static __device__ int64_t floor(int64_t n) { return n & ~int64_t{kPiece<T> - 1}; }
  // Of an element in the slots.
  static __device__ int shift(int64_t begin) { return static_cast<int>(begin & (kPiece<T> - 1)); }
};

// The resets of an outer index from time 0 on, and all that lie in memory.
struct Resets {
  int64_t begin, all;
  __device__ Resets(const Problem& p, uint32_t o) {
    const int64_t stride = p.reset.at.outer[0].stride;  // 0 without an outer axis
    begin = o * stride;
    all = (p.outer - 1) * stride + p.time;
  }
};

// A way through an array, step by step. It hides how each address comes about: else all would be
// computed anew from the first one.
class Place {
 public:
  __device__ explicit Place(const void* first) : address_(__cvta_generic_to_global(first)) {}
  template <class T>
  __device__ __forceinline__ void put(T value) const {
    *static_cast<T*>(__cvta_global_to_generic(address_)) = value;
  }
  template <class T>
  __device__ __forceinline__ T get() const {
    return *static_cast<const T*>(__cvta_global_to_generic(address_));
  }
  __device__ __forceinline__ void step(int64_t bytes) {
    address_ += bytes;
    asm volatile("" : "+l"(address_));
  }

 private:
  size_t address_;
};

// A thread's place among those of a tile, whichever that is.
struct Seat {
  int segment, column;
  // What follows from it is to be computed anew for each stack, not kept in registers.
  __device__ __forceinline__ void hide() { asm volatile("" : "+r"(segment), "+r"(column)); }
  Seat() = default;
  __device__ Seat(const PipedTiling& t, int vector) {
    const int thread = threadIdx.x % kPipedWalkers;
    segment = thread / t.lanes;
    column = (thread - segment * t.lanes) * vector;
  }
};

// A thread's share of a tile: `count` steps of its channels, from the tile's step s0 on.
template <class T>
struct Share : Seat {
  static constexpr int V = T::kVector;
  int s0, count, first, jump;  // `first`, `jump`: in an operand's slots, in rows of V
  bool active;                 // it has channels
  int h_first;                 // the step at which the recurrence of h begins, or -1
  using A = typename T::A;
  Held<A, V> fixed;  // a without time
  // The operands of the first step.
  std::conditional_t<T::kWay == PipedA::kRuns, Common<A>*, Channels<A, V>*> a;
  int a_jump;  // in a run
  Channels<typename T::X, V>* x;
  Channels<typename T::H, V>* h;

  Share() = default;
  __device__ Share(Shared<T>& shared, const Problem& p, const PipedTiling& t, const Tile& at,
                   const Seat& seat, int stage)
      : Seat(seat) {
    const bool descending = p.descending();
    active = segment < t.segments && column < at.columns;
    s0 = segment * T::kSteps;
    count = active ? max(min(at.rows - s0, T::kSteps), 0) : 0;
    if constexpr (T::kCotangent) {
      h_first = !at.followed(t) && s0 + count == at.rows ? count - 1 : -1;
    } else {
      h_first = at.index == 0 && segment == 0 ? 0 : -1;
    }
    const int pitch = (t.boxes ? t.width : static_cast<int>(p.inner)) / V;
    const int last_row = (t.boxes ? t.tile_steps : at.rows) - 1;
    first = (descending ? last_row - s0 : s0) * pitch + column / V;
    jump = descending ? -pitch : pitch;
    const int64_t begin = t.boxes ? 0 : at.begin(p);
    if constexpr (T::kWay == PipedA::kRows) {
      a = slots_of(shared.a[stage].of, t, t.boxes ? 0 : OfA<T>(p, t, at).begin);
    } else if constexpr (T::kWay == PipedA::kRuns) {
      a = reinterpret_cast<Common<A>*>(shared.a[stage].of) + Run<A>::shift(OfA<T>(p, t, at).begin) +
          (descending ? at.rows - 1 - s0 : s0);
      a_jump = descending ? -1 : 1;
    } else if (T::kWay == PipedA::kFixed && active) {
      const Broadcast& of = p.a.at;
      const A* first_a = static_cast<const A*>(p.a.data) + at.o * of.outer[0].stride +
                         (at.i + column) * of.inner[0].stride;
#pragma unroll
      for (int v = 0; v < V; ++v) fixed.value[v] = first_a[v * of.inner[0].stride];
    }
    x = slots_of(shared.x[stage].of, t, begin);
    if constexpr (T::kCotangent) h = slots_of(shared.h[stage].of, t, begin + to_past(p));
  }
  // Of a stack, whose tiles are boxes: from its last tile to the one in `stage`.
  __device__ __forceinline__ void follow(Shared<T>& shared, int stage) {
    x = reinterpret_cast<Channels<typename T::X, V>*>(shared.x[stage].of) + first;
    if constexpr (T::kStack) {
      h = reinterpret_cast<Channels<typename T::H, V>*>(shared.h[stage].of) + first;
    }
  }
  // Of a stack: what it holds of a; behind the last step, that one's again.
  __device__ __forceinline__ void hold(HeldRows<A, V, T::kSteps>& held, const Problem& p,
                                       const Tile& at) const {
    if (count == 0) return;
    const int64_t row = at.low + (p.descending() ? at.rows - 1 - s0 : s0);
    Place from(static_cast<const A*>(p.a.data) + row * p.inner + at.i + column);
    const int64_t step = (p.descending() ? -p.inner : p.inner) * static_cast<int>(sizeof(A));
#pragma unroll
    for (int k = 0; k < T::kSteps; ++k) {
      held.of[k] = from.get<Channels<A, V>>();
      from.step(k + 1 < count ? step : 0);
    }
  }
  // Step k's.
  __device__ __forceinline__ auto a_at(int k) const {
    if constexpr (T::kWay == PipedA::kRows) {
      return a[k * jump];
    } else if constexpr (T::kWay == PipedA::kRuns) {
      return a[k * a_jump];
    } else {
      return fixed;
    }
  }
  // The first step's. A run is copied from the 16 bytes on in which it begins.
  template <class E>
  __device__ Channels<E, V>* slots_of(E* slots, const PipedTiling& t, int64_t begin) const {
    return reinterpret_cast<Channels<E, V>*>(slots + (t.boxes ? 0 : Run<E>::shift(begin))) + first;
  }
};

// One thread: takes tiles, and has them copied.
template <class T>
__device__ void read_tiles(Shared<T>& shared, const Problem& p, const PipedTiling& t,
                           const CUtensorMap* a_map, const CUtensorMap* x_map,
                           const CUtensorMap* h_map, unsigned* counter) {
  using A = typename T::A;
  using X = typename T::X;
  using H = typename T::H;
  constexpr bool kRows = T::kWay == PipedA::kRows, kRuns = T::kWay == PipedA::kRuns;
  const bool uses_h = T::kCotangent && p.h.data;
  const int past = p.descending() ? -1 : 1;  // see to_past()
  // Operands that are on their way, and the one that is waited for next. Of those that the ring
  // holds, at most: the barrier of an earlier one would be in a later phase, which may never end.
  const int operands = T::kH + (uses_h ? 1 : 0), most = min(t.ahead, operands * T::kStages);
  int on_their_way = 0, of_earlier = 0;
  Turn<T::kStages> earlier;
  Tile at;
  at.left = 0;
  for (Turn<T::kStages> turn;; turn.next()) {
    const int stage = turn.stage;
    // The stage's next tile is taken once the state has come that enters its last one, which new
    // barriers do not wait for: the tile's arithmetic is then done when the stage is empty. Others
    // may wait for what is taken. This thread has then ordered all that it took before, and for
    // this one it waits until steps have run that wait for nothing but what has been ordered. With
    // tiles in order in each block, the first one of all that has not run is still one that some
    // block runs next. Tiles taken earlier would hold up others for longer, and so do these with
    // resets, where steps take long: (1,1048576,64) backward in bfloat16 on an H200 0.64 of the
    // limit instead of 0.735.
    const Barrier& due = p.reset.data ? shared.empty[stage] : shared.entered[stage];
    due.wait(turn.parity ^ 1);
    bool none_left = false;
    if (T::kStack && at.left > 0) {
      at.next_of_stack();
    } else {
      const uint32_t ticket = atomicAdd(counter, 1u) + 1;  // it starts with all bits set
      at = Tile(p, t, ticket);
      none_left = ticket >= t.tiles * t.groups * t.parts;
    }
    const Resets resets(p, at.o);
    const int64_t first_reset = resets.begin + at.low;
    const Run<uint8_t> reset(first_reset, first_reset + at.rows, resets.all);
    const OfA<T> of_a(p, t, at);
    const Run<A> a(of_a.begin, of_a.begin + (kRows ? at.rows * p.inner : at.rows), of_a.all);
    // h begins a row before the array at the first tile, and ends a row behind it at the last.
    const int64_t begin = at.begin(p), end = begin + at.rows * p.inner;
    const int64_t ahead = to_past(p), all = p.channels() * p.time;
    const Run<X> x(begin, end, all);
    const Run<H> h(begin + ahead, end + ahead, all);
    // The last tile of a descending walk reaches below time 0.
    const int low = static_cast<int>(p.descending() ? at.low + at.rows - t.tile_steps : at.low);

    shared.empty[stage].wait(turn.parity ^ 1);
    if (none_left) {
      shared.tile[stage].rows = 0;
      shared.tile[stage].begins = true;
      shared.full[stage][T::kX].arrive();
      return;
    }
    shared.tile[stage] = at;
    // The barrier of an operand that may be copied now: a box or a run, and what comes with it.
    const auto order = [&]<class E>(int operand, const Run<E>& run, uint32_t more) -> Barrier& {
      if (on_their_way < most) {
        ++on_their_way;
      } else {
        shared.full[earlier.stage][of_earlier].wait(earlier.parity);
        if (++of_earlier == operands) {
          of_earlier = 0;
          earlier.next();
        }
      }
      Barrier& arrival = shared.full[stage][operand];
      const uint32_t box = t.width * t.tile_steps * static_cast<uint32_t>(sizeof(E));
      arrival.arrive_and_expect((t.boxes ? box : run.bytes) + more);
      return arrival;
    };
    const uint32_t reset_bytes = p.reset.data ? reset.bytes : 0;
    const Barrier& with_x = order(T::kX, x, (kRuns ? a.bytes : 0) + reset_bytes);
    if (t.boxes) {
      copy_box(shared.x[stage].of, x_map, at.i, low, at.o, with_x);
    } else {
      x.copy(shared.x[stage].of, p.x.data, with_x);
    }
    if constexpr (kRuns) a.copy(shared.a[stage].of, p.a.data, with_x);
    if (reset_bytes > 0) reset.copy(shared.resets[stage], p.reset.data, with_x);
    if constexpr (kRows) {
      const Barrier& arrival = order(T::kRowsOfA, a, 0);
      if (t.boxes) {
        copy_box(shared.a[stage].of, a_map, at.i, low, of_a.o, arrival);
      } else {
        a.copy(shared.a[stage].of, p.a.data, arrival);
      }
    }
    if constexpr (T::kCotangent) {
      if (!uses_h) continue;
      const Barrier& arrival = order(T::kH, h, 0);
      if (t.boxes) {
        copy_box(shared.h[stage].of, h_map, at.i, low + past, at.o, arrival);
      } else {
        h.copy(shared.h[stage].of, p.h.data, arrival);
      }
    }
  }
}

// Where a thread finds the operands of its steps from `begin` on. Of a stack, whose steps are not
// in a loop, one after the other, hidden as in Place.
template <class T>
class SlotsOfSteps {
 public:
  __device__ SlotsOfSteps(int jump, int begin) : jump_(jump) {
    if constexpr (T::kStack) asm volatile("" : "+r"(jump_));
    at_ = begin * jump_;
  }
  __device__ __forceinline__ int next(int step) {
    if constexpr (!T::kStack) return step * jump_;
    const int at = at_;
    at_ += jump_;
    asm volatile("" : "+r"(at_));
    return at;
  }

 private:
  int jump_, at_;
};

// What bulk copies could not bring to a thread's slots.
template <class T>
__device__ __forceinline__ void complete(const Problem& p, const PipedTiling& t, const Tile& at,
                                         const Share<T>& mine) {
  constexpr int V = T::kVector;
  const bool uses_h = T::kCotangent && p.h.data;
  // The last elements of an array whose size is not a multiple of 16 bytes.
  const auto reaches_end = [](int64_t end, int64_t all) { return end > Run<BFloat16>::floor(all); };
  const OfA<T> of_a(p, t, at);
  if constexpr (T::kWay == PipedA::kRuns) {
    if (reaches_end(of_a.begin + at.rows, of_a.all)) {
      // Threads of a segment write the same.
      for (int k = 0; k < mine.count; ++k) {
        const int step = mine.s0 + k;
        const int64_t index = of_a.begin + (p.descending() ? at.rows - 1 - step : step);
        if (index < Run<typename T::A>::floor(of_a.all)) continue;
        mine.a[k * mine.a_jump].value = static_cast<const typename T::A*>(p.a.data)[index];
      }
      before_bulk_copies();
    }
  }
  if (t.boxes) return;
  const int64_t all = p.channels() * p.time, size = at.rows * p.inner;
  const int64_t ahead = uses_h ? to_past(p) : 0, begin = at.begin(p);
  if (reaches_end(begin + max(ahead, int64_t{0}) + size, all) ||
      (T::kWay == PipedA::kRows && t.outer_shares_a && reaches_end(of_a.begin + size, of_a.all))) {
    const auto fill = [&]<class E>(Channels<E, V>* slots, const Input& in, int64_t from,
                                   int64_t all_of_it) {
      for (int k = 0; k < mine.count; ++k) {
        const int64_t index = from + (mine.first + k * mine.jump) * V;
        if (index < Run<E>::floor(all_of_it) || index >= all_of_it) continue;
        slots[k * mine.jump] =
            *reinterpret_cast<const Channels<E, V>*>(static_cast<const E*>(in.data) + index);
      }
    };
    if constexpr (T::kWay == PipedA::kRows) fill(mine.a, p.a, of_a.begin, of_a.all);
    fill(mine.x, p.x, begin, all);
    if constexpr (T::kCotangent) {
      if (uses_h) fill(mine.h, p.h, begin + ahead, all);
    }
    before_bulk_copies();
  }
}

// Bit k: the thread's step k is cut from the past. All lanes of a warp ask.
template <class T>
__device__ __forceinline__ uint32_t find_cuts(const Problem& p, const PipedTiling& t,
                                              const Tile& at, const Share<T>& mine,
                                              const uint8_t* resets) {
  uint32_t cuts = 0;
  if (p.reset.data) {
    const int lane = threadIdx.x % 32;
    const int begin = __shfl_sync(0xffffffffu, mine.segment, 0);
    const int end = min(__shfl_sync(0xffffffffu, mine.segment, 31) + 1, t.segments);
    const Resets of(p, at.o);
    const int64_t first = of.begin + at.low;
    for (int segment = begin; segment < end; ++segment) {
      const int step = segment * T::kSteps + lane;
      bool cut = false;
      if (lane < T::kSteps && step < at.rows) {
        const int row = p.descending() ? at.rows - 1 - step : step;
        // The last ones of the array are not copied.
        cut = first + row < Run<uint8_t>::floor(of.all)
                  ? resets[Run<uint8_t>::shift(first) + row] != 0
                  : static_cast<const uint8_t*>(p.reset.data)[first + row] != 0;
      }
      const uint32_t of_segment = __ballot_sync(0xffffffffu, cut);
      if (segment == mine.segment) cuts = of_segment;
    }
  }
  if (!p.has_h0 && mine.h_first >= 0) cuts |= 1u << mine.h_first;
  return cuts;
}

// Calls f(k, count, plain), the last two as types, for steps k, k + 1, ... of the thread's. Of
// kSteps steps it gets a chunk at a time, and plain ones where `special`, which is the same for a
// warp, has no bit; else one at a time. Where no step is special the loop has no branch. Of a stack
// k is a constant, and there are always kSteps; those from `count` on, in chunks that are not
// plain, are for f to leave out.
template <class T, class F>
__device__ __forceinline__ void for_chunks(int count, uint32_t special, F&& f) {
  constexpr int kChunk = T::kChunk;
  constexpr std::integral_constant<int, kChunk> chunk;
  if constexpr (T::kStack) {
    if (count == T::kSteps && special == 0) {
#pragma unroll
      for (int k = 0; k < T::kSteps; k += kChunk) f(k, chunk, std::true_type{});
    } else {
#pragma unroll
      for (int k = 0; k < T::kSteps; k += kChunk) f(k, chunk, std::false_type{});
    }
  } else if (count != T::kSteps) {
#pragma unroll 1
    for (int k = 0; k < count; ++k) f(k, std::integral_constant<int, 1>{}, std::false_type{});
  } else if (special == 0) {
#pragma unroll 1
    for (int k = 0; k < T::kSteps; k += kChunk) f(k, chunk, std::true_type{});
  } else {
#pragma unroll 1
    for (int k = 0; k < T::kSteps; k += kChunk) {
      if ((special >> k & ((1u << kChunk) - 1)) == 0) {
        f(k, chunk, std::true_type{});
      } else {
        f(k, chunk, std::false_type{});
      }
    }
  }
}

// The factor of two maps in a row.
template <class S>
__device__ __forceinline__ Composed<S> both_factors(const Composed<S>& second,
                                                    const Composed<S>& first) {
  const Product<S> p = product(second.a, first.a);
  return {p.rounded, mul_add(second.a, first.lost, mul_add(second.lost, first.a, p.lost)), S(0)};
}
template <int kCount, class S>
__device__ __forceinline__ Composed<S> power(S a) {
  if constexpr (kCount == 1) {
    return {a};
  } else if constexpr (kCount % 2 == 1) {
    return both_factors({a}, power<kCount - 1>(a));
  } else {
    const Composed<S> half = power<kCount / 2>(a);
    return both_factors(half, half);
  }
}
// What `count` steps with the factor `a` multiply by, in all: kMost of them, as a rule.
// Of kMost steps, or of fewer one by one.
template <int kMost, class S>
__device__ __forceinline__ Composed<S> power(S a, int count) {
  if (count == kMost) return power<kMost>(a);
  Composed<S> all;
#pragma unroll 1
  for (int k = 0; k < count; ++k) all = both_factors({a}, all);
  return all;
}

// Eight warps: the maps of all tiles.
template <class T>
__device__ void compose_maps(Shared<T>& shared, const Problem& p, const PipedTiling& t,
                             const Mail<typename T::S>& mail) {
  using S = typename T::S;
  using R = typename T::R;
  constexpr int V = T::kVector;
  const int thread = threadIdx.x % kPipedWalkers;
  Seat seat(t, V);
  // Of a stack: a, the product of the segment's factors, and what no partial one exceeds.
  [[maybe_unused]] HeldRows<typename T::A, V, T::kStack ? T::kSteps : 1> held;
  [[maybe_unused]] Composed<S> factors[V];
  [[maybe_unused]] R largest_factor[V];
  Share<T> mine;
  for (Turn<T::kStages> turn;; turn.next()) {
    const int stage = turn.stage;
    shared.full[stage][T::kX].wait(turn.parity);
    const TileOf<T> at = shared.tile[stage];
    const bool follows = T::kStack && !at.begins;
    if (at.rows > 0) {
      if constexpr (T::kWay == PipedA::kRows) shared.full[stage][T::kRowsOfA].wait(turn.parity);
      if (follows) {
        mine.follow(shared, stage);
      } else {
        if constexpr (T::kStack) seat.hide();
        mine = Share<T>(shared, p, t, at, seat, stage);
      }
      complete(p, t, at, mine);
      if constexpr (T::kStack) {
        if (!follows) {
          mine.hold(held, p, at);
#pragma unroll
          for (int v = 0; v < V; ++v) {
            factors[v] = {};
            largest_factor[v] = R(1);
#pragma unroll
            for (int k = 0; k < T::kSteps; ++k) {
              if (k >= mine.count) continue;
              factors[v] = both_factors({held.of[k].template at<S>(v)}, factors[v]);
              largest_factor[v] = larger<S>(largest_factor[v], magnitude(factors[v].a));
            }
          }
        }
      }
      const uint32_t cuts = find_cuts(p, t, at, mine, shared.resets[stage]);
      Composed<S> map[V];
      Affine<R> bound[V];  // what no partial product and no partial result since a cut exceeds
#pragma unroll
      for (Affine<R>& b : bound) b = {R(1), R(0)};
      for_chunks<T>(mine.count, bits_of_warp(cuts), [&](int begin, auto count, auto plain) {
        const uint32_t cuts_here = plain.value ? 0 : cuts >> begin;
        SlotsOfSteps<T> slots(mine.jump, begin);
#pragma unroll
        for (int k = 0; k < count.value; ++k) {
          if (T::kStack && !plain.value && begin + k >= mine.count) break;
          const auto a = [&] {
            if constexpr (T::kStack) {
              return held.of[begin + k];
            } else {
              return mine.a_at(begin + k);
            }
          }();
          const auto x = mine.x[slots.next(begin + k)];
          const bool cut = (cuts_here & 1u << k) != 0;
#pragma unroll
          for (int v = 0; v < V; ++v) {
            const Step<S> in{a.template at<S>(v), x.template at<S>(v), S(0), cut};
            const Written<S> out = advance<T::kOp>(map[v].b, in);
            bound[v].b = larger<S>(cut ? R(0) : bound[v].b, reach<T::kOp>(map[v].b, out));
            if constexpr (T::kWay == PipedA::kFixed || T::kStack) continue;
            const Product<S> composed = product(in.a, map[v].a);
            // Selects: what is before the cut may be anything.
            map[v].lost = cut ? S(0) : mul_add(in.a, map[v].lost, composed.lost);
            map[v].a = cut ? S(0) : composed.rounded;
            bound[v].a = cut ? R(0) : larger<S>(bound[v].a, magnitude(map[v].a));
          }
        }
      });
      if constexpr (T::kWay == PipedA::kFixed) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          // Powers lie between the first and the last one, but for twice that in complex numbers,
          // whose magnitude is that of a component.
          const Composed<S> all = power<T::kSteps>(mine.a_at(0).template at<S>(v), mine.count);
          map[v].a = cuts != 0 ? S(0) : all.a;
          map[v].lost = cuts != 0 ? S(0) : all.lost;
          const R largest = R(std::is_same_v<S, R> ? 1 : 2) * magnitude(all.a);
          bound[v].a = cuts != 0 ? R(0) : larger<S>(R(1), largest);
        }
      }
      if constexpr (T::kStack) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          map[v].a = cuts != 0 ? S(0) : factors[v].a;
          map[v].lost = cuts != 0 ? S(0) : factors[v].lost;
          bound[v].a = cuts != 0 ? R(0) : largest_factor[v];
        }
      }
      Composed<S> total = map[0];
      Affine<R> of_total = bound[0];
      const bool owner = thread < at.columns;  // of a channel: it speaks for it
      if (V > 1 || t.segments > 1) {
        if (mine.active) {
          const int place = mine.segment * t.width + mine.column;
#pragma unroll
          for (int v = 0; v < V; ++v) {
            shared.before[stage][place + v] = map[v];
            shared.bounds[turn.twin][place + v] = bound[v];
          }
        }
        meet<kComposers>();
        if (owner) {
          total = {};
          of_total = {R(1), R(0)};
#pragma unroll 4
          for (int k = 0; k < t.segments; ++k) {
            const int place = k * t.width + thread;
            const Composed<S> next = shared.before[stage][place];
            of_total = bound_of_both(shared.bounds[turn.twin][place], total, of_total);
            shared.before[stage][place] = total;
            total = compose(next, total);
          }
        }
      }
      if (owner) {
        const bool certain = of_total.a <= Bounds<R>::product && of_total.b <= Bounds<R>::local;
        if (at.followed(t)) {
          const uint32_t flat = at.o * static_cast<uint32_t>(p.inner) + at.i + thread;
          send(mail.at(at.index, flat),
               certain ? Packet<S>::map(total.rounded()) : Packet<S>::tagged(Sent::kUnknown, S(0)));
        }
        shared.certain[stage][thread] = certain;
      }
    }
    const bool last = at.rows == 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.mapped[stage].arrive();
    if (last) return;
  }
}

// The state that enters a tile in channel `flat`, once it is there.
template <class T, class F>
__device__ __forceinline__ typename T::S await_state(const Problem& p, const PipedTiling& t,
                                                     const Mail<typename T::S>& mail,
                                                     uint32_t index, uint32_t flat, F&& init_of) {
  using S = typename T::S;
  if (index == 0) return init_of(flat);
  const Packet<S>* last = mail.at(index - 1, flat);
  const bool looks_back = !T::kStack && t.looks_back && index >= kLookBack;
  Packet<S> packet;
  do {
    packet = looks_back ? look_back(last) : receive(last);
  } while (!packet.is(Sent::kState));
  return packet.state();
}

// One warp, of stacks: the states that enter all tiles. Their steps are few, so that those who run
// them should find the next tile's states there.
template <class T, class F>
__device__ void await_states(Shared<T>& shared, const Problem& p, const PipedTiling& t,
                             const Mail<typename T::S>& mail, F&& init_of) {
  using S = typename T::S;
  for (Turn<T::kStages> turn;; turn.next()) {
    const int stage = turn.stage;
    shared.mapped[stage].wait(turn.parity);
    const Tile& at = shared.tile[stage];
    const bool there = at.rows > 0;
    bool from_steps = false;
    if (there) {
      const uint32_t flat = at.o * static_cast<uint32_t>(p.inner) + at.i;
      for (int column = threadIdx.x % 32; column < at.columns; column += 32) {
        const S entering = await_state<T>(p, t, mail, at.index, flat + column, init_of);
        const bool certain = shared.certain[stage][column] && state_within(entering);
        shared.carry[stage][column] = entering;
        shared.certain[stage][column] = certain;
        from_steps = from_steps || !certain;
      }
    }
    from_steps = __any_sync(0xffffffffu, from_steps);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      shared.in_turns[stage] = from_steps;
      shared.entered[stage].arrive();
    }
    if (!there) return;
  }
}

// Eight warps: the steps of all tiles.
template <class T, class F>
__device__ void run_tiles(Shared<T>& shared, const Problem& p, const PipedTiling& t,
                          const Mail<typename T::S>& mail, typename T::S* sums, F&& init_of) {
  using S = typename T::S;
  using A = typename T::A;
  using X = typename T::X;
  using H = typename T::H;
  using Y = typename T::Y;
  constexpr int V = T::kVector;
  const int thread = threadIdx.x % kPipedWalkers;
  Seat seat(t, V);
  const bool uses_h = T::kCotangent && p.h.data;
  // Of a stack: a, and the sums of da.
  constexpr int kHeld = T::kStack ? T::kSteps : 1;
  [[maybe_unused]] HeldRows<A, V, kHeld> held;
  [[maybe_unused]] Pack<S, V> da_sums[kHeld];
  Share<T> mine;
  int64_t offset;  // where the results of its first step go
  for (Turn<T::kStages> turn;; turn.next()) {
    const int stage = turn.stage;
    (T::kStack ? shared.entered : shared.mapped)[stage].wait(turn.parity);
    const TileOf<T> at = shared.tile[stage];
    if (at.rows == 0) return;
    const bool follows = T::kStack && !at.begins;
    const int64_t out_jump = p.descending() ? -p.inner : p.inner;
    if (follows) {
      mine.follow(shared, stage);
      offset += p.time * p.inner;
    } else {
      if constexpr (T::kStack) seat.hide();
      mine = Share<T>(shared, p, t, at, seat, stage);
      const int64_t row = at.low + (p.descending() ? at.rows - 1 - mine.s0 : mine.s0);
      offset = (at.o * p.time + row) * p.inner + at.i + mine.column;
    }
    if constexpr (T::kStack) {
      if (!follows) {
        mine.hold(held, p, at);
#pragma unroll
        for (Pack<S, V>& sum : da_sums) sum = {};
      }
    }
    const uint32_t cuts = find_cuts(p, t, at, mine, shared.resets[stage]);
    const bool owner = thread < at.columns;
    // The first channel.
    const auto flat = [&] { return at.o * static_cast<uint32_t>(p.inner) + at.i; };
    // Before the first step of the recurrence h is h0.
    [[maybe_unused]] S h0[V] = {};
    const bool has_first = T::kCotangent && mine.h_first >= 0;
    if (has_first && uses_h && p.h0.data) {
#pragma unroll
      for (int v = 0; v < V; ++v) h0[v] = load_one<S>(p.h0, at.o, at.i + mine.column + v, 0);
    }
    const uint32_t special = bits_of_warp(has_first ? cuts | 1u << mine.h_first : cuts);
    S entering(0);
    bool from_steps = false;
    if constexpr (!T::kStack) {
      if (owner) {
        entering = await_state<T>(p, t, mail, at.index, flat() + thread, init_of);
        from_steps = !shared.certain[stage][thread] || !state_within(entering);
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) shared.entered[stage].arrive();
    }
    if (uses_h) shared.full[stage][T::kH].wait(turn.parity);

    S s[V] = {};
    [[maybe_unused]] S da_sum[V] = {};
    const auto run = [&] {
      Place y(static_cast<Y*>(p.y.data) + offset);
      [[maybe_unused]] Place da(static_cast<A*>(p.da_out.data) + offset);
      const bool write_y = !T::kCotangent || p.y.data;
      [[maybe_unused]] const bool write_da = !T::kSums && !T::kStack && uses_h && p.da_out.data;
      for_chunks<T>(mine.count, special, [&](int begin, auto count, auto plain) {
        constexpr int kCount = decltype(count)::value;
        [[maybe_unused]] decltype(mine.a_at(0)) a[kCount];
        Channels<X, V> x[kCount];
        [[maybe_unused]] Channels<H, V> h[kCount];
        SlotsOfSteps<T> slots(mine.jump, begin);
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          if (T::kStack && !plain.value && begin + k >= mine.count) break;
          if constexpr (!T::kStack) a[k] = mine.a_at(begin + k);
          const int slot = slots.next(begin + k);
          x[k] = mine.x[slot];
          if constexpr (T::kCotangent) h[k] = uses_h ? mine.h[slot] : Channels<H, V>{};
        }
        const uint32_t cuts_here = plain.value ? 0 : cuts >> begin;
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          if (T::kStack && !plain.value && begin + k >= mine.count) break;
          Pack<Y, V> y_pack;
          [[maybe_unused]] Pack<A, V> da_pack;
#pragma unroll
          for (int v = 0; v < V; ++v) {
            Step<S> in{S(0), x[k].template at<S>(v), S(0), (cuts_here & 1u << k) != 0};
            if constexpr (T::kStack) {
              in.a = held.of[begin + k].template at<S>(v);
            } else {
              in.a = a[k].template at<S>(v);
            }
            if constexpr (T::kCotangent) {
              in.h = h[k].template at<S>(v);
              if (!plain.value && begin + k == mine.h_first) in.h = h0[v];
            }
            const Written<S> out = advance<T::kOp>(s[v], in);
            y_pack.v[v] = store_as<Y>(out.y);
            if constexpr (T::kSums) {
              da_sum[v] = da_sum[v] + out.da_out;
            } else if constexpr (T::kStack) {
              da_sums[begin + k].v[v] = da_sums[begin + k].v[v] + out.da_out;
            } else if constexpr (T::kCotangent) {
              da_pack.v[v] = store_as<A>(out.da_out);
            }
          }
          if (write_y) y.put(y_pack);
          y.step(out_jump * sizeof(Y));
          if constexpr (T::kCotangent && !T::kSums && !T::kStack) {
            if (write_da) da.put(da_pack);
            da.step(out_jump * sizeof(A));
          }
        }
      });
    };

    // A channel whose map can be trusted is not touched by what its neighbours hold; the segments
    // of the others take turns.
    const bool shares = V > 1 || t.segments > 1;
    S* const carry = shared.carry[T::kStack ? stage : turn.twin];
    int rounds = 0;
    bool in_turns = false;
    if (shares) {
      if constexpr (T::kStack) {
        rounds = shared.in_turns[stage] ? t.segments : 0;
        from_steps = rounds > 0 && owner && !shared.certain[stage][thread];
      } else {
        if (owner) {
          carry[thread] = entering;
          shared.certain[stage][thread] = !from_steps;
        }
        rounds = meet_or<kRunners>(from_steps) ? t.segments : 0;
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        in_turns = in_turns || (mine.active && !shared.certain[stage][mine.column + v]);
      }
    } else {
      s[0] = entering;
    }
    for (int round = -1; round < rounds; ++round) {
      const bool now = in_turns ? mine.segment == round : round < 0;
      if (shares && mine.active && now) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const int column = mine.column + v;
          s[v] = carry[column];
          if (shared.certain[stage][column]) {
            s[v] = apply(shared.before[stage][mine.segment * t.width + column], s[v]);
          }
        }
      }
      if (now) run();
      if (in_turns && now) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (!shared.certain[stage][mine.column + v]) carry[mine.column + v] = s[v];
        }
      }
      if (round >= 0) meet<kRunners>();
    }
    if constexpr (T::kSums) {
      if (p.da_out.data) {
        // In place of the map that no other thread needs.
        Composed<S>* const parts = shared.before[stage];
        if (mine.active) {
#pragma unroll
          for (int v = 0; v < V; ++v) parts[mine.segment * t.width + mine.column + v].b = da_sum[v];
        }
        if (shares) meet<kRunners>();
        if (owner) {
          S sum = parts[thread].b;
#pragma unroll 4
          for (int k = 1; k < t.segments; ++k) sum = sum + parts[k * t.width + thread].b;
          sums[at.index * p.channels() + flat() + thread] = sum;
        }
      }
    }
    if (from_steps && at.followed(t)) {
      send(mail.at(at.index, flat() + thread),
           Packet<S>::tagged(Sent::kState, shares ? carry[thread] : s[0]));
    }
    if (p.final.data && !at.followed(t) && mine.count > 0 && mine.s0 + mine.count == at.rows) {
#pragma unroll
      for (int v = 0; v < V; ++v) store_one(p.final, flat() + mine.column + v, s[v]);
    }
    [[maybe_unused]] const uint32_t o = at.o;
    [[maybe_unused]] const bool ends = T::kStack && at.left == 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.empty[stage].arrive();
    if constexpr (T::kStack) {
      if (!ends) continue;
      const int64_t first = offset - o * p.time * p.inner;
      static_assert(std::is_same_v<A, S>);
      const auto put = [&](S* out) {
        Place da(out + first);
#pragma unroll
        for (int k = 0; k < T::kSteps; ++k) {
          if (k < mine.count) da.put(da_sums[k]);
          da.step(out_jump * sizeof(S));
        }
      };
      if (t.parts > 1) {
        put(sums + o / t.outer_part * p.time * p.inner);
      } else {
        put(static_cast<S*>(p.da_out.data));
      }
    }
  }
}

}  // namespace piped

// `counter` hands out the tiles. The first `tiling.chain_blocks` blocks are the chain.
template <class T>
__global__ void __launch_bounds__(T::kBlock, 1)
    piped_kernel(const __grid_constant__ Problem p, const __grid_constant__ PipedTiling tiling,
                 const __grid_constant__ CUtensorMap a_map,
                 const __grid_constant__ CUtensorMap x_map,
                 const __grid_constant__ CUtensorMap h_map, unsigned* counter,
                 Mail<typename T::S> mail, typename T::S* sums) {
  using namespace piped;
  using S = typename T::S;
  if constexpr (kHasBulkCopies) {
    extern __shared__ __align__(128) char memory[];
    const int warp = threadIdx.x / 32;
    const auto init_of = [&](uint32_t flat) {
      const uint32_t o = flat / static_cast<uint32_t>(p.inner);
      return p.init.data ? load_one<S>(p.init, o, flat - o * static_cast<uint32_t>(p.inner), 0)
                         : S(0);
    };
    if (blockIdx.x < tiling.chain_blocks) {
      if (warp < kPipedChainWarps) {
        const int in_order =
            T::kStack ? tiling.outer_part * static_cast<uint32_t>(p.inner) / kBundle : 0;
        carry_states<kPipedChainWarps, kPipedBatch>(mail, tiling.chain_team, blockIdx.x,
                                                    tiling.chain_blocks, memory, init_of, in_order);
      }
      return;
    }
    auto& shared = *reinterpret_cast<Shared<T>*>(memory);
    if (threadIdx.x == 0) {
      for (int k = 0; k < T::kStages; ++k) {
        for (Barrier& operand : shared.full[k]) operand.init(1);
        shared.mapped[k].init(kWalkingWarps);
        shared.entered[k].init(T::kStack ? 1 : kWalkingWarps);
        shared.empty[k].init(kWalkingWarps);
      }
      barriers_are_ready();
    }
    __syncthreads();
    if (warp == kReader) {
      if (threadIdx.x % 32 == 0) read_tiles(shared, p, tiling, &a_map, &x_map, &h_map, counter);
    } else if (T::kStack && warp == kHerald) {
      if constexpr (T::kStack) await_states(shared, p, tiling, mail, init_of);
    } else if (warp < kWalkingWarps) {
      compose_maps(shared, p, tiling, mail);
    } else {
      run_tiles(shared, p, tiling, mail, sums, init_of);
    }
  }
}

namespace piped {

template <class T>
cudaError_t launch_op(const Problem& problem, const PipedTiling& t, void* workspace,
                      cudaStream_t stream) {
  using S = typename T::S;
  constexpr int kBytes = sizeof(Shared<T>);
  static_assert(kBytes <= kPipedSharedBytes);
  static_assert(kMostTurns * kPipedChainWarps * Baton<S>::kBytes <= kBytes);
  CUtensorMap maps[3] = {};
  cudaError_t error = cudaSuccess;
  const auto encode = [&](auto tag, const Input& in, CUtensorMap& map) {
    using E = typename decltype(tag)::type;
    if (!t.boxes || !in.data || error != cudaSuccess) return;
    error =
        boxes_of<E>(problem, in, t.width, t.tile_steps, map, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
  };
  if constexpr (T::kWay == PipedA::kRows) encode(Tag<typename T::A>{}, problem.a, maps[0]);
  encode(Tag<typename T::X>{}, problem.x, maps[1]);
  encode(Tag<typename T::H>{}, problem.h, maps[2]);
  if (error != cudaSuccess) return error;
  const auto kernel = piped_kernel<T>;
  error = prepare_for_hopper(kernel, kBytes);
  if (error != cudaSuccess) return error;
  auto* memory = static_cast<unsigned char*>(workspace);
  error = cudaMemsetAsync(memory, 0xff, t.sums_offset, stream);
  if (error != cudaSuccess) return error;
  const Mail<S> mail{reinterpret_cast<Packet<S>*>(memory + kPipedPlacesOffset), int64_t{t.tiles},
                     static_cast<uint32_t>(problem.channels())};
  S* const sums = reinterpret_cast<S*>(memory + t.sums_offset);
  kernel<<<t.chain_blocks + t.blocks, T::kBlock, kBytes, stream>>>(
      problem, t, maps[0], maps[1], maps[2], reinterpret_cast<unsigned*>(memory), mail, sums);
  error = cudaGetLastError();
  if constexpr (T::kSums) {
    if (error == cudaSuccess && problem.da_out.data) {
      error = sum_over_tiles(problem, sums, t.tiles, stream);
    }
  } else if constexpr (T::kStack) {
    if (error == cudaSuccess && t.parts > 1) {
      const TileSums parts{1, t.parts, problem.time * problem.inner, 1};
      error = sum_over_tiles(problem.da_out, sums, parts, stream);
    }
  }
  return error;
}

template <class A, class B, class H, int kVector, PipedA kWay>
cudaError_t launch_way(const Problem& problem, const PipedTiling& tiling, void* workspace,
                       cudaStream_t stream) {
  using Scan = Types<Op::kScan, A, B, H, kVector, kWay>;
  using Cotangent = Types<Op::kCotangent, A, B, H, kVector, kWay>;
  if constexpr (kWay != PipedA::kStack) {
    if (problem.op == Op::kScan) return launch_op<Scan>(problem, tiling, workspace, stream);
  }
  return launch_op<Cotangent>(problem, tiling, workspace, stream);
}

}  // namespace piped

template <class A, class B, class H, int kVector>
cudaError_t launch_piped(const Problem& problem, const PipedTiling& tiling, void* workspace,
                         cudaStream_t stream) {
  cudaError_t queued = cudaErrorNotSupported;
  const auto launch = [&](auto tag) {
    constexpr PipedA kWay = decltype(tag)::value;
    if constexpr (piped_takes(kWay, sizeof(A), sizeof(B), kVector)) {
      if (tiling.way == kWay) {
        queued = piped::launch_way<A, B, H, kVector, kWay>(problem, tiling, workspace, stream);
      }
    }
  };
  launch(std::integral_constant<PipedA, PipedA::kRows>{});
  launch(std::integral_constant<PipedA, PipedA::kFixed>{});
  launch(std::integral_constant<PipedA, PipedA::kRuns>{});
  launch(std::integral_constant<PipedA, PipedA::kStack>{});
  return queued;
}

}  // namespace jax_scan
