// The scan of problems as small as a launch: one kernel, no workspace, each element read once.
//
// A cluster of blocks takes a few neighbouring channels for all of time, block r of it the r-th
// stretch, each thread a segment of kSteps consecutive steps of kChannels channels, in registers.
// With the state s that enters a stretch, A s + B leaves it, where (A, B) composes the steps'
// affine maps. A block
//   1. composes its threads' maps, across lanes, then across warps,
//   2. sends its own to all later blocks of the cluster, into their shared memory,
//   3. applies those of the blocks before it to the initial state, in order of time, and
//   4. runs the recurrence through its steps from there, and writes.
// From the loads to the writes a thread waits once for its block and once for the messages.
//
// A s + B stands for the step-by-step recurrence only while nothing comes near to overflow. A block
// for which that is not certain says so instead of sending a map; it walks its segments in order,
// then sends the state that comes out. The choice depends on the data alone.
#pragma once

#include <type_traits>

#include "cuda/copy.cuh"
#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace jax_scan {

namespace cluster {

// A map is certain if, within each warp and from warp to warp, no product of factors exceeds
// `product`, and no result from the state zero `local`: products over a block then stay within
// Bounds::product, results within Bounds::local.
template <class R>
struct Limits;
template <>
struct Limits<float> {
  static constexpr float product = 0x1p20f, local = 0x1p78f;
};
template <>
struct Limits<double> {
  static constexpr double product = 0x1p150, local = 0x1p450;
};

// An array along the walk: its element at the walk's step s of channel (o, i) is
// data[first + s * step + o * outer + i * inner].
template <class Data>
struct Stream {
  Data* data;
  int32_t first, step, outer, inner;
};

// What the kernel needs of the problem. What every block reads comes first: each line of arguments
// that is touched costs a miss.
struct Args {
  int32_t time, channels, inner;
  uint32_t by_inner;  // n / inner == n * by_inner >> by_inner_shift
  int32_t by_inner_shift;
  int32_t lanes_log2;
  int32_t ranks;  // blocks of a cluster
  bool has_h0, has_init, has_reset, has_h, descending, wants_y, wants_da, wants_final;
  Stream<const void> a, x;
  Stream<void> y;
  Stream<const void> h;
  Stream<void> da_out;
  Stream<const void> init, h0, reset;
  Stream<void> final;
};

// What a warp or a block tells of its map. All bits set in the last word of `a`: it is not certain.
template <class S>
struct alignas(2 * sizeof(S)) Message {
  static constexpr int kTagWord = sizeof(S) / 4 - 1;
  uint32_t word[2 * sizeof(S) / 4];

  __device__ static Message of(Affine<S> map, bool certain) {
    Message m = internal::bit_cast<Message>(map);
    // One NaN is as good as another.
    if (m.word[kTagWord] == 0xffffffffu) m.word[kTagWord] = 0x7fffffffu;
    if (!certain) m.word[kTagWord] = 0xffffffffu;
    return m;
  }
  __device__ bool certain() const { return word[kTagWord] != 0xffffffffu; }
  __device__ Affine<S> map() const { return internal::bit_cast<Affine<S>>(*this); }
};

// ---- Between blocks ----

__device__ __forceinline__ uint32_t shared_address(const void* place) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(place));
}

// A barrier of which `bytes` will be received, once.
__device__ __forceinline__ void expect(uint64_t* barrier, int bytes) {
  const uint32_t at = shared_address(barrier);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
               : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void wait_for(uint64_t* barrier) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred p;\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n\t"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier))
        : "memory");
  }
}

// Relaxed: `expect` has its own fence, and nothing waits for the loads that are on their way.
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes `value` to what is at `place` in the block `rank`, and tells that block's `barrier`.
template <class V>
__device__ __forceinline__ void send(int rank, V* place, V value, uint64_t* barrier) {
  const Words<V> w = internal::bit_cast<Words<V>>(value);
  uint32_t to, on;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(to)
               : "r"(shared_address(place)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(on)
               : "r"(shared_address(barrier)), "r"(rank));
  if constexpr (sizeof(V) == 4) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
        "r"(w.word[0]), "r"(on)
        : "memory");
  } else if constexpr (sizeof(V) == 8) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
            to),
        "r"(w.word[0]), "r"(w.word[1]), "r"(on)
        : "memory");
  } else {
    static_assert(sizeof(V) == 16);
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(to),
        "r"(w.word[0]), "r"(w.word[1]), "r"(w.word[2]), "r"(w.word[3]), "r"(on)
        : "memory");
  }
}

