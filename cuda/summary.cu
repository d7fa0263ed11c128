#include <cstring>

#include "cuda/device.cuh"
#include "cuda/summary.h"

// A call is three launches: a look at each channel's last steps, the first prefix, together with
// what they make of zero; a look at the longer prefixes; and the map of as many steps as it takes.
// The last two begin by asking, of the block's own channels, whether these have been forgotten
// already: then there is nothing to do. So it is decided on the device how much is read, without a
// conditional of the program. The launches see what those before them have written, since they
// follow each other on a stream.
//
// Maps are in double precision, and the product in them has an exponent of its own: it neither
// overflows nor vanishes before the end, however many factors there are. Zeros, infinities and NaNs
// among the factors have the product that they have in any order: a NaN if there are a zero and an
// infinity.
//
// No result depends on which block comes first.
namespace jax_scan {
namespace summary {

// W is double or complex.
template <class W>
struct Scaled {
  W m = W(1);
  long long e = 0;  // the value is m 2^e
};

__device__ __forceinline__ double scaled(double x, double by) { return x * by; }
__device__ __forceinline__ Complex128 scaled(Complex128 x, double by) {
  return {x.re * by, x.im * by};
}

// Brings the larger component of the mantissa near 1, exactly.
template <class W>
__device__ __forceinline__ void normalise(Scaled<W>& s) {
  int field = (__double2hiint(magnitude(s.m)) >> 20) & 0x7ff;
  if (field == 0 && magnitude(s.m) != 0) {  // subnormal
    s.m = scaled(s.m, 0x1p100);
    s.e -= 100;
    field = (__double2hiint(magnitude(s.m)) >> 20) & 0x7ff;
  }
  if (field == 0 || field == 0x7ff) return;
  const int up = max(2046 - field, 1);  // of the power of two 2^(up - 1023)
  s.m = scaled(s.m, __hiloint2double(up << 20, 0));
  s.e -= up - 1023;
}

template <class W>
__device__ __forceinline__ Scaled<W> operator*(Scaled<W> x, Scaled<W> y) {
  Scaled<W> z{x.m * y.m, x.e + y.e};
  normalise(z);
  return z;
}

// Beyond the range of doubles it is infinite or zero. (A third of the instructions of scalbn.)
__device__ __forceinline__ double value(double m, long long e) {
  const auto bounded = static_cast<int>(max(-3000ll, min(3000ll, e)));
  const auto power = [](int k) { return __hiloint2double((1023 + k) << 20, 0); };
  const int third = bounded / 3;
  return m * power(third) * power(third) * power(bounded - 2 * third);
}
__device__ __forceinline__ double value(Scaled<double> x) { return value(x.m, x.e); }
__device__ __forceinline__ Complex128 value(Scaled<Complex128> x) {
  return {value(x.m.re, x.e), value(x.m.im, x.e)};
}

// The map s -> a s + b; after a cut, b, whatever `a` has become.
template <class W>
struct alignas(16) Map {
  Scaled<W> a;
  W b = W(0);
  bool cut = false;
};

template <class W>
__device__ __forceinline__ Map<W> compose(const Map<W>& second, const Map<W>& first) {
  if (second.cut) return second;
  // The mantissa is below 2 in each component, so that a quarter of it makes nothing overflow.
  const Scaled<W> through{scaled(second.a.m, 0.25) * first.b, second.a.e + 2};
  return {second.a * first.a, value(through) + second.b, first.cut};
}

template <class T>
inline constexpr bool kIsComplex = sizeof(T) != sizeof(Real<T>);
template <class T>
using Wide = std::conditional_t<kIsComplex<T>, Complex128, double>;
// Four factors of single precision have a product within the range of double precision.
template <class T>
inline constexpr bool kIsNarrow = sizeof(Real<T>) <= 4;

// One step more. Whoever calls it normalises the product every four steps.
template <class A, class X, class W>
__device__ __forceinline__ void advance(Map<W>& map, A a, X x, bool cut, bool is_cotangent) {
  const W factor = load_as<W>(a), input = load_as<W>(x);
  map.b = is_cotangent ? factor * (map.b + input) : mul_add(factor, map.b, input);
  if (cut) map.b = is_cotangent ? W(0) : input;
  map.cut = map.cut || cut;
  if constexpr (kIsNarrow<A>) {
    map.a.m = map.a.m * factor;
  } else {
    Scaled<W> own{factor};
    normalise(own);
    map.a = map.a * own;
  }
}

// log2 |x|. Where a float, or the square of one, would lose the size, the exponent is taken apart.
template <class T>
__device__ __forceinline__ float log2_size(T x) {
  if constexpr (kIsComplex<T>) {
    Scaled<Complex128> s{load_as<Complex128>(x)};
    normalise(s);
    const auto re = static_cast<float>(s.m.re), im = static_cast<float>(s.m.im);
    return static_cast<float>(s.e) + 0.5f * __log2f(re * re + im * im);
  } else if constexpr (sizeof(T) == 8) {
    Scaled<double> s{x};
    normalise(s);
    return static_cast<float>(s.e) + __log2f(fabsf(static_cast<float>(s.m)));
  } else {
    return __log2f(fabsf(load_as<float>(x)));
  }
}

// Sums of logarithms: those of all factors, and of those above 1. A cut is a factor of zero.
struct Sums {
  float all = 0;
  float growth = 0;

