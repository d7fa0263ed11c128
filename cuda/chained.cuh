// The scan in a single pass over memory that is parallel in time: for few channels, and wherever
// time is the axis along which memory runs.
//
// Time is cut into tiles; a block takes one tile of some channels into shared memory, and each of
// its threads walks a segment of it: `kSteps` consecutive steps of one or a few neighbouring
// channels. With the state s_in that enters the tile, the one that leaves is A s_in + B, where
// (A, B) composes the steps' affine maps. A block
//   1. composes its tile's map and sends it to the chain (chain.cuh), whose warps apply the maps of
//   all tiles to the state, in order,
//   2. receives from there the state that enters its tile, and
//   3. runs the recurrence through its steps from that state, and writes.
// (After Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back", 2016,
// where each block looks back over its predecessors' maps itself.)
//
// Blocks take tiles in the order of time, and each takes its next one only when it can begin with
// it, once the state that enters its present one is there: in the order in which states come.
// A tile taken ahead waits, unread, until its block is through with the one before; since blocks do
// not come by their tiles in the order in which they will be free, such tiles lie anywhere among
// those that others are reading, and all later ones wait for their maps. Blocks fall into step
// then: all read at once, then all wait. At (1,4194304,64) that is 0.40 of the limit, not 0.66.
//
// A s_in + B stands for the step-by-step recurrence only while products and sums stay far from
// overflow (Bounds). A tile for which that is not certain sends no map; it waits for the state,
// walks its segments in order, and sends what comes out. The choice depends on the data alone,
// channel by channel. (A product that underflows counts as zero.)
#pragma once

#include "cuda/chain.cuh"
#include "cuda/copy.cuh"
#include "cuda/device.cuh"
#include "cuda/launch.h"
#include "cuda/sum_over_tiles.cuh"

namespace jax_scan {

namespace chained {

// The types of a, b and h.
template <class A_, class B_, class H_>
struct Types {
  using A = A_;
  using B = B_;
  using H = H_;
  using S = StateOf<B>;
};

// A tile's place, and a thread's in it. Tiles and channels are counted in 32 bits: 64-bit divisions
// cost a hundred instructions.
struct Position {
  uint32_t tile_index;
  uint32_t group;  // of channels
  int64_t s0;      // the first step of the thread's segment
  uint32_t o, i;   // the thread's first channel; past the last channel, the last ones
  bool valid;      // it is not past the last channel

  __device__ Position(const Problem& p, const Tiling& t, uint32_t ticket, int channel,
                      int channels_of_thread, int segment, int steps) {
    tile_index = ticket / t.groups;
    group = ticket - tile_index * t.groups;
    s0 = int64_t{tile_index} * t.tile_steps + segment * steps;
    const auto channels = static_cast<uint32_t>(p.channels());
    const uint32_t asked = group * t.channels + channel;
    valid = asked < channels;
    const uint32_t flat = valid ? asked : channels - channels_of_thread;
    o = flat / static_cast<uint32_t>(p.inner);
    i = flat - o * static_cast<uint32_t>(p.inner);
  }
};

// Hides where a value comes from, so that the compiler keeps it in registers instead of computing
// it again at each use.
__device__ __forceinline__ int64_t keep(int64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}

// One operand's slots in shared memory. Rows: [step][thread] vectors of kChannels elements. Line:
// [run] runs of kSteps elements in the order of memory, each followed by 16 bytes so that no two
// threads meet in a bank.
template <class T, class Layout, int kSteps>
class Slots {
 public:
  static constexpr int kVectorBytes = Layout::kLine ? 16 : Layout::kChannels * sizeof(T);
  static constexpr int kElements = kVectorBytes / static_cast<int>(sizeof(T));  // of a vector
  static constexpr int kVectors = Layout::kLine ? kSteps / kElements : kSteps;  // of a thread
  static constexpr int kThreadBytes = kVectors * kVectorBytes + (Layout::kLine ? 16 : 0);
  using Vector = Pack<T, kElements>;

  __device__ Slots(const Input& in, const Walk& walk, char* shared) : in_(in) {
    if constexpr (Layout::kLine) {
      const int lane = threadIdx.x % 32;
      warp_ = shared + (threadIdx.x - lane) * kThreadBytes;
      mine_ = warp_ + (walk.descending ? 31 - lane : lane) * kThreadBytes;
    } else {
      mine_ = shared + threadIdx.x * kVectorBytes;
    }
  }

  __device__ __forceinline__ Vector& operator[](int k) const {
    constexpr int kJump = Layout::kLine ? kVectorBytes : kVectorBytes * kTileThreads;
    return *reinterpret_cast<Vector*>(mine_ + k * kJump);
  }