template <class T>
__device__ __forceinline__ T shuffle(T value, int lane) {
  Words<T> w = internal::bit_cast<Words<T>>(value);
#pragma unroll
  for (int k = 0; k < Words<T>::kCount; ++k) {
    w.word[k] = __shfl_sync(0xffffffffu, w.word[k], lane);
  }
  return internal::bit_cast<T>(w);
}

// ---- A thread's segment ----

struct Channel {
  int32_t o, i;
};

__device__ __forceinline__ Channel channel_of(const Args& p, int flat) {
  const auto wide = static_cast<uint64_t>(static_cast<uint32_t>(flat)) * p.by_inner;
  const auto o = static_cast<int32_t>(wide >> p.by_inner_shift);
  return {o, flat - o * p.inner};
}

template <class Data>
__device__ __forceinline__ int offset_of(const Stream<Data>& in, Channel at, int s) {
  return in.first + s * in.step + at.o * in.outer + at.i * in.inner;
}

// One operand's elements of a warp's lines in shared memory, in the order of memory: 32 runs of
// kSteps elements, each followed by 16 bytes so that no two threads meet in a bank.
template <class T, int kSteps>
class Lines {
 public:
  static constexpr int kVectors = kSteps * static_cast<int>(sizeof(T)) / 16;  // of a run
  static constexpr int kRunBytes = kVectors * 16 + 16;
  static constexpr int kThreadBytes = kRunBytes;
  static constexpr int kElements = 16 / static_cast<int>(sizeof(T));  // of a vector
  using Vector = Pack<T, kElements>;

  // `begin`: the thread's first step.
  __device__ Lines(char* shared, bool descending, int begin)
      : warp_(shared + (threadIdx.x & ~31u) * kRunBytes),
        descending_(descending),
        begin_(begin - static_cast<int>(threadIdx.x % 32) * kSteps) {}

  template <class Data>
  __device__ int lowest_time(const Stream<Data>& in) const {
    return descending_ ? in.first - (begin_ + 32 * kSteps - 1) : in.first + begin_;
  }
  static __device__ bool whole(const T* from, int low, int time) {
    return low >= 0 && low + 32 * kSteps <= time && reinterpret_cast<uintptr_t>(from) % 16 == 0;
  }

  // Queues the copies of the warp's elements; what lies outside of the operand becomes zero.
  __device__ __forceinline__ void load(const Stream<const void>& in, int o, int time) const {
    const int low = lowest_time(in);
    const T* const data = static_cast<const T*>(in.data) + o * in.outer;
    const T* const from = data + low;
    if (whole(from, low, time)) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        copy_async<16>(vector(k * 32 + threadIdx.x % 32),
                       reinterpret_cast<const Vector*>(from) + k * 32 + threadIdx.x % 32);
      }
    } else {
#pragma unroll 4
      for (int k = 0; k < kSteps; ++k) {
        const int m = k * 32 + threadIdx.x % 32;
        const bool inside = low + m >= 0 && low + m < time;
        copy_async_or_zero<sizeof(T)>(element(m), inside ? from + m : data, inside);
      }
    }
  }
  __device__ __forceinline__ void store(const Stream<void>& out, int o, int time) const {
    const int low = lowest_time(out);
    T* const to = static_cast<T*>(out.data) + o * out.outer + low;
    if (whole(to, low, time)) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int m = k * 32 + threadIdx.x % 32;
        reinterpret_cast<Vector*>(to)[m] = *vector(m);
      }
    } else {
#pragma unroll 4
      for (int k = 0; k < kSteps; ++k) {
        const int m = k * 32 + threadIdx.x % 32;
        if (low + m >= 0 && low + m < time) to[m] = *element(m);
      }
    }
  }

  // The thread's steps, in the order of the walk.
  __device__ __forceinline__ void get(Pack<T, 1> (&to)[kSteps]) const {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const Vector vector = mine()[descending_ ? kVectors - 1 - k : k];
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const T up = vector.v[e], down = vector.v[kElements - 1 - e];
        to[k * kElements + e].v[0] = descending_ ? down : up;
      }
    }
  }
  __device__ __forceinline__ void put(const Pack<T, 1> (&from)[kSteps]) const {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      Vector vector;
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const T up = from[k * kElements + e].v[0], down = from[(k + 1) * kElements - 1 - e].v[0];
        vector.v[e] = descending_ ? down : up;
      }
      mine()[descending_ ? kVectors - 1 - k : k] = vector;
    }
  }
  // The step after the thread's last one, which the last lane does not have.
  __device__ __forceinline__ T after() const {
    const int lane = min(threadIdx.x % 32 + 1, 31u);
    return *element(descending_ ? (32 - lane) * kSteps - 1 : lane * kSteps);
  }

 private:
  __device__ Vector* mine() const {
    const int lane = threadIdx.x % 32;
    return reinterpret_cast<Vector*>(warp_ + (descending_ ? 31 - lane : lane) * kRunBytes);
  }
  // The m-th of the warp.
  __device__ Vector* vector(int m) const {
    return reinterpret_cast<Vector*>(warp_ + m / kVectors * kRunBytes) + m % kVectors;
  }
  __device__ T* element(int m) const {
    return reinterpret_cast<T*>(warp_ + m / kSteps * kRunBytes) + m % kSteps;
  }

  char* const warp_;
  const bool descending_;
  const int begin_;  // the warp's first step
};