  template <class T>
  __device__ __forceinline__ void add(T factor, bool cut) {
    const float size = cut ? -INFINITY : log2_size(factor);
    all += size;
    growth += size < 0 ? 0 : size;  // written so that a NaN stays
  }
};

__device__ __forceinline__ Sums operator+(Sums x, Sums y) {
  return {x.all + y.all, x.growth + y.growth};
}

// When such sums mean that a state is forgotten; a NaN never does. The product of the factors,
// times the largest state, is below half of the smallest subnormal number.
struct Bound {
  float all;
  float growth;
  __device__ bool holds(Sums s) const { return s.all < all && s.growth < growth; }
};

struct Workspace {
  unsigned* counters;  // [block of channels]: pieces of time whose map is there
  Sums* first;         // [channel]: within the first prefix
  Sums* sums;          // [piece of a longer prefix][channel]
  void* maps;          // [piece of time][channel]
};

// Which channels and steps a block has: neighbouring channels, side by side in `lanes` threads that
// hold V each, and below them `rows` threads, each with a run of the block's steps.
struct Tile {
  int64_t outer, inner, channels;
  int64_t groups;  // of channels, for each outer index
  int lanes, rows;
};

// Blocks, rows and steps are counted in 32 bits: 64-bit divisions cost a hundred instructions.
template <int V>
struct Place {
  uint32_t piece, block;
  int64_t outer, first;  // `first`: channel of the block, an inner index
  int64_t column;        // of the thread
  int row, count;        // the block's channels
  bool works;
  __device__ explicit Place(const Tile& tile) {
    const auto groups = static_cast<uint32_t>(tile.groups);
    const uint32_t wide = static_cast<uint32_t>(tile.outer) * groups;
    piece = blockIdx.x / wide;
    block = blockIdx.x - piece * wide;
    outer = block / groups;
    first = int64_t{block - static_cast<uint32_t>(outer) * groups} * tile.lanes * V;
    row = threadIdx.x / tile.lanes;
    column = first + threadIdx.x % tile.lanes * V;
    count = static_cast<int>(min(int64_t{tile.lanes * V}, tile.inner - first));
    works = row < tile.rows && column < tile.inner;
  }
  __device__ int64_t channel(const Tile& tile, int64_t inner) const {
    return outer * tile.inner + inner;
  }
};

// Steps [begin, end) of the walk, or the j-th of n parts of these.
struct Steps {
  uint32_t begin, end;
  __device__ Steps part(uint32_t j, uint32_t n) const {
    const uint32_t all = end - begin, each = all / n, more = all - each * n;
    const uint32_t from = begin + j * each + min(j, more);
    return {from, from + each + (j < more ? 1 : 0)};
  }
};

// The last `most` steps but the last `least`.
__device__ __forceinline__ Steps last_steps(const SummaryProblem& p, int64_t most,
                                            int64_t least = 0) {
  return {static_cast<uint32_t>(p.time - most), static_cast<uint32_t>(p.time - least)};
}

// Of an operand, a thread's V channels along the walk.
template <class T, int V>
class Column {
 public:
  __device__ Column(const Input& in, const SummaryProblem& p, const Place<V>& at, uint32_t step)
      : packed_(in.at.inner_contiguous()) {
    const int64_t time = p.descending ? p.time - 1 - step : step;
    const int64_t inner = in.at.inner_offset(at.column);
    from_ = static_cast<const T*>(in.data) + in.at.outer_offset(at.outer) + inner +
            time * in.at.time_stride;
    jump_ = p.descending ? -in.at.time_stride : in.at.time_stride;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      offset_[v] = static_cast<int32_t>(in.at.inner_offset(at.column + v) - inner);
    }
  }
  // The element so many steps on.
  __device__ __forceinline__ Pack<T, V> operator[](int k) const {
    const T* const from = from_ + k * jump_;
    Pack<T, V> pack;
    if (V == 1 || packed_) {
      pack = *reinterpret_cast<const Pack<T, V>*>(from);
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) pack.v[v] = from[offset_[v]];
    }
    return pack;
  }
  __device__ __forceinline__ void go(int steps) { from_ += steps * jump_; }