  // Queues the copies of the thread's steps, at time at(s) - past for step s; in lines those of the
  // warp's steps, at time at(s). What lies outside of the operand becomes zero.
  __device__ __forceinline__ void send(const Problem& p, const Walk& walk, const Position& at,
                                       int past, bool whole) const {
    // One outer and one inner axis at most: see `fits` in launch.cc.
    const T* source = static_cast<const T*>(in_.data) + at.o * in_.at.outer[0].stride +
                      at.i * in_.at.inner[0].stride;
    if constexpr (Layout::kLine) {
      send_line(p, walk, at, source);
    } else {
      const int64_t stride = in_.at.time_stride;
      const auto* from =
          reinterpret_cast<const char*>(source + keep((walk.at(at.s0) - past) * stride));
      const int64_t jump = keep(walk.step() * stride * static_cast<int64_t>(sizeof(T)));
      if (whole) {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
          copy_async<kVectorBytes>(&(*this)[k], from);
          from += jump;
        }
      } else {
#pragma unroll 4
        for (int k = 0; k < kVectors; ++k) {
          const int64_t time = walk.at(at.s0 + k) - past;
          const bool inside = at.s0 + k < p.time && time >= 0 && time < p.time;
          copy_async_or_zero<kVectorBytes>(
              &(*this)[k], inside ? from : reinterpret_cast<const char*>(source), inside);
          from += jump;
        }
      }
    }
  }

  // Loads the thread's steps to registers, past the slots.
  __device__ __forceinline__ void load(Vector (&out)[kVectors], const Problem& p, const Walk& walk,
                                       const Position& at, int past, bool whole) const {
    const T* source = static_cast<const T*>(in_.data) + at.o * in_.at.outer[0].stride +
                      at.i * in_.at.inner[0].stride;
    const int64_t stride = in_.at.time_stride;
    const auto* from =
        reinterpret_cast<const char*>(source + keep((walk.at(at.s0) - past) * stride));
    const int64_t jump = keep(walk.step() * stride * static_cast<int64_t>(sizeof(T)));
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      bool inside = true;
      if (!whole) {
        const int64_t time = walk.at(at.s0 + k) - past;
        inside = at.s0 + k < p.time && time >= 0 && time < p.time;
      }
      out[k] = inside ? *reinterpret_cast<const Vector*>(from) : Vector{};
      from += jump;
    }
  }

  // Lines: writes the warp's slots, which hold results now, to memory.
  template <class Out>
  __device__ __forceinline__ void leave(const Problem& p, const Walk& walk, const Position& at,
                                        Out* out) const {
    static_assert(sizeof(Out) == sizeof(T));
    const int64_t low = lowest_time(walk, at);
    T* const to = reinterpret_cast<T*>(out) + int64_t{at.o} * p.time + low;
    const bool vectors = low >= 0 && low + 32 * kSteps <= p.time && aligned(to);
    if (vectors) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int m = k * 32 + threadIdx.x % 32;
        reinterpret_cast<Vector*>(to)[m] = *reinterpret_cast<const Vector*>(vector_of_warp(m));
      }
    } else {
#pragma unroll 4
      for (int k = 0; k < kSteps; ++k) {
        const int m = k * 32 + threadIdx.x % 32;
        if (low + m >= 0 && low + m < p.time) to[m] = *element_of_warp(m);
      }
    }
  }

 private:
  static __device__ bool aligned(const T* data) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0;
  }
  // Of the warp's steps.
  static __device__ int64_t lowest_time(const Walk& walk, const Position& at) {
    const int64_t first = at.s0 - threadIdx.x % 32 * kSteps;
    return walk.descending ? walk.time - first - 32 * kSteps : first;
  }
  // The m-th of the warp, in the order of memory.
  __device__ char* vector_of_warp(int m) const {
    return warp_ + m / kVectors * kThreadBytes + m % kVectors * kVectorBytes;
  }
  __device__ T* element_of_warp(int m) const {
    return reinterpret_cast<T*>(warp_ + m / kSteps * kThreadBytes) + m % kSteps;
  }

  __device__ __forceinline__ void send_line(const Problem& p, const Walk& walk, const Position& at,
                                            const T* source) const {
    const int64_t low = lowest_time(walk, at);
    const T* const from = source + low;
    if (low >= 0 && low + 32 * kSteps <= p.time && aligned(from)) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int m = k * 32 + threadIdx.x % 32;
        copy_async<16>(vector_of_warp(m), reinterpret_cast<const Vector*>(from) + m);
      }
    } else {
#pragma unroll 4
      for (int k = 0; k < kSteps; ++k) {
        const int m = k * 32 + threadIdx.x % 32;
        const bool inside = low + m >= 0 && low + m < p.time;
        copy_async_or_zero<sizeof(T)>(element_of_warp(m), inside ? from + m : source, inside);
      }
    }
  }

  const Input& in_;
  char* mine_;
  char* warp_ = nullptr;
};