template <Op kOp, class A_, class B_, class H_, class Layout, int kSteps>
class Segment {
 public:
  using A = A_;
  using X = std::conditional_t<kOp == Op::kCotangent, H_, B_>;
  using Y = std::conditional_t<kOp == Op::kCotangent, B_, H_>;
  using H = H_;
  using S = StateOf<B_>;
  using R = Real<S>;
  static constexpr int kChannels = Layout::kChannels;
  static constexpr bool kLine = Layout::kLine;
  static constexpr bool kWithH = kOp == Op::kCotangent;
  static_assert(!kLine ||
                (sizeof(A) == sizeof(X) && sizeof(Y) == sizeof(X) && sizeof(H) == sizeof(X)));

  // Shared memory: in rows a step's h, in lines all that is read.
  static constexpr int kSlotBytes = kChannels * static_cast<int>(sizeof(H));
  static constexpr int kLineBytes = (kWithH ? 3 : 2) * Lines<A, kSteps>::kThreadBytes;
  static constexpr int kThreadBytes = kLine ? kLineBytes : kWithH ? kSteps * kSlotBytes : 0;

  // Bit step * kChannels + channel: the link to the past is cut.
  using Cuts = std::conditional_t<kSteps * kChannels <= 32, uint32_t, uint64_t>;
  static_assert(kSteps * kChannels <= 64);

  // `begin`: the first step of the segment.
  __device__ Segment(const Args& p, Channel at, int begin, bool valid, char* shared)
      : p_(p),
        at_(at),
        begin_(begin),
        left_(p.time - begin),
        valid_(valid),
        shared_(shared),
        // Where the recurrence of h begins.
        first_(kWithH ? left_ - 1 : -begin) {}

  // Plain: all steps exist, none is reset, and so the recurrence of h can begin only at an end of a
  // segment.

