#include <cstring>

#include "cuda/device.cuh"
#include "cuda/product.h"

// A call is three launches: a look at the first prefix, one at the others, and the product. The
// last two begin by asking, of the block's own channels, whether these have been forgotten so far:
// then there is nothing to do. So it is decided on the device how much of the factors is read, and
// without a conditional of the program. The launches see what those before them have written, since
// they follow each other on a stream.
//
// Products are in double precision with an exponent of their own: nothing overflows or vanishes
// before the end, however many factors there are. Zeros, infinities and NaNs among the factors have
// the product that they have in any order: a NaN if there are a zero and an infinity.
//
// No result depends on which block comes first.
namespace jax_scan {
namespace time_product {

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

template <class T>
inline constexpr bool kIsComplex = sizeof(T) != sizeof(Real<T>);
template <class T>
using Wide = std::conditional_t<kIsComplex<T>, Complex128, double>;
// Four factors of single precision have a product within the range of double precision.
template <class T>
inline constexpr bool kIsNarrow = sizeof(Real<T>) <= 4;

template <class T>
__device__ __forceinline__ void multiply(Scaled<Wide<T>>& s, T x) {
  Scaled<Wide<T>> factor{load_as<Wide<T>>(x)};
  if constexpr (!kIsNarrow<T>) {
    normalise(factor);
    s.e += factor.e;
  }
  s.m = s.m * factor.m;
}

// log2 |x|
template <class T>
__device__ __forceinline__ float log2_size(T x) {
  if constexpr (kIsComplex<T>) {
    const auto re = static_cast<float>(x.re), im = static_cast<float>(x.im);
    return 0.5f * __log2f(re * re + im * im);
  } else {
    return __log2f(fabsf(load_as<float>(x)));
  }
}
template <>
__device__ __forceinline__ float log2_size(double x) {
  return __log2f(fabsf(static_cast<float>(x)));
}

// Sums of logarithms: those of all factors, with small ones counted as `least`, and of those
// above 1.
struct Sums {
  float all = 0;
  float growth = 0;
};

__device__ __forceinline__ Sums operator+(Sums x, Sums y) {
  return {x.all + y.all, x.growth + y.growth};
}

// When such sums mean that a state is forgotten; a NaN never does.
struct Bound {
  float all;
  float growth;
  __device__ bool holds(Sums s) const { return s.all < all && s.growth < growth; }
};

struct Workspace {
  unsigned* counters;  // [block of channels]: pieces of time whose product is there
  Sums* sums;          // [piece of a prefix][channel]
  void* products;      // [piece of time][channel]
};

// Which factors a block reads: neighbouring channels, side by side in `lanes` threads that hold V
// each, and below them `rows` threads that share the time.
struct Tile {
  int64_t outer, inner, channels;
  int64_t groups;  // of channels, for each outer index
  int lanes, rows;
};

template <int V>
struct Place {
  int64_t piece, block, outer, first;  // `first`: channel of the block, an inner index
  int64_t column;                      // of the thread
  int lane, row, count;                // the block's channels
  bool reads;
  __device__ explicit Place(const Tile& tile) {
    const int64_t wide = tile.outer * tile.groups;
    piece = blockIdx.x / wide;
    block = blockIdx.x - piece * wide;
    outer = block / tile.groups;
    first = (block - outer * tile.groups) * tile.lanes * V;
    lane = threadIdx.x % tile.lanes;
    row = threadIdx.x / tile.lanes;
    column = first + lane * V;
    count = static_cast<int>(min(int64_t{tile.lanes * V}, tile.inner - first));
    reads = row < tile.rows && column < tile.inner;
  }
  __device__ int64_t channel(const Tile& tile, int64_t inner) const {
    return outer * tile.inner + inner;
  }
};

// After how many of the first `known` prefixes a channel's state is forgotten; `known` if it isn't.
__device__ __forceinline__ int reach(const ProductProblem& p, const ProductPlan& plan,
                                     const Sums* sums, const Bound& bound, int64_t channels,
                                     int64_t channel, int known) {
  const int most = p.most ? p.most[channel] : kMostReach;
  Sums all;
  for (int k = 0; k < known; ++k) {
    if (most <= k) return k;
    const Sums* from = sums + plan.first_look[k] * channels + channel;
#pragma unroll 16
    for (int j = 0; j < plan.looks[k]; ++j) all = all + from[j * channels];
    if (bound.holds(all)) return k;
  }
  return known;
}

// Whether all of the block's channels are forgotten within the first `known` prefixes.
template <int V>
__device__ __forceinline__ bool is_done(const ProductProblem& p, const ProductPlan& plan,
                                        const Workspace& workspace, const Bound& bound,
                                        const Tile& tile, const Place<V>& at, int known) {
  bool forgotten = true;
  if (static_cast<int>(threadIdx.x) < at.count) {
    const int64_t channel = at.channel(tile, at.first + threadIdx.x);
    forgotten = reach(p, plan, workspace.sums, bound, tile.channels, channel, known) < known;
  }
  return __syncthreads_and(forgotten);
}

// Rows that a thread reads at a time: as many bytes as registers allow.
template <class T, int V>
inline constexpr int kUnroll = V > 1 || sizeof(T) == 16 ? 8 : 16;

// f(V neighbouring factors, kUnroll times over) of the thread's share of times [begin, end).
template <class T, int V, class F>
__device__ __forceinline__ void for_each(const ProductProblem& p, const Tile& tile,
                                         const Place<V>& at, int64_t begin, int64_t end, F&& f) {
  constexpr int kRowsAtOnce = kUnroll<T, V>;
  if (!at.reads) return;
  const int64_t stride = tile.rows * tile.inner;
  const T* from =
      static_cast<const T*>(p.a) + (at.outer * p.time + begin + at.row) * tile.inner + at.column;
  int64_t left = end - begin - at.row;
  Pack<T, V> packs[kRowsAtOnce];
#pragma unroll 1
  for (; left > (kRowsAtOnce - 1) * tile.rows; left -= kRowsAtOnce * tile.rows) {
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      packs[k] = *reinterpret_cast<const Pack<T, V>*>(from + k * stride);
    }
    f(packs, kRowsAtOnce);
    from += kRowsAtOnce * stride;
  }
#pragma unroll
  for (int k = 0; k < kRowsAtOnce; ++k) {
    if (k * tile.rows < left) packs[k] = *reinterpret_cast<const Pack<T, V>*>(from + k * stride);
  }
  f(packs, left > 0 ? static_cast<int>((left + tile.rows - 1) / tile.rows) : 0);
}

// Puts together what the rows of threads have, in a fixed order; the first row returns all.
template <class X, int V, class F>
__device__ __forceinline__ void over_rows(X (&x)[V], const Tile& tile, const Place<V>& at, F&& f) {
  __shared__ X shared[kProductThreads][V];
#pragma unroll
  for (int v = 0; v < V; ++v) shared[threadIdx.x][v] = x[v];
  for (int rows = tile.rows; rows > 1;) {
    const int half = (rows + 1) / 2;
    __syncthreads();
    if (at.row < rows - half) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        x[v] = f(x[v], shared[threadIdx.x + half * tile.lanes][v]);
        shared[threadIdx.x][v] = x[v];
      }
    }
    rows = half;
  }
}