// One thread's share of a tile: a segment of kSteps steps of kChannels channels.
template <Op kOp, class T, class Layout>
class Share {
 public:
  using A = typename T::A;
  using X = std::conditional_t<kOp == Op::kCotangent, typename T::H, typename T::B>;
  using Y = std::conditional_t<kOp == Op::kCotangent, typename T::B, typename T::H>;
  using H = typename T::H;
  using S = typename T::S;
  static constexpr int kChannels = Layout::kChannels;
  static constexpr int kSteps =
      segment_steps(Layout::kLine, kChannels, std::max(sizeof(A), sizeof(X)));
  // A thread with one channel of a row loads its steps to registers, since copies of 4 bytes to
  // shared memory are slow: at (1,65536,257) 0.38 and 0.45 of the limit, not 0.50 and 0.62. Others
  // read their slots twice.
  static constexpr bool kHeld = !Layout::kLine && kChannels == 1;
  static constexpr bool kLooksOn = Layout::kLine && kOp == Op::kCotangent;
  using ASlots = Slots<A, Layout, kSteps>;
  using XSlots = Slots<X, Layout, kSteps>;
  using HSlots = Slots<H, Layout, kSteps>;
  // Of shared memory, for each thread.
  static constexpr int kThreadBytes = ASlots::kThreadBytes + XSlots::kThreadBytes +
                                      (kOp == Op::kCotangent ? HSlots::kThreadBytes : 0);
  static __device__ __forceinline__ int threads() {
    return Layout::kLine ? static_cast<int>(blockDim.x) : kTileThreads;
  }
  static constexpr int blocks(int major) {
    return chained_blocks(kOp, Layout::kLine, kChannels, sizeof(S), major);
  }
  static constexpr int kVectors = XSlots::kVectors;
  static constexpr int kElements = XSlots::kElements;
  static constexpr int kUnroll = kHeld ? kVectors : 2;
  static_assert(kVectors == ASlots::kVectors && kElements == ASlots::kElements);
  static_assert(!Layout::kLine || sizeof(X) == sizeof(Y), "results take the operands' places");

  // Bit step * kChannels + channel: the link to the past is cut.
  using Cuts = std::conditional_t<kSteps * kChannels <= 32, uint32_t, uint64_t>;
  static_assert(kSteps * kChannels <= 64);

  __device__ Share(const Problem& p, const Walk& walk, char* shared)
      : p_(p),
        walk_(walk),
        a_(p.a, walk, shared),
        x_(p.x, walk, shared + threads() * ASlots::kThreadBytes),
        h_(p.h, walk,
           shared + (kOp == Op::kCotangent
                         ? threads() * (ASlots::kThreadBytes + XSlots::kThreadBytes)
                         : 0)) {}

  // All the segments of the warp lie within the operands, and none is cut but by a reset. Threads
  // that hold their steps in registers have none left to tell resets from the rest.
  __device__ __forceinline__ bool whole(const Position& at, int stride) const {
    const int64_t begin = at.s0 - static_cast<int>(threadIdx.x) % 32 / stride * kSteps;
    const int64_t end = begin + 32 / stride * kSteps, first = walk_.first_step(kOp);
    const bool has_first = first >= begin && first < end;
    return end <= p_.time && !(kHeld && p_.reset.data) &&
           !(has_first && (kOp == Op::kCotangent || !p_.has_h0));
  }

  // Queues the copies of a tile.
  __device__ __forceinline__ void send(const Position& at, bool whole) const {
    if constexpr (!kHeld) {
      a_.send(p_, walk_, at, 0, whole);
      x_.send(p_, walk_, at, 0, whole);
      if (kOp == Op::kCotangent && p_.h.data) h_.send(p_, walk_, at, walk_.past, whole);
    }
  }