  // Reads; in lines it queues the copies that `take` waits for.
  template <bool kPlain>
  __device__ __forceinline__ void load() {
    if constexpr (kLine) {
      lines<A>(0).load(p_.a, at_.o, p_.time);
      lines<X>(1).load(p_.x, at_.o, p_.time);
      if (kWithH && p_.has_h) lines<H>(2).load(p_.h, at_.o, p_.time);
    } else {
      // The map of a step that does not exist is the identity.
      load_rows<kPlain>(a_, p_.a, S(1));
      load_rows<kPlain>(x_, p_.x, S(0));
      if (kWithH && p_.has_h) {
        const auto* data = static_cast<const H*>(p_.h.data);
        const H* from = data + offset_of(p_.h, at_, begin_);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          if (kPlain && k < kSteps - 1) {
            copy_async<kSlotBytes>(slot(k), from + k * p_.h.step);
          } else {
            const bool inside = k < left_ && k != first_;
            copy_async_or_zero<kSlotBytes>(slot(k), inside ? from + k * p_.h.step : data, inside);
          }
        }
      }
    }
    if constexpr (!kPlain) find_cuts();
  }
  __device__ __forceinline__ void take() {
    if constexpr (kLine) {
      // h one step earlier in its recurrence is h one step on in the walk.
      if (kWithH && p_.has_h && threadIdx.x % 32 == 31 && kSteps < left_) {
        after_ = static_cast<const H*>(p_.h.data)[offset_of(p_.h, at_, begin_ + kSteps)];
      }
      wait_for_copies();
      __syncwarp();
      lines<A>(0).get(a_);
      lines<X>(1).get(x_);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (k >= left_) a_[k].v[0] = store_as<A>(S(1));
      }
    }
  }

  // The segment's map for each channel, and what no partial product (bound.a) and no partial result
  // (bound.b) exceeds.
  template <bool kPlain>
  __device__ __forceinline__ void compose_steps(Composed<S> (&map)[kChannels],
                                                Affine<R> (&bound)[kChannels]) const {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const S a = load_as<S>(a_[k].v[c]), x = load_as<S>(x_[k].v[c]);
        const bool cut = is_cut<kPlain>(k, c);
        if (k == 0) {
          map[c].a = cut ? S(0) : a;
          map[c].lost = S(0);
          map[c].b = kOp != Op::kCotangent ? x : cut ? S(0) : a * x;
          bound[c] = {magnitude(map[c].a), reach<kOp>(map[c].b, Written<S>{x, S(0)})};
        } else {
          const Written<S> out = advance<kOp>(map[c].b, Step<S>{a, x, S(0), cut});
          const Product<S> composed = product(a, map[c].a);
          map[c].lost = cut ? S(0) : mul_add(a, map[c].lost, composed.lost);
          map[c].a = cut ? S(0) : composed.rounded;
          bound[c].a = larger<S>(bound[c].a, magnitude(map[c].a));
          bound[c].b = larger<S>(bound[c].b, reach<kOp>(map[c].b, out));
        }
      }
    }
  }

  // Runs the recurrence from `s`, and writes; in lines to shared memory.
  template <bool kPlain>
  __device__ __forceinline__ void run_steps(S (&s)[kChannels]) {
    const bool has_h = kWithH && p_.has_h;
    Y* y = static_cast<Y*>(p_.y.data) + (kLine ? 0 : offset_of(p_.y, at_, begin_));
    A* da_out = static_cast<A*>(p_.da_out.data) + (kLine ? 0 : offset_of(p_.da_out, at_, begin_));
    const bool write_y = p_.wants_y && valid_, write_da = p_.wants_da && valid_;
    Pack<H, 1> h_line[kLine ? kSteps : 1];
    H h_after = after_;
    if constexpr (kLine && kWithH) {
      if (has_h) {
        lines<H>(2).get(h_line);
        if (threadIdx.x % 32 != 31) h_after = lines<H>(2).after();
      }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      Pack<H, kChannels> h{};
      if (has_h) {
        if constexpr (kLine) {
          h.v[0] = k + 1 < kSteps ? h_line[(k + 1) % kSteps].v[0] : h_after;
        } else {
          h = *slot(k);
        }
      }
      Pack<Y, kChannels> y_pack;
      Pack<A, kChannels> da_pack;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        Step<S> in{load_as<S>(a_[k].v[c]), load_as<S>(x_[k].v[c]), S(0), is_cut<kPlain>(k, c)};
        if constexpr (kWithH) {
          in.h = load_as<S>(h.v[c]);
          if ((!kPlain || k == kSteps - 1) && k == first_ && p_.h0.data) in.h = h0(c);
        }
        const S before = s[c];
        const Written<S> out = advance<kOp>(s[c], in);
        if (!kPlain && k >= left_) s[c] = before;
        y_pack.v[c] = store_as<Y>(out.y);
        if constexpr (kWithH) da_pack.v[c] = store_as<A>(out.da_out);
      }
      if constexpr (kLine) {
        reinterpret_cast<Pack<Y, 1>&>(x_[k]) = y_pack;
        if constexpr (kWithH) reinterpret_cast<Pack<A, 1>&>(a_[k]) = da_pack;
      } else {
        const bool inside = kPlain || k < left_;
        if (write_y && inside) *reinterpret_cast<Pack<Y, kChannels>*>(y) = y_pack;
        y = next<kPlain>(y, p_.y.step);
        if constexpr (kWithH) {
          if (write_da && inside) *reinterpret_cast<Pack<A, kChannels>*>(da_out) = da_pack;
          da_out = next<kPlain>(da_out, p_.da_out.step);
        }
      }
    }
    if (p_.wants_final && valid_ && left_ > 0 && left_ <= kSteps) {
      S* to = static_cast<S*>(p_.final.data) + offset_of(p_.final, at_, 0);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) to[c] = s[c];
    }
  }

  // Lines: writes the warp's results.
  __device__ __forceinline__ void leave() const {
    if constexpr (kLine) {
      lines<X>(1).put(x_);
      if constexpr (kWithH) lines<A>(0).put(a_);
      __syncwarp();
      if (p_.wants_y) lines<X>(1).store(p_.y, at_.o, p_.time);
      if (kWithH && p_.wants_da) lines<A>(0).store(p_.da_out, at_.o, p_.time);
    }
  }

 private:
  template <class T>
  __device__ Lines<T, kSteps> lines(int operand) const {
    constexpr int kBytes = Lines<T, kSteps>::kThreadBytes;
    return {shared_ + operand * static_cast<int>(blockDim.x) * kBytes, p_.descending, begin_};
  }
  __device__ Pack<H, kChannels>* slot(int k) const {
    return reinterpret_cast<Pack<H, kChannels>*>(shared_) + k * blockDim.x + threadIdx.x;
  }

  template <bool kPlain, class T>
  __device__ __forceinline__ void load_rows(Pack<T, kChannels> (&to)[kSteps],
                                            const Stream<const void>& in, S otherwise) const {
    const T* from = static_cast<const T*>(in.data) + offset_of(in, at_, begin_);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (kPlain || k < left_) {
        to[k] = *reinterpret_cast<const Pack<T, kChannels>*>(from + k * in.step);
      } else {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) to[k].v[c] = store_as<T>(otherwise);
      }
    }
  }

  __device__ __forceinline__ void find_cuts() {
    cuts_ = 0;
    if (p_.has_reset) {
      const auto* reset =
          static_cast<const uint8_t*>(p_.reset.data) + offset_of(p_.reset, at_, begin_);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          if (k < left_ && reset[k * p_.reset.step + c * p_.reset.inner]) {
            cuts_ |= Cuts{1} << (k * kChannels + c);
          }
        }
      }
    }
    if (!p_.has_h0 && first_ >= 0 && first_ < kSteps) {
      cuts_ |= ((Cuts{1} << kChannels) - 1) << (first_ * kChannels);
    }
  }

  template <bool kPlain>
  __device__ __forceinline__ bool is_cut(int k, int c) const {
    if (!kPlain) return ((cuts_ >> (k * kChannels + c)) & 1u) != 0;
    return k == (kWithH ? kSteps - 1 : 0) && k == first_ && !p_.has_h0;
  }

  // The compiler would compute the addresses of all steps ahead, and keep them in registers.
  template <bool kPlain, class T>
  static __device__ __forceinline__ T* next(T* at, int step) {
    at += step;
    if constexpr (kWithH || !kPlain) asm volatile("" : "+l"(at));
    return at;
  }

  __device__ S h0(int c) const {
    return static_cast<const S*>(p_.h0.data)[offset_of(p_.h0, {at_.o, at_.i + c}, 0)];
  }

  const Args& p_;
  const Channel at_;
  const int begin_, left_;
  const bool valid_;
  char* const shared_;
  const int first_;
  Pack<A, kChannels> a_[kSteps];
  Pack<X, kChannels> x_[kSteps];
  H after_{};  // in lines, in the last lane: h of the step after the thread's last one
  Cuts cuts_ = 0;
};