// Times of the piece j of n of steps [begin, end), which are counted in the order of the scan.
struct Times {
  int64_t begin, end;
  __device__ Times(const ProductProblem& p, int64_t first, int64_t last, int64_t j, int64_t n) {
    const int64_t from = first + (last - first) * j / n, to = first + (last - first) * (j + 1) / n;
    begin = p.reverse ? p.time - to : from;
    end = p.reverse ? p.time - from : to;
  }
};

// The first prefix, or all others.
template <class T, int V>
__global__ void __launch_bounds__(kProductThreads)
    look_kernel(const __grid_constant__ ProductProblem p, const __grid_constant__ ProductPlan plan,
                const __grid_constant__ Tile tile, Workspace workspace, Bound bound,
                bool is_first) {
  const Place<V> at(tile);
  int prefix = 0;
  int64_t piece = at.piece;
  if (is_first) {
    if (piece == 0 && threadIdx.x == 0) workspace.counters[at.block] = 0;
  } else {
    if (is_done<V>(p, plan, workspace, bound, tile, at, 1)) return;
    for (prefix = 1; piece >= plan.looks[prefix]; ++prefix) piece -= plan.looks[prefix];
  }
  const Times times(p, is_first ? 0 : p.prefix[prefix - 1], p.prefix[prefix], piece,
                    plan.looks[prefix]);
  Sums sums[V];
  for_each<T, V>(p, tile, at, times.begin, times.end, [&](const auto& packs, int count) {
#pragma unroll
    for (int k = 0; k < kUnroll<T, V>; ++k) {
      if (k < count) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const float size = log2_size(packs[k].v[v]);
          // Written so that a NaN stays.
          sums[v].all += size < p.least ? p.least : size;
          sums[v].growth += size < 0 ? 0 : size;
        }
      }
    }
  });
  over_rows(sums, tile, at, [](Sums x, Sums y) { return x + y; });
  if (at.row == 0 && at.reads) {
    Sums* to = workspace.sums + (plan.first_look[prefix] + piece) * tile.channels +
               at.channel(tile, at.column);
#pragma unroll
    for (int v = 0; v < V; ++v) to[v] = sums[v];
  }
}