  // What is held in registers: what the first reading needs, and what only the second does. In
  // lines h is copied as it lies. The cotangent of a step needs h one step earlier in the
  // recurrence of h, which is one step on in the walk: the next element, and for the last step of a
  // thread what the next lane has first, or, in a warp's last lane, what is in memory.
  struct Held {
    Pack<A, kElements> a[kHeld ? kVectors : 1];
    Pack<X, kElements> x[kHeld ? kVectors : 1];
    Pack<H, kElements> h[kHeld && kOp == Op::kCotangent ? kVectors : 1];
    H after_last;
  };
  // While copies are on their way.
  __device__ __forceinline__ void hold_ahead(Held& held, const Position& at) const {
    if constexpr (kLooksOn) {
      held.after_last = H{};
      const int64_t time = walk_.at(at.s0 + kSteps);
      if (p_.h.data && threadIdx.x % 32 == 31 && time >= 0 && time < p_.time) {
        const Broadcast& b = p_.h.at;
        const H* const h = static_cast<const H*>(p_.h.data);
        held.after_last = h[at.o * b.outer[0].stride + at.i * b.inner[0].stride + time];
      }
    }
  }
  __device__ __forceinline__ void hold_first(Held& held, const Position& at, bool whole) const {
    if constexpr (kHeld) {
      a_.load(held.a, p_, walk_, at, 0, whole);
      x_.load(held.x, p_, walk_, at, 0, whole);
    }
    if constexpr (kLooksOn) {
      if (!p_.h.data) return;
      const Pack<H, kElements> mine = h_[walk_.descending ? kVectors - 1 : 0];
      const H first = walk_.descending ? mine.v[kElements - 1] : mine.v[0];
      const S next = shuffle_down(load_as<S>(first), 1);
      if (threadIdx.x % 32 != 31) held.after_last = store_as<H>(next);
    }
  }
  __device__ __forceinline__ void hold_second(Held& held, const Position& at, bool whole) const {
    if constexpr (kHeld && kOp == Op::kCotangent) {
      if (p_.h.data) h_.load(held.h, p_, walk_, at, walk_.past, whole);
    }
  }

  __device__ __forceinline__ Cuts find_cuts(const Position& at) const {
    Cuts cuts = 0;
    if (p_.reset.data) {
      const Broadcast& b = p_.reset.at;
      const uint8_t* reset = static_cast<const uint8_t*>(p_.reset.data) + b.outer_offset(at.o);
      const bool alike = b.inner_axes == 0 || (b.inner_axes == 1 && b.inner[0].stride == 0);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        if (c > 0 && alike) break;
        const Cuts cut = alike ? (Cuts{1} << kChannels) - 1 : Cuts{1} << c;
        const uint8_t* of_channel = reset + b.inner_offset(at.i + c);
#pragma unroll 8
        for (int k = 0; k < kSteps; ++k) {
          const int64_t time = walk_.at(min(at.s0 + k, p_.time - 1));
          if (of_channel[time * b.time_stride]) cuts |= cut << (k * kChannels);
        }
      }
    }
    const int64_t first = walk_.first_step(kOp) - at.s0;
    if (!p_.has_h0 && first >= 0 && first < kSteps) {
      cuts |= ((Cuts{1} << kChannels) - 1) << (first * kChannels);
    }
    return cuts;
  }

  // Calls f with what holds for the whole warp as types: no cuts, and, in lines, the walk's
  // direction.
  template <class F>
  __device__ __forceinline__ void dispatch(bool plain, F&& f) const {
    const auto directed = [&](auto is_plain) {
      if (Layout::kLine && walk_.descending) {
        f(is_plain, std::true_type{});
      } else {
        f(is_plain, std::false_type{});
      }
    };
    if (plain) {
      directed(std::true_type{});
    } else {
      directed(std::false_type{});
    }
  }

  // The segment's map for each channel, and in `bound` what no partial product and no partial
  // result exceeds: |A_k| <= bound.a, |B_k| <= bound.b.
  template <bool kPlain, bool kDescending>
  __device__ __forceinline__ void compose_steps(Composed<S> (&map)[kChannels],
                                                Affine<Real<S>> (&bound)[kChannels],
                                                const Held& held, Cuts cuts) const {
#pragma unroll kUnroll
    for (int k = 0; k < kVectors; ++k) {
      const auto a = kHeld ? held.a[kHeld ? k : 0] : a_[place<kDescending>(k)];
      const auto x = kHeld ? held.x[kHeld ? k : 0] : x_[place<kDescending>(k)];
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const int c = Layout::kLine ? 0 : e;
        const bool cut = !kPlain && ((cuts >> (k * kElements + e)) & 1u) != 0;
        const Step<S> in{load_as<S>(a.v[element<kDescending>(e)]),
                         load_as<S>(x.v[element<kDescending>(e)]), S(0), cut};
        const Written<S> out = advance<kOp>(map[c].b, in);
        const Product<S> composed = product(in.a, map[c].a);
        // A select: a NaN before the cut ends there, and the bound would not tell of it.
        map[c].lost = cut ? S(0) : mul_add(in.a, map[c].lost, composed.lost);
        map[c].a = cut ? S(0) : composed.rounded;
        bound[c].a = larger<S>(bound[c].a, magnitude(map[c].a));
        bound[c].b = larger<S>(bound[c].b, reach<kOp>(map[c].b, out));
      }
    }
  }

  // Runs the recurrence from `s`, and writes; in lines to the slots. Sums da into `da_sum` if that
  // is what is asked for.
  template <bool kPlain, bool kDescending>
  __device__ __forceinline__ void run_steps(S (&s)[kChannels], S (&da_sum)[kChannels],
                                            const Held& held, Cuts cuts, const Position& at) const {
    const int64_t first = walk_.first_step(kOp) - at.s0;
    const bool uses_h = kOp == Op::kCotangent && p_.h.data;
    S h0[kChannels];
    if (!kPlain && kOp == Op::kCotangent && uses_h) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const bool wanted = first >= 0 && first < kSteps && p_.h0.data;
        h0[c] = wanted ? load_one<S>(p_.h0, at.o, at.i + c, 0) : S(0);
      }
    }
    const int64_t offset = keep((int64_t{at.o} * p_.time + walk_.at(at.s0)) * p_.inner + at.i);
    const int64_t jump = keep(walk_.step() * p_.inner);
    Y* y = static_cast<Y*>(p_.y.data) + offset;
    A* da_out = static_cast<A*>(p_.da_out.data) + offset;
    const bool write_y = p_.y.data && at.valid;
    const bool write_da = p_.da_out.data && !p_.da_over_time && at.valid;
    const int64_t left = p_.time - at.s0;
    [[maybe_unused]] Pack<H, kElements> h_next;
    if constexpr (kLooksOn) h_next = uses_h ? h_[place<kDescending>(0)] : Pack<H, kElements>{};