// Clusters exist from compute capability 9.0 on; before it the kernels are empty, and not launched.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasClusters = false;
#else
inline constexpr bool kHasClusters = true;
#endif

template <bool kPlain, Op kOp, class A, class B, class H, class Layout, int kSteps>
__device__ __forceinline__ void cluster_block(const Args& p) {
  using Mine = Segment<kOp, A, B, H, Layout, kSteps>;
  using S = typename Mine::S;
  using R = Real<S>;
  constexpr int kChannels = Layout::kChannels;
  constexpr unsigned kAll = 0xffffffffu;
  constexpr int kWarpBatch = kClusterWarps / 2, kBatch = 8;

  extern __shared__ __align__(16) char shared[];
  __shared__ Message<S> of_warps[kClusterWarps][32];  // [][channel]
  __shared__ S lost_by_warps[kClusterWarps][32];      // what rounding has taken from their products
  __shared__ Message<S> of_blocks[kMostRanks][32];
  __shared__ S states[kMostRanks][32];  // that come out of blocks without a map
  __shared__ S carry[32];
  __shared__ uint64_t barriers[1 + kMostRanks];  // the blocks' maps; the state from each block

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int warps = blockDim.x / 32;
  const int ranks = p.ranks, group = blockIdx.y;
  const int rank = blockIdx.x;  // in a cluster as in the grid

  // Lanes side by side are neighbouring channels, `stride` apart in time.
  const int stride = 1 << p.lanes_log2, segments = 32 >> p.lanes_log2;
  const int channels = kChannels << p.lanes_log2;        // of the block
  const int column = (lane & (stride - 1)) * kChannels;  // the thread's first channel
  const int segment = warp * segments + (lane >> p.lanes_log2);
  const int asked = group * channels + column;
  const bool valid = asked < p.channels;
  Mine mine(p, channel_of(p, valid ? asked : p.channels - kChannels),
            (rank * warps * segments + segment) * kSteps, valid, shared);
  mine.template load<kPlain>();
  // Besides, each lane speaks for one channel of the block.
  const int spoken = lane & (channels - 1);
  S entering = S(0);
  if (p.has_init) {
    const Channel at = channel_of(p, min(group * channels + spoken, p.channels - 1));
    entering = static_cast<const S*>(p.init.data)[offset_of(p.init, at, 0)];
  }
  if (ranks > 1) {
    // One of a warp at a time, as these are slow.
    for (int k = warp; k <= rank && lane == 0; k += warps) {
      expect(&barriers[k],
             k == 0 ? rank * channels * int{sizeof(Message<S>)} : channels * int{sizeof(S)});
    }
    __syncwarp();
    arrive_at_cluster();
  }
  mine.take();

  // The map of this thread's segment, then of the warp's segments up to it; `before`: of those
  // before it.
  Composed<S> map[kChannels], before[kChannels];
  Affine<R> bound[kChannels];
  mine.template compose_steps<kPlain>(map, bound);
  for (int delta = stride; delta < 32; delta *= 2) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const Composed<S> earlier = shuffle_up(map[c], delta);
      if (lane >= delta) map[c] = compose(map[c], earlier);
    }
  }
  unsigned without = 0;  // bit c: for channel c of its own, a lane cannot be certain
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    before[c] = shuffle_up(map[c], stride);
    if (lane < stride) before[c] = {};
    const bool within = magnitude(before[c].a) * bound[c].a <= Limits<R>::product &&
                        magnitude(before[c].b) * bound[c].a + bound[c].b <= Limits<R>::local;
    if (!within) without |= 1u << c;
  }
  if (__any_sync(kAll, without != 0)) {
    for (int delta = stride; delta < 32; delta *= 2) {
      without |= __shfl_xor_sync(kAll, without, delta);
    }
  }
  if (lane >= 32 - stride) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const Affine<S> without_lost{map[c].a, map[c].b};
      of_warps[warp][column + c] = Message<S>::of(without_lost, (without >> c & 1u) == 0);
      lost_by_warps[warp][column + c] = map[c].lost;
    }
  }
  __syncthreads();

  // The block's map, and that of the warps before this one.
  Composed<S> total, until_warp;
  bool certain = true;