// The product itself: beyond the range of the dtype it is infinite or zero.
template <class R>
__device__ __forceinline__ R rounded(double m, long long e) {
  const auto bounded = static_cast<int>(max(-5000ll, min(5000ll, e)));
  return static_cast<R>(scalbn(m, bounded));
}
template <class R>
__device__ __forceinline__ void store(void* to, int64_t at, Scaled<double> x) {
  static_cast<R*>(to)[at] = rounded<R>(x.m, x.e);
}
template <class R>
__device__ __forceinline__ void store(void* to, int64_t at, Scaled<Complex128> x) {
  static_cast<Complex<R>*>(to)[at] = {rounded<R>(x.m.re, x.e), rounded<R>(x.m.im, x.e)};
}

template <class W>
__device__ __forceinline__ void store(const ProductProblem& p, bool in_double, int64_t at,
                                      Scaled<W> x) {
  if (in_double) {
    store<double>(p.product, at, x);
  } else {
    store<float>(p.product, at, x);
  }
}

// What another block has written.
__device__ __forceinline__ Scaled<double> load_shared(const Scaled<double>* from) {
  return {__ldcg(&from->m), __ldcg(&from->e)};
}
__device__ __forceinline__ Scaled<Complex128> load_shared(const Scaled<Complex128>* from) {
  return {{__ldcg(&from->m.re), __ldcg(&from->m.im)}, __ldcg(&from->e)};
}

// Blocks that a multiprocessor is to hold. For three, registers are spilled from 10.0 on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kResident = 2;
#else
constexpr int kResident = 3;
#endif

template <class T, int V>
__global__ void __launch_bounds__(kProductThreads, kResident)
    product_kernel(const __grid_constant__ ProductProblem p,
                   const __grid_constant__ ProductPlan plan, const __grid_constant__ Tile tile,
                   Workspace workspace, Bound bound, bool in_double) {
  using W = Wide<T>;
  const Place<V> at(tile);
  const bool done = is_done<V>(p, plan, workspace, bound, tile, at, p.prefixes);
  if (done && at.piece > 0) return;
  if (!done) {
    const Times times(p, 0, p.time, at.piece, plan.pieces);
    Scaled<W> product[V];
    for_each<T, V>(p, tile, at, times.begin, times.end, [&](const auto& packs, int count) {
#pragma unroll
      for (int k = 0; k < kUnroll<T, V>; ++k) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (k < count) multiply(product[v], packs[k].v[v]);
          if (k % 4 == 3) normalise(product[v]);
        }
      }
    });
    const auto times_of = [](Scaled<W> x, Scaled<W> y) { return x * y; };
    over_rows(product, tile, at, times_of);
    Scaled<W>* const pieces =
        static_cast<Scaled<W>*>(workspace.products) + at.channel(tile, at.column);
    if (at.row == 0 && at.reads) {
#pragma unroll
      for (int v = 0; v < V; ++v) pieces[at.piece * tile.channels + v] = product[v];
    }

    // Whichever block is the last one puts the pieces together, in the same order.
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = atomicAdd(&workspace.counters[at.block], 1u) + 1 == plan.pieces;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
#pragma unroll
    for (int v = 0; v < V; ++v) {
      product[v] = {};
      if (at.reads) {
#pragma unroll 2
        for (int64_t k = at.row; k < plan.pieces; k += tile.rows) {
          product[v] = product[v] * load_shared(pieces + k * tile.channels + v);
        }
      }
    }
    over_rows(product, tile, at, times_of);
    if (at.row == 0 && at.reads) {
#pragma unroll
      for (int v = 0; v < V; ++v) store(p, in_double, at.channel(tile, at.column) + v, product[v]);
    }
    __syncthreads();
  }
  if (static_cast<int>(threadIdx.x) < at.count) {
    const int64_t channel = at.channel(tile, at.first + threadIdx.x);
    const int found = reach(p, plan, workspace.sums, bound, tile.channels, channel, p.prefixes);
    p.reach[channel] = found;
    if (found < p.prefixes) store(p, in_double, channel, Scaled<W>{W(0)});
  }
}