#pragma unroll kUnroll
    for (int k = 0; k < kVectors; ++k) {
      const auto a = kHeld ? held.a[kHeld ? k : 0] : a_[place<kDescending>(k)];
      const auto x = kHeld ? held.x[kHeld ? k : 0] : x_[place<kDescending>(k)];
      Pack<Y, kElements> y_pack;
      Pack<A, kElements> da_pack;
      Pack<H, kElements> h{};
      [[maybe_unused]] const bool last = k + 1 == kVectors;
      if constexpr (kLooksOn) {
        h = h_next;
        if (uses_h && !last) h_next = h_[place<kDescending>(k + 1)];
      } else if constexpr (kOp == Op::kCotangent) {
        if (uses_h) h = kHeld ? held.h[kHeld ? k : 0] : h_[place<kDescending>(k)];
      }
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const int c = Layout::kLine ? 0 : e, step = Layout::kLine ? k * kElements + e : k;
        const bool cut = !kPlain && ((cuts >> (k * kElements + e)) & 1u) != 0;
        Step<S> in{load_as<S>(a.v[element<kDescending>(e)]),
                   load_as<S>(x.v[element<kDescending>(e)]), S(0), cut};
        if constexpr (kOp == Op::kCotangent) {
          if constexpr (!kLooksOn) {
            in.h = load_as<S>(h.v[element<kDescending>(e)]);
          } else if (e + 1 < kElements) {
            in.h = load_as<S>(h.v[element<kDescending>(e + 1)]);
          } else {
            in.h = load_as<S>(last ? held.after_last : h_next.v[element<kDescending>(0)]);
          }
          if (!kPlain && uses_h && step == first) in.h = h0[c];
        }
        const S before = s[c];
        const Written<S> out = advance<kOp>(s[c], in);
        if (!kPlain && step >= left) s[c] = before;
        y_pack.v[element<kDescending>(e)] = store_as<Y>(out.y);
        if constexpr (kOp == Op::kCotangent) {
          da_pack.v[element<kDescending>(e)] = store_as<A>(out.da_out);
          if (p_.da_over_time && (kPlain || step < left)) da_sum[c] = da_sum[c] + out.da_out;
        }
      }
      if constexpr (Layout::kLine) {
        reinterpret_cast<Pack<Y, kElements>&>(x_[place<kDescending>(k)]) = y_pack;
        if constexpr (kOp == Op::kCotangent) {
          if (uses_h) reinterpret_cast<Pack<A, kElements>&>(h_[place<kDescending>(k)]) = da_pack;
        }
      } else {
        const bool inside = kPlain || k < left;
        if (write_y && inside) *reinterpret_cast<Pack<Y, kElements>*>(y) = y_pack;
        y += jump;
        if constexpr (kOp == Op::kCotangent) {
          if (write_da && inside) *reinterpret_cast<Pack<A, kElements>*>(da_out) = da_pack;
          da_out += jump;
        }
      }
    }
  }

  // Lines: the results go from the slots to memory.
  __device__ __forceinline__ void leave(const Position& at) const {
    if constexpr (Layout::kLine) {
      __syncwarp();
      if (at.valid) {
        if (p_.y.data) x_.template leave<Y>(p_, walk_, at, static_cast<Y*>(p_.y.data));
        if (kOp == Op::kCotangent && p_.da_out.data && !p_.da_over_time) {
          h_.template leave<A>(p_, walk_, at, static_cast<A*>(p_.da_out.data));
        }
      }
      __syncwarp();
    }
  }

 private:
  // From the order of the walk to that of memory.
  template <bool kDescending>
  static __device__ constexpr int place(int k) {
    return Layout::kLine && kDescending ? kVectors - 1 - k : k;
  }
  template <bool kDescending>
  static __device__ constexpr int element(int e) {
    return Layout::kLine && kDescending ? kElements - 1 - e : e;
  }

  const Problem& p_;
  const Walk& walk_;
  ASlots a_;
  XSlots x_;
  HSlots h_;
};

}  // namespace chained