#pragma unroll 1
  for (int k = 0; k < warps; k += kWarpBatch) {
    Message<S> messages[kWarpBatch];
    S lost[kWarpBatch];
#pragma unroll
    for (int j = 0; j < kWarpBatch; ++j) {
      messages[j] = of_warps[k + j][spoken];
      lost[j] = lost_by_warps[k + j][spoken];
    }
#pragma unroll
    for (int j = 0; j < kWarpBatch; ++j) {
      if (k + j == warp) until_warp = total;
      certain = certain & messages[j].certain() & (magnitude(total.a) <= Limits<R>::product) &
                (magnitude(total.b) <= Limits<R>::local);
      const Affine<S> map_of = messages[j].map();
      total = compose(Composed<S>{map_of.a, lost[j], map_of.b}, total);
    }
  }
  // What other blocks apply, and this one: one map, rounded once.
  const Affine<S> rounded = total.rounded();

  // f(r) for the later blocks r, shared out among those who speak for a channel.
  const auto for_later_blocks = [&](auto&& f) {
    const int of_warp = segments / kChannels;  // lanes that speak for the same channel
    const int speaker = warp * of_warp + (lane >> p.lanes_log2) / kChannels;
    for (int r = rank + 1 + speaker; r < ranks; r += warps * of_warp) f(r);
  };
  if (ranks > 1) {
    const Message<S> message = Message<S>::of(rounded, certain);
    wait_for_cluster();
    for_later_blocks([&](int r) { send(r, &of_blocks[rank][spoken], message, &barriers[0]); });
  }

  // The state that enters the block.
  if (rank > 0) {
    wait_for(&barriers[0]);
    S s = entering;
    bool usual = true;
#pragma unroll 1
    for (int k = 0; k < rank; k += kBatch) {
      Message<S> messages[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) messages[j] = of_blocks[k + j][spoken];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const bool there = k + j < rank;
        usual = usual & (!there | (messages[j].certain() & state_within(s)));
        const S after = apply(messages[j].map(), s);
        s = there ? after : s;
      }
    }
    if (!__all_sync(kAll, usual)) {
      // A block that cannot be certain for one of its channels sends the states of all.
      s = entering;
      for (int k = 0; k < rank; ++k) {
        const Message<S> message = of_blocks[k][spoken];
        if (__all_sync(kAll, message.certain() && state_within(s))) {
          s = apply(message.map(), s);
        } else {
          wait_for(&barriers[1 + k]);
          s = states[k][spoken];
        }
      }
    }
    entering = s;
  }

  // Channels whose segments take turns, the same for all warps. A channel whose map can be trusted
  // is not touched by what its neighbours hold.
  const unsigned in_order =
      __ballot_sync(kAll, !certain || !state_within(entering)) & (kAll >> (32 - channels));
  const S entering_warp = apply(until_warp, entering);
  S s[kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    s[c] = apply(before[c], shuffle(entering_warp, column + c));
  }
  if (in_order != 0) {
    if (warp == 0 && lane < channels) carry[lane] = entering;
    __syncthreads();
  }
  if constexpr (kOp == Op::kCotangent) wait_for_copies();
  const unsigned turns = in_order >> column & ((1u << kChannels) - 1);
  const int rounds = in_order != 0 ? warps * segments : 0;
  for (int round = -1; round < rounds; ++round) {
    if (turns != 0 ? segment == round : round < 0) {
      if (turns != 0) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          if (turns >> c & 1u) s[c] = carry[column + c];
        }
      }
      mine.template run_steps<kPlain>(s);
      if (turns != 0) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          if (turns >> c & 1u) carry[column + c] = s[c];
        }
      }
    }
    if (rounds > 0) __syncthreads();
  }
  if (in_order != 0 && ranks > 1) {
    const S leaving = in_order >> spoken & 1u ? carry[spoken] : apply(rounded, entering);
    for_later_blocks([&](int r) { send(r, &states[rank][spoken], leaving, &barriers[1 + rank]); });
  }
  mine.leave();
}