bool aligned(const ProductProblem& p, int vector) {
  return p.inner % vector == 0 &&
         reinterpret_cast<uintptr_t>(p.a) % static_cast<uintptr_t>(vector * byte_size(p.dtype)) ==
             0;
}

template <class T, int V>
cudaError_t launch_tiles(const ProductProblem& p, const ProductPlan& plan,
                         const Workspace& workspace, const Bound& bound, cudaStream_t stream) {
  Tile tile{p.outer, p.inner, p.outer * p.inner, 0, 0, 0};
  const int64_t columns = p.inner / V;
  tile.groups = divide_up(columns, kProductLanes);
  tile.lanes = static_cast<int>(divide_up(columns, tile.groups));
  tile.rows = kProductThreads / tile.lanes;
  const auto blocks = [&](int64_t pieces) { return pieces * p.outer * tile.groups; };
  const int64_t others = plan.first_look[p.prefixes] - plan.looks[0];
  if (blocks(std::max(others, plan.pieces)) > INT32_MAX) return cudaErrorInvalidConfiguration;
  const auto grid = [&](int64_t pieces) { return dim3(static_cast<unsigned>(blocks(pieces))); };
  look_kernel<T, V>
      <<<grid(plan.looks[0]), kProductThreads, 0, stream>>>(p, plan, tile, workspace, bound, true);
  if (others > 0) {
    look_kernel<T, V>
        <<<grid(others), kProductThreads, 0, stream>>>(p, plan, tile, workspace, bound, false);
  }
  product_kernel<T, V><<<grid(plan.pieces), kProductThreads, 0, stream>>>(
      p, plan, tile, workspace, bound, is_double(p.state));
  return cudaGetLastError();
}

template <class T>
cudaError_t launch(const ProductProblem& p, const ProductPlan& plan, const Workspace& workspace,
                   const Bound& bound, cudaStream_t stream) {
  constexpr int kMost = product_vector(sizeof(T));
  if constexpr (kMost > 1) {
    if (aligned(p, kMost)) return launch_tiles<T, kMost>(p, plan, workspace, bound, stream);
  }
  return launch_tiles<T, 1>(p, plan, workspace, bound, stream);
}

}  // namespace time_product

cudaError_t launch_product(const ProductProblem& p, void* workspace, cudaStream_t stream) {
  const ProductPlan plan = plan_product(p.outer, p.time, p.inner, p.dtype, p.prefixes);
  auto* const bytes = static_cast<unsigned char*>(workspace);
  const time_product::Workspace places{
      reinterpret_cast<unsigned*>(bytes),
      reinterpret_cast<time_product::Sums*>(bytes + plan.sums_offset),
      bytes + plan.products_offset};
  // log2 of the smallest normal number, and of the square root of the largest number.
  const time_product::Bound bound =
      is_double(p.state) ? time_product::Bound{-1022, 512} : time_product::Bound{-126, 64};
  switch (p.dtype) {
    case DType::kF16:
      return time_product::launch<Float16>(p, plan, places, bound, stream);
    case DType::kBF16:
      return time_product::launch<BFloat16>(p, plan, places, bound, stream);
    case DType::kF64:
      return time_product::launch<double>(p, plan, places, bound, stream);
    case DType::kC64:
      return time_product::launch<Complex64>(p, plan, places, bound, stream);
    case DType::kC128:
      return time_product::launch<Complex128>(p, plan, places, bound, stream);
    case DType::kF32:
      break;
  }
  return time_product::launch<float>(p, plan, places, bound, stream);
}

}  // namespace jax_scan