// `counter` hands out the tiles, unless each has a block of its own. The first
// `tiling.chain_blocks` blocks are the chain.
template <Op kOp, class T, class Layout>
__global__ void __launch_bounds__(kTileThreads, chained::Share<kOp, T, Layout>::blocks(kMajor))
    chained_kernel(const __grid_constant__ Problem p, const __grid_constant__ Tiling tiling,
                   unsigned* counter, Mail<typename T::S> mail, typename T::S* sums_over_tiles) {
  using namespace chained;
  using S = typename T::S;
  using R = Real<S>;
  using Mine = Share<kOp, T, Layout>;
  constexpr int kChannels = Layout::kChannels;

  extern __shared__ __align__(16) char shared[];
  __shared__ S carry[kMostChannels];       // [channel]: the state that enters
  __shared__ int in_order[kMostChannels];  // [channel]: the last turn in which maps did not do
  __shared__ uint32_t next_ticket;

  const auto init_of = [&](uint32_t flat) {
    const uint32_t channel = min(flat, static_cast<uint32_t>(p.channels()) - 1);
    const uint32_t o = channel / static_cast<uint32_t>(p.inner);
    return p.init.data ? load_one<S>(p.init, o, channel - o * static_cast<uint32_t>(p.inner), 0)
                       : S(0);
  };
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  if (blockIdx.x < tiling.chain_blocks) {
    static_assert(kMostTurns * Baton<S>::kBytes <= 32 * Mine::kThreadBytes);
    carry_states(mail, tiling.chain_team, blockIdx.x, tiling.chain_blocks, shared, init_of);
    return;
  }

  const Walk walk(p);
  const Mine mine(p, walk, shared);

  // Where this thread works: lanes side by side are `stride` apart in time.
  const int stride = Layout::kLine ? 1 : 1 << tiling.lanes_log2;
  const int channels_of_warp = Layout::kLine ? 1 : kChannels << tiling.lanes_log2;
  const int column = Layout::kLine ? 0 : (lane & (stride - 1)) * kChannels;  // within the warp
  const int channel = Layout::kLine ? warp / tiling.time_warps : column;     // within the tile
  const int segments = 32 / stride;                                          // of a warp
  const int segment = (Layout::kLine ? warp % tiling.time_warps : warp) * segments + lane / stride;

  // Behind the slots: the map of each warp, [warp][column], later of all the warps before it in
  // time; behind these the bounds of these maps.
  auto* const rows = reinterpret_cast<Composed<S>*>(shared + Mine::threads() * Mine::kThreadBytes);
  auto* const bounds = reinterpret_cast<Affine<R>*>(rows + blockDim.x / 32 * channels_of_warp);
  const int row = warp * channels_of_warp + column;

  // Tiles are handed out in order: whoever has a tile's predecessors is running.
  const auto all = static_cast<uint32_t>(tiling.tiles * tiling.groups);
  // With a block for each tile that rests on blocks starting in the order of their index, as they
  // do on every GPU so far, though CUDA does not promise it.
  const uint32_t block = blockIdx.x - tiling.chain_blocks;
  const bool one_each = gridDim.x - tiling.chain_blocks == all;
  const bool in_chain = tiling.tiles > 1;
  // The counter starts with all bits set.
  const auto take_ticket = [&] { return atomicAdd(counter, 1u) + 1; };
  if (thread == 0) next_ticket = one_each ? block : take_ticket();
  if (thread < kMostChannels) in_order[thread] = 0;
  __syncthreads();
  if (next_ticket >= all) return;
  const auto position_of = [&](uint32_t ticket) {
    return Position(p, tiling, ticket, channel, kChannels, segment, Mine::kSteps);
  };
  Position at = position_of(next_ticket);
  mine.send(at, mine.whole(at, stride));

  for (int turn = 1; true; ++turn) {
    const bool whole = mine.whole(at, stride);
    const bool followed = at.tile_index + 1 < tiling.tiles;
    const bool owner = thread < tiling.channels;  // of a channel: it speaks for the block
    const uint32_t flat = at.group * tiling.channels + thread;
    // Questions whose answers take long. The tile after this one, if it has no state to wait for.
    uint32_t ticket = all;
    if (thread == 0 && !in_chain && !one_each) ticket = take_ticket();
    Packet<S> entering;
    if (owner) {
      entering = at.tile_index > 0 ? receive(mail.at(at.tile_index - 1, flat))
                                   : Packet<S>::tagged(Sent::kState, init_of(flat));
    }
    const typename Mine::Cuts cuts = whole && !p.reset.data ? 0 : mine.find_cuts(at);
    bool plain = whole;
    if (!Mine::kHeld && p.reset.data) plain = whole && !__any_sync(0xffffffffu, cuts != 0);
    typename Mine::Held held;
    mine.hold_ahead(held, at);
    wait_for_copies();
    if constexpr (Layout::kLine) __syncwarp();
    mine.hold_first(held, at, whole);

    // The map of this thread's segment; then `before`, that of the warp's segments before it.
    Composed<S> map[kChannels], before[kChannels];
    Affine<R> bound[kChannels];
#pragma unroll
    for (Affine<R>& b : bound) b = {R(1), R(0)};
    mine.dispatch(plain, [&](auto is_plain, auto descending) {
      mine.template compose_steps<is_plain.value, descending.value>(map, bound, held, cuts);
    });
    // Bit c: for channel c some lane's map does not do. All must, not only the last one's: lanes
    // put the same maps together in different ways.
    unsigned without = 0;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      for (int delta = stride; delta < 32; delta *= 2) {
        const Composed<S> earlier = shuffle_up(map[c], delta);
        const Affine<R> bound_of{shuffle_up(bound[c].a, delta), shuffle_up(bound[c].b, delta)};
        if (lane >= delta) {
          bound[c] = bound_of_both(bound[c], earlier, bound_of);
          map[c] = compose(map[c], earlier);
        }
      }
      if (!(bound[c].a <= Bounds<R>::product && bound[c].b <= Bounds<R>::local)) without |= 1u << c;
    }
    if (__any_sync(0xffffffffu, without != 0)) {
      for (int delta = stride; delta < 32; delta *= 2) {
        without |= __shfl_xor_sync(0xffffffffu, without, delta);
      }
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        if ((without >> c & 1u) != 0) bound[c].a = R(INFINITY);
      }
    }
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      before[c] = shuffle_up(map[c], stride);
      if (lane < stride) before[c] = {};
      if (lane >= 32 - stride) {
        rows[row + c] = map[c];
        bounds[row + c] = bound[c];
      }
    }
    __syncthreads();
    mine.hold_second(held, at, whole);

    // The map of the tile, and the state that enters it.
    bool from_steps = false;
    if (owner) {
      Composed<S> total;
      Affine<R> total_bound{R(1), R(0)};
      const int first_row = Layout::kLine ? thread * tiling.time_warps : thread;
#pragma unroll 4
      for (int k = 0; k < tiling.time_warps; ++k) {
        Composed<S>& map_of = rows[first_row + k * channels_of_warp];
        const Composed<S> next = map_of;
        total_bound = bound_of_both(bounds[first_row + k * channels_of_warp], total, total_bound);
        map_of = total;
        total = compose(next, total);
      }
      const bool certain = total_bound.a <= Bounds<R>::product && total_bound.b <= Bounds<R>::local;
      if (followed) {
        send(mail.at(at.tile_index, flat),
             certain ? Packet<S>::map(total.rounded()) : Packet<S>::tagged(Sent::kUnknown, S(0)));
      }
      if (!entering.is(Sent::kState)) {
        const Packet<S>* last = mail.at(at.tile_index - 1, flat);
        const bool looks_back =
            !Mine::kHeld && tiling.groups >= kLookBack && at.tile_index >= kLookBack;
        do {
          entering = looks_back ? look_back(last) : receive(last);
        } while (!entering.is(Sent::kState));
      }
      if (thread == 0 && in_chain && !one_each) ticket = take_ticket();  // not earlier: see above
      from_steps = !certain || !state_within(entering.state());
      if (from_steps) in_order[thread] = turn;
      carry[thread] = entering.state();
    }
    if (thread == 0 && !in_chain) next_ticket = ticket;
    const int rounds = __syncthreads_or(from_steps) ? tiling.time_warps * segments : 0;

    // Run the steps. A channel whose map can be trusted is not touched by what its neighbours hold;
    // the segments of the others take turns.
    S s[kChannels], da_sum[kChannels];
    bool turns = false;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) turns = turns || in_order[channel + c] == turn;
    for (int round = -1; round < rounds; ++round) {
      if (turns ? segment == round : round < 0) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          s[c] = carry[channel + c];
          if (in_order[channel + c] != turn) s[c] = apply(before[c], apply(rows[row + c], s[c]));
          da_sum[c] = S(0);
        }
        mine.dispatch(plain, [&](auto is_plain, auto descending) {
          mine.template run_steps<is_plain.value, descending.value>(s, da_sum, held, cuts, at);
        });
        if (turns) {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) {
            if (in_order[channel + c] == turn) carry[channel + c] = s[c];
          }
        }
      }
      if (round >= 0) __syncthreads();
    }
    if (from_steps && followed) {
      send(mail.at(at.tile_index, flat), Packet<S>::tagged(Sent::kState, carry[thread]));
    }
    if (p.final.data && at.valid && at.s0 < p.time && at.s0 + Mine::kSteps >= p.time) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        store_one(p.final, int64_t{at.o} * p.inner + at.i + c, s[c]);
      }
    }
    mine.leave(at);

    // Sum da over the tile, in a fixed order.
    if constexpr (kOp == Op::kCotangent) {
      if (p.da_out.data && p.da_over_time) {
        __syncthreads();
        S* const sums = reinterpret_cast<S*>(rows);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          for (int delta = 16; delta >= stride; delta /= 2) {
            da_sum[c] = da_sum[c] + shuffle_down(da_sum[c], delta);
          }
          if (lane < stride) sums[row + c] = da_sum[c];
        }
        __syncthreads();
        if (owner && flat < static_cast<uint32_t>(p.channels())) {
          S sum = S(0);
          for (int k = 0; k < tiling.time_warps; ++k) {
            sum =
                sum +
                sums[(Layout::kLine ? thread * tiling.time_warps : thread) + k * channels_of_warp];
          }
          sums_over_tiles[int64_t{at.tile_index} * p.channels() + flat] = sum;
        }
        __syncthreads();
      }
    }

    if (in_chain) {
      if (thread == 0) next_ticket = ticket;
      __syncthreads();
    }
    if (next_ticket >= all) return;
    at = position_of(next_ticket);
    mine.send(at, mine.whole(at, stride));
  }
}