// Blocks that a multiprocessor is meant to hold: two where that costs no spills.
template <bool kPlain, Op kOp, class A, class B, class H, class Layout, int kSteps>
__global__ void __launch_bounds__(32 * kClusterWarps, kPlain ? 2 : 1)
    cluster_kernel([[maybe_unused]] const __grid_constant__ Args p) {
  if constexpr (kHasClusters) cluster_block<kPlain, kOp, A, B, H, Layout, kSteps>(p);
}

// ---- Host ----

template <class Data>
inline Stream<Data> constant_stream(Data* data) {
  return {data, 0, 0, 0, 0};
}

// `past`: how many steps of the recurrence of h before the walk's.
inline Stream<const void> stream_of(const Problem& p, const Input& in, int past) {
  if (!in.data) return constant_stream<const void>(nullptr);
  const Broadcast& b = in.at;
  const int64_t back = past * (p.reverse ? -1 : 1);
  const int64_t first = ((p.descending() ? p.time - 1 : 0) - back) * b.time_stride;
  return {in.data, static_cast<int32_t>(first),
          static_cast<int32_t>(p.descending() ? -b.time_stride : b.time_stride),
          static_cast<int32_t>(b.outer_axes > 0 ? b.outer[0].stride : 0),
          static_cast<int32_t>(b.inner_axes > 0 ? b.inner[0].stride : 0)};
}