 private:
  const T* from_;
  int64_t jump_;
  int32_t offset_[V] = {};
  bool packed_;
};

// What is read at a time: as much as registers allow.
template <class A, class X, int V>
struct Batch {
  static constexpr int kSteps = V == 1 || sizeof(X) < 8 ? 8 : 4;
  int count;
  Pack<A, V> a[kSteps];
  Pack<X, V> x[kSteps];
  Pack<uint8_t, V> cuts[kSteps];
};

// f(Batch) for the steps; without x if that is not `wanted`.
template <class A, class X, int V, class F>
__device__ __forceinline__ void for_each(const SummaryProblem& p, const Place<V>& at, Steps steps,
                                         bool wanted, F&& f) {
  Column<A, V> a(p.a, p, at, steps.begin);
  Column<X, V> x(p.x, p, at, steps.begin);
  Column<uint8_t, V> reset(p.reset, p, at, steps.begin);
  Batch<A, X, V> batch;
  batch.count = 0;
  constexpr int kMost = Batch<A, X, V>::kSteps;
  const auto read = [&](auto& packs, auto& column) {
    if (batch.count == kMost) {
#pragma unroll
      for (int k = 0; k < kMost; ++k) packs[k] = column[k];
    } else {
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        if (k < batch.count) packs[k] = column[k];
      }
    }
    column.go(kMost);
  };
#pragma unroll
  for (int k = 0; k < kMost; ++k) batch.cuts[k] = {};
  for (int left = static_cast<int>(steps.end - steps.begin); left > 0; left -= kMost) {
    batch.count = min(left, kMost);
    read(batch.a, a);
    if (wanted) read(batch.x, x);
    if (p.reset.data) read(batch.cuts, reset);
    f(batch);
  }
}

// Puts together what the rows of threads have, in their order; the first row returns all.
template <class X, int V, class F>
__device__ __forceinline__ void over_rows(X (&x)[V], const Tile& tile, const Place<V>& at, F&& f) {
  __shared__ X shared[kSummaryThreads][V];
#pragma unroll
  for (int v = 0; v < V; ++v) shared[threadIdx.x][v] = x[v];
  for (int distance = 1; distance < tile.rows; distance *= 2) {
    __syncthreads();
    if (at.row % (2 * distance) == 0 && at.row + distance < tile.rows) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        x[v] = f(x[v], shared[threadIdx.x + distance * tile.lanes][v]);
        shared[threadIdx.x][v] = x[v];
      }
    }
  }
  __syncthreads();
}

// The first of the prefixes [0, known) within which a channel forgets; `known` if there is none.
__device__ __forceinline__ int forgets_within(const SummaryPlan& plan, const Workspace& workspace,
                                              const Bound& bound, int64_t channels, int64_t channel,
                                              int known) {
  Sums all = workspace.first[channel];
  if (known == 0 || bound.holds(all)) return 0;
  for (int k = 1; k < known; ++k) {
    const Sums* from = workspace.sums + plan.first_look[k] * channels + channel;
#pragma unroll 16
    for (int j = 0; j < plan.looks[k]; ++j) all = all + from[j * channels];
    if (bound.holds(all)) return k;
  }
  return known;
}