namespace chained {

template <Op kOp, class T, class Layout>
cudaError_t launch_op(const Problem& problem, const Device& device, void* workspace,
                      cudaStream_t stream) {
  using S = typename T::S;
  using Mine = Share<kOp, T, Layout>;
  Tiling t = chained_tiling(Layout::kLine, Layout::kChannels, Mine::kSteps, sizeof(S),
                            problem.channels(), problem.time);
  const int bytes = 32 * t.warps * Mine::kThreadBytes + t.maps_bytes;
  const int64_t all = t.tiles * t.groups;
  const int most = device.shared_bytes - 1024;  // beside what the kernel declares
  if (bytes > most || problem.channels() > INT32_MAX / 2 || all > INT32_MAX) {
    return cudaErrorNotSupported;
  }
  const int64_t resident =
      int64_t{device.multiprocessors} *
      std::min(Mine::blocks(device.capability_major) * kTileThreads / (32 * t.warps),
               device.multiprocessor_shared_bytes / (bytes + 2 * 1024));
  const Chain chain = plan_chain(t, resident);
  t.chain_blocks = static_cast<uint32_t>(chain.blocks);
  t.chain_team = chain.team;
  if (t.tiles > 1 && chain.blocks == 0) return cudaErrorNotSupported;
  const int64_t blocks = std::min(all, std::max(resident - t.chain_blocks, int64_t{1}));

  const auto kernel = chained_kernel<kOp, T, Layout>;
  // The same for every call: another thread may be launching this kernel with another size.
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  if (error != cudaSuccess) return error;
  auto* memory = static_cast<unsigned char*>(workspace);
  auto* counter = reinterpret_cast<unsigned*>(memory);
  S* sums = reinterpret_cast<S*>(memory + t.sums_offset);
  const Mail<S> mail{reinterpret_cast<Packet<S>*>(memory + t.places_offset), t.tiles,
                     t.groups * static_cast<uint32_t>(t.channels)};
  if (t.tiles > 1 || blocks < all) {
    error = cudaMemsetAsync(memory, 0xff, t.sums_offset, stream);
    if (error != cudaSuccess) return error;
  }
  const dim3 grid(static_cast<unsigned>(t.chain_blocks + blocks));
  kernel<<<grid, 32 * t.warps, bytes, stream>>>(problem, t, counter, mail, sums);
  if (problem.da_out.data && problem.da_over_time) {
    return sum_over_tiles(problem, sums, t.tiles, stream);
  }
  return cudaGetLastError();
}

}  // namespace chained

template <class A, class B, class H, class Layout>
cudaError_t launch_chained(const Problem& problem, const Device& device, void* workspace,
                           cudaStream_t stream) {
  using T = chained::Types<A, B, H>;
  return problem.op == Op::kCotangent
             ? chained::launch_op<Op::kCotangent, T, Layout>(problem, device, workspace, stream)
             : chained::launch_op<Op::kScan, T, Layout>(problem, device, workspace, stream);
}

}  // namespace jax_scan