inline Stream<void> stream_of(const Problem& p, const Output& out) {
  const int64_t step = p.descending() ? -p.inner : p.inner;
  return {out.data, static_cast<int32_t>(p.descending() ? (p.time - 1) * p.inner : 0),
          static_cast<int32_t>(step), static_cast<int32_t>(p.time * p.inner), 1};
}

// `past`: how many steps earlier in its recurrence h is read.
inline Args args_of(const Problem& p, const ClusterPlan& plan, int past) {
  Args args{};
  args.time = static_cast<int32_t>(p.time);
  args.channels = static_cast<int32_t>(p.channels());
  args.inner = static_cast<int32_t>(p.inner);
  // With l = ceil(log2(inner)), exact for n < 2^31 (Granlund and Montgomery, 1994).
  int l = 0;
  while ((int64_t{1} << l) < p.inner) ++l;
  args.by_inner_shift = 31 + l;
  args.by_inner =
      static_cast<uint32_t>((uint64_t{1} << (31 + l)) / static_cast<uint64_t>(p.inner) + 1);
  args.lanes_log2 = plan.lanes_log2;
  args.ranks = plan.ranks;
  args.has_h0 = p.has_h0;
  args.has_init = p.init.data != nullptr;
  args.has_reset = p.reset.data != nullptr;
  args.has_h = p.h.data != nullptr;
  args.descending = p.descending();
  args.wants_y = p.y.data != nullptr;
  args.wants_da = p.da_out.data != nullptr;
  args.wants_final = p.final.data != nullptr;
  args.a = stream_of(p, p.a, 0);
  args.x = stream_of(p, p.x, 0);
  args.h = stream_of(p, p.h, past);
  args.h0 = stream_of(p, p.h0, 0);
  args.init = stream_of(p, p.init, 0);
  args.h0.first = args.init.first = args.h0.step = args.init.step = 0;
  args.reset = stream_of(p, p.reset, 0);
  args.y = stream_of(p, p.y);
  args.da_out = stream_of(p, p.da_out);
  args.final = {p.final.data, 0, 0, args.inner, 1};
  return args;
}

template <bool kPlain, Op kOp, class A, class B, class H, class Layout, int kSteps>
cudaError_t launch_op(const Problem& problem, const ClusterPlan& plan, cudaStream_t stream) {
  const auto kernel = cluster_kernel<kPlain, kOp, A, B, H, Layout, kSteps>;
  const int threads = 32 * plan.warps;
  constexpr int kThreadBytes = Segment<kOp, A, B, H, Layout, kSteps>::kThreadBytes;
  const int bytes = threads * kThreadBytes;
  cudaError_t error = prepare_for_hopper(kernel, 32 * kClusterWarps * kThreadBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(plan.ranks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.ranks), static_cast<unsigned>(plan.groups));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = plan.ranks > 1 ? 1 : 0;
  if (plan.ranks > kPortableRanks) {
    // Not every GPU, or part of one, has so many multiprocessors side by side.
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    int clusters = 0;
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (error != cudaSuccess || clusters == 0) {
      cudaGetLastError();
      return cudaErrorNotSupported;
    }
  }
  return cudaLaunchKernelEx(&config, kernel, args_of(problem, plan, Layout::kLine ? 0 : 1));
}

}  // namespace cluster

template <class A, class B, class H, class Layout, int kSteps>
cudaError_t launch_cluster(const Problem& problem, const ClusterPlan& plan, cudaStream_t stream) {
  constexpr Op kScan = Op::kScan, kCotangent = Op::kCotangent;
  const int64_t tile = int64_t{plan.warps} * (32 >> plan.lanes_log2) * kSteps;
  const bool plain = !problem.reset.data && problem.time == plan.ranks * tile;
  const auto launch = problem.op == kCotangent
                          ? plain ? cluster::launch_op<true, kCotangent, A, B, H, Layout, kSteps>
                                  : cluster::launch_op<false, kCotangent, A, B, H, Layout, kSteps>
                      : plain ? cluster::launch_op<true, kScan, A, B, H, Layout, kSteps>
                              : cluster::launch_op<false, kScan, A, B, H, Layout, kSteps>;
  return launch(problem, plan, stream);
}

}  // namespace jax_scan