// The same for all of the block's channels together.
template <int V>
__device__ __forceinline__ int block_forgets_within(const SummaryPlan& plan,
                                                    const Workspace& workspace, const Bound& bound,
                                                    const Tile& tile, const Place<V>& at,
                                                    int known) {
  int mine = 0;
  if (static_cast<int>(threadIdx.x) < at.count) {
    const int64_t channel = at.channel(tile, at.first + threadIdx.x);
    mine = forgets_within(plan, workspace, bound, tile.channels, channel, known);
  }
  int all = 0;
  while (all < known && !__syncthreads_and(mine <= all)) ++all;
  return all;
}

// Blocks that a multiprocessor is to hold.
inline constexpr int kResident = 2;

// Sums of logarithms within the prefixes but the first.
template <class A, int V>
__global__ void __launch_bounds__(kSummaryThreads, kResident)
    look_kernel(const __grid_constant__ SummaryProblem p, const __grid_constant__ SummaryPlan plan,
                const __grid_constant__ Tile tile, Workspace workspace, Bound bound) {
  const Place<V> at(tile);
  if (block_forgets_within<V>(plan, workspace, bound, tile, at, 1) == 0) return;
  int prefix = 1;
  auto piece = static_cast<int>(at.piece);
  for (; piece >= plan.looks[prefix]; ++prefix) piece -= plan.looks[prefix];
  const Steps steps = last_steps(p, p.prefix[prefix], p.prefix[prefix - 1]);
  Sums sums[V];
  if (at.works) {
    const Steps mine = steps.part(piece, plan.looks[prefix]).part(at.row, tile.rows);
    for_each<A, A, V>(p, at, mine, false, [&](const auto& batch) {
#pragma unroll
      for (int k = 0; k < batch.kSteps; ++k) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (k < batch.count) sums[v].add(batch.a[k].v[v], batch.cuts[k].v[v] != 0);
        }
      }
    });
  }
  over_rows(sums, tile, at, [](Sums x, Sums y) { return x + y; });
  if (at.row == 0 && at.works) {
    Sums* to = workspace.sums + (plan.first_look[prefix] + piece) * tile.channels +
               at.channel(tile, at.column);
#pragma unroll
    for (int v = 0; v < V; ++v) to[v] = sums[v];
  }
}

template <class R>
__device__ __forceinline__ void store(void* to, int64_t at, double x) {
  static_cast<R*>(to)[at] = static_cast<R>(x);
}
template <class R>
__device__ __forceinline__ void store(void* to, int64_t at, Complex128 x) {
  static_cast<Complex<R>*>(to)[at] = {static_cast<R>(x.re), static_cast<R>(x.im)};
}
template <class W>
__device__ __forceinline__ void store(const SummaryProblem& p, bool in_double, int64_t at,
                                      const Map<W>& map, bool forgotten) {
  const W product = forgotten || map.cut ? W(0) : value(map.a);
  if (in_double) {
    store<double>(p.product, at, product);
    store<double>(p.result, at, map.b);
  } else {
    store<float>(p.product, at, product);
    store<float>(p.result, at, map.b);
  }
}

// What another block has written.
template <class M>
__device__ __forceinline__ M load_shared(const M* from) {
  struct Raw {
    uint4 part[sizeof(M) / 16];
  } raw;
#pragma unroll
  for (size_t k = 0; k < sizeof(M) / 16; ++k) {
    raw.part[k] = __ldcg(reinterpret_cast<const uint4*>(from) + k);
  }
  return internal::bit_cast<M>(raw);
}

// The map of a channel's last steps: of the first prefix, with the sums that say whether it does,
// by a block alone, or of as many as it takes.
template <class A, class X, int V, bool kFirst>
__global__ void __launch_bounds__(kSummaryThreads, kFirst ? 1 : kResident)
    map_kernel(const __grid_constant__ SummaryProblem p, const __grid_constant__ SummaryPlan plan,
               const __grid_constant__ Tile tile, Workspace workspace, Bound bound,
               int64_t counters, bool in_double) {
  using W = Wide<X>;
  const Place<V> at(tile);
  Steps steps = last_steps(p, p.time);
  uint32_t pieces = 1;
  bool forgotten = false;
  if constexpr (kFirst) {
    steps = last_steps(p, p.prefix[0]);
    for (int64_t k = int64_t{blockIdx.x} * kSummaryThreads + threadIdx.x; k < counters;
         k += int64_t{gridDim.x} * kSummaryThreads) {
      workspace.counters[k] = 0;
    }
  } else {
    if (p.prefixes > 0) {
      const int within = block_forgets_within<V>(plan, workspace, bound, tile, at, p.prefixes);
      if (within == 0) return;
      forgotten = within < p.prefixes;
      if (forgotten) steps = last_steps(p, p.prefix[within]);
    }
    pieces = min(static_cast<uint32_t>(plan.pieces), (steps.end - steps.begin + 255) / 256);
    if (at.piece >= pieces) return;
  }

  Map<W> map[V];
  [[maybe_unused]] Sums sums[V];
  if (at.works) {
    const Steps mine = steps.part(at.piece, pieces).part(at.row, tile.rows);
    for_each<A, X, V>(p, at, mine, true, [&](const auto& batch) {
#pragma unroll
      for (int k = 0; k < batch.kSteps; ++k) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (k < batch.count) {
            const A a = batch.a[k].v[v];
            const bool cut = batch.cuts[k].v[v] != 0;
            if constexpr (kFirst) sums[v].add(a, cut);
            advance(map[v], a, batch.x[k].v[v], cut, p.is_cotangent);
          }
          if (k % 4 == 3) normalise(map[v].a);
        }
      }
    });
  }
  const auto in_order = [](const Map<W>& x, const Map<W>& y) { return compose(y, x); };
  over_rows(map, tile, at, in_order);
  if constexpr (kFirst) {
    over_rows(sums, tile, at, [](Sums x, Sums y) { return x + y; });
    if (at.row > 0 || !at.works) return;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int64_t channel = at.channel(tile, at.column) + v;
      workspace.first[channel] = sums[v];
      if (bound.holds(sums[v])) store(p, in_double, channel, map[v], true);
    }
    return;
  }

  if (pieces > 1) {
    Map<W>* const maps = static_cast<Map<W>*>(workspace.maps) + at.channel(tile, at.column);
    if (at.row == 0 && at.works) {
#pragma unroll
      for (int v = 0; v < V; ++v) maps[at.piece * tile.channels + v] = map[v];
    }
    // Whichever block is the last one puts the pieces together, in the same order.
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = atomicAdd(&workspace.counters[at.block], 1u) + 1 == pieces;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
#pragma unroll
    for (int v = 0; v < V; ++v) {
      map[v] = {};
      if (!at.works) continue;
      const Steps mine = Steps{0, pieces}.part(at.row, tile.rows);
      for (uint32_t k = mine.begin; k < mine.end; ++k) {
        map[v] = compose(load_shared(maps + k * tile.channels + v), map[v]);
      }
    }
    over_rows(map, tile, at, in_order);
  }
  if (at.row == 0 && at.works) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      store(p, in_double, at.channel(tile, at.column) + v, map[v], forgotten);
    }
  }
}

// Vectors of neighbouring channels: their elements are neighbours, or all the same.
bool aligned(const Input& in, int64_t inner, int vector) {
  return inner % vector == 0 && (!in.at.inner_contiguous() ||
                                 reinterpret_cast<uintptr_t>(in.data) %
                                         static_cast<uintptr_t>(vector * byte_size(in.dtype)) ==
                                     0);
}

template <class A, class X, int V>
cudaError_t launch_tiles(const SummaryProblem& p, const SummaryPlan& plan,
                         const Workspace& workspace, const Bound& bound, cudaStream_t stream) {
  const int64_t columns = p.inner / V;
  const auto tile_of = [&](int lanes) {
    Tile tile{p.outer, p.inner, p.outer * p.inner, divide_up(columns, int64_t{lanes}), 0, 0};
    tile.lanes = static_cast<int>(divide_up(columns, tile.groups));
    tile.rows = kSummaryThreads / tile.lanes;
    return tile;
  };
  const auto grid = [&](const Tile& tile, int64_t pieces) {
    return dim3(static_cast<unsigned>(pieces * tile.outer * tile.groups));
  };
  // A block takes all of the first prefix, so few channels that it soon has.
  const Tile narrow = tile_of(std::max(16 / V / static_cast<int>(sizeof(X)), 1));
  const Tile tile = tile_of(kSummaryLanes);
  const int64_t others = p.prefixes > 0 ? plan.first_look[p.prefixes] : 0;
  if (std::max({narrow.groups, tile.groups * others, tile.groups * plan.pieces}) * p.outer >
      INT32_MAX) {
    return cudaErrorInvalidConfiguration;
  }
  const int64_t counters = p.outer * tile.groups;
  if (p.prefixes > 0) {
    map_kernel<A, X, V, true><<<grid(narrow, 1), kSummaryThreads, 0, stream>>>(
        p, plan, narrow, workspace, bound, counters, is_double(p.state));
  } else {
    const cudaError_t error = cudaMemsetAsync(
        workspace.counters, 0, static_cast<size_t>(counters) * sizeof(unsigned), stream);
    if (error != cudaSuccess) return error;
  }
  if (others > 0) {
    look_kernel<A, V>
        <<<grid(tile, others), kSummaryThreads, 0, stream>>>(p, plan, tile, workspace, bound);
  }
  map_kernel<A, X, V, false><<<grid(tile, plan.pieces), kSummaryThreads, 0, stream>>>(
      p, plan, tile, workspace, bound, counters, is_double(p.state));
  return cudaGetLastError();
}

template <class A, class X = A>
cudaError_t launch(const SummaryProblem& p, const SummaryPlan& plan, const Workspace& workspace,
                   const Bound& bound, cudaStream_t stream) {
  constexpr int kMost = summary_vector(std::max(sizeof(A), sizeof(X)));
  if constexpr (kMost > 1) {
    if (aligned(p.a, p.inner, kMost) && aligned(p.x, p.inner, kMost) &&
        (!p.reset.data || aligned(p.reset, p.inner, kMost))) {
      return launch_tiles<A, X, kMost>(p, plan, workspace, bound, stream);
    }
  }
  return launch_tiles<A, X, 1>(p, plan, workspace, bound, stream);
}

}  // namespace summary

cudaError_t launch_summary(const SummaryProblem& p, void* workspace, cudaStream_t stream) {
  const SummaryPlan plan = plan_summary(p.outer, p.time, p.inner, p.a.dtype, p.x.dtype, p.prefixes);
  auto* const bytes = static_cast<unsigned char*>(workspace);
  const summary::Workspace places{reinterpret_cast<unsigned*>(bytes),
                                  reinterpret_cast<summary::Sums*>(bytes + plan.first_offset),
                                  reinterpret_cast<summary::Sums*>(bytes + plan.sums_offset),
                                  bytes + plan.maps_offset};
  const summary::Bound bound =
      is_double(p.state) ? summary::Bound{-2099, 512} : summary::Bound{-278, 64};
  if (p.a.dtype != p.x.dtype) {
    return p.x.dtype == DType::kBF16
               ? summary::launch<float, BFloat16>(p, plan, places, bound, stream)
               : summary::launch<float, Float16>(p, plan, places, bound, stream);
  }
  switch (p.a.dtype) {
    case DType::kF16:
      return summary::launch<Float16>(p, plan, places, bound, stream);
    case DType::kBF16:
      return summary::launch<BFloat16>(p, plan, places, bound, stream);
    case DType::kF64:
      return summary::launch<double>(p, plan, places, bound, stream);
    case DType::kC64:
      return summary::launch<Complex64>(p, plan, places, bound, stream);
    case DType::kC128:
      return summary::launch<Complex128>(p, plan, places, bound, stream);
    case DType::kF32:
      break;
  }
  return summary::launch<float>(p, plan, places, bound, stream);
}

}  // namespace jax_scan
