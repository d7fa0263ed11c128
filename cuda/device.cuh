// What all kernels need: reading and writing runs of steps, and the arithmetic of one step.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/problem.h"

namespace jax_scan {

// The compute capability that is compiled for; what the host sees of it does not matter. Minor ones
// must make no difference from 8.0 on: 8.6 and 8.9 share its PTX (CMakeLists.txt).
#ifdef __CUDA_ARCH__
inline constexpr int kMajor = __CUDA_ARCH__ / 100;
#else
inline constexpr int kMajor = 0;
#endif

// Lets a kernel that needs compute capability 9.0 have so much shared memory: the same for every
// call, as another thread may be launching it with less. Of code for an older GPU, which this one
// runs, too, such a kernel is empty: cudaErrorNotSupported.
template <class Kernel>
cudaError_t prepare_for_hopper(Kernel* kernel, int shared_bytes) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  if (attributes.ptxVersion < 90) return cudaErrorNotSupported;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

// The sizes that follow from the direction of the walk.
struct Walk {
  int64_t time;
  bool descending;
  int past;  // from a time to the one before it in the recurrence of h: t - past
  __device__ explicit Walk(const Problem& p)
      : time(p.time), descending(p.descending()), past(p.reverse ? -1 : 1) {}
  // The time of the walk's step s.
  __device__ int64_t at(int64_t s) const { return descending ? time - 1 - s : s; }
  __device__ int step() const { return descending ? -1 : 1; }
  // The walk's step at which the recurrence of h begins.
  __device__ int64_t first_step(Op op) const { return op == Op::kCotangent ? time - 1 : 0; }
};

// A barrier of some of the block's warps. arrive() announces and goes on; what was written before
// it is seen behind the wait() that it completes.
class NamedBarrier {
 public:
  __device__ NamedBarrier(int id, int threads) : id_(id), threads_(threads) {}
  __device__ __forceinline__ void wait() const {
    asm volatile("bar.sync %0, %1;" ::"r"(id_), "r"(threads_) : "memory");
  }
  __device__ __forceinline__ void arrive() const {
    asm volatile("bar.arrive %0, %1;" ::"r"(id_), "r"(threads_) : "memory");
  }

 private:
  int id_;
  int threads_;
};

// A value as 32-bit words, for instructions that move words.
template <class T>
struct Words {
  static constexpr int kCount = sizeof(T) / 4;
  uint32_t word[kCount];
};

// A value of 8 or 16 bytes that blocks tell each other: read and written in one piece, it needs no
// fence between its parts.
template <class T>
__device__ __forceinline__ T load_whole(const T* place) {
  Words<T> w;
  if constexpr (sizeof(T) == 8) {
    asm volatile("{ .reg .b64 v; ld.relaxed.gpu.global.b64 v, [%2]; mov.b64 {%0, %1}, v; }"
                 : "=r"(w.word[0]), "=r"(w.word[1])
                 : "l"(place)
                 : "memory");
  } else {
    static_assert(sizeof(T) == 16);
    asm volatile(
        "{ .reg .b128 v; .reg .b64 lo, hi;\n\t"
        "ld.relaxed.gpu.global.b128 v, [%4];\n\t"
        "mov.b128 {lo, hi}, v;\n\t"
        "mov.b64 {%0, %1}, lo; mov.b64 {%2, %3}, hi; }"
        : "=r"(w.word[0]), "=r"(w.word[1]), "=r"(w.word[2]), "=r"(w.word[3])
        : "l"(place)
        : "memory");
  }
  return internal::bit_cast<T>(w);
}

template <class T>
__device__ __forceinline__ void store_whole(T* place, T value) {
  const Words<T> w = internal::bit_cast<Words<T>>(value);
  if constexpr (sizeof(T) == 8) {
    asm volatile(
        "{ .reg .b64 v; mov.b64 v, {%1, %2}; st.relaxed.gpu.global.b64 [%0], v; }" ::"l"(place),
        "r"(w.word[0]), "r"(w.word[1])
        : "memory");
  } else {
    static_assert(sizeof(T) == 16);
    asm volatile(
        "{ .reg .b128 v; .reg .b64 lo, hi;\n\t"
        "mov.b64 lo, {%1, %2}; mov.b64 hi, {%3, %4};\n\t"
        "mov.b128 v, {lo, hi};\n\t"
        "st.relaxed.gpu.global.b128 [%0], v; }" ::"l"(place),
        "r"(w.word[0]), "r"(w.word[1]), "r"(w.word[2]), "r"(w.word[3])
        : "memory");
  }
}

template <class T>
__device__ __forceinline__ T shuffle_up(T value, int delta) {
  Words<T> w = internal::bit_cast<Words<T>>(value);
#pragma unroll
  for (int k = 0; k < Words<T>::kCount; ++k) {
    w.word[k] = __shfl_up_sync(0xffffffffu, w.word[k], delta);
  }
  return internal::bit_cast<T>(w);
}

template <class T>
__device__ __forceinline__ T shuffle_down(T value, int delta) {
  Words<T> w = internal::bit_cast<Words<T>>(value);
#pragma unroll
  for (int k = 0; k < Words<T>::kCount; ++k) {
    w.word[k] = __shfl_down_sync(0xffffffffu, w.word[k], delta);
  }
  return internal::bit_cast<T>(w);
}

template <class T>
__device__ __forceinline__ T shuffle_from(T value, int lane) {
  Words<T> w = internal::bit_cast<Words<T>>(value);
#pragma unroll
  for (int k = 0; k < Words<T>::kCount; ++k) {
    w.word[k] = __shfl_sync(0xffffffffu, w.word[k], lane);
  }
  return internal::bit_cast<T>(w);
}

// x y, rounded, and what rounding has taken from it. None of the operations may be fused but those
// that are asked for.
template <class T>
struct Product {
  T rounded, lost;
};
__device__ __forceinline__ float times(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double times(double x, double y) { return __dmul_rn(x, y); }
__device__ __forceinline__ float plus(float x, float y) { return __fadd_rn(x, y); }
__device__ __forceinline__ double plus(double x, double y) { return __dadd_rn(x, y); }
__device__ __forceinline__ Product<float> product(float x, float y) {
  const float p = times(x, y);
  return {p, mul_add(x, y, -p)};
}
__device__ __forceinline__ Product<double> product(double x, double y) {
  const double p = times(x, y);
  return {p, mul_add(x, y, -p)};
}
// x1 y1 + x2 y2
template <class R>
__device__ __forceinline__ Product<R> sum_of_products(R x1, R y1, R x2, R y2) {
  const Product<R> u = product(x1, y1), v = product(x2, y2);
  const R sum = plus(u.rounded, v.rounded), of_v = plus(sum, -u.rounded);
  const R lost = plus(plus(u.rounded, -plus(sum, -of_v)), plus(v.rounded, -of_v));
  return {sum, plus(plus(u.lost, v.lost), lost)};
}
template <class R>
__device__ __forceinline__ Product<Complex<R>> product(Complex<R> x, Complex<R> y) {
  const Product<R> re = sum_of_products(x.re, y.re, -x.im, y.im);
  const Product<R> im = sum_of_products(x.re, y.im, x.im, y.re);
  return {{re.rounded, im.rounded}, {re.lost, im.lost}};
}

// The map h -> (a + lost) h + b of several steps. `lost` is what rounding has taken from the
// product of their factors. Without it composed maps are less exact than the steps: factors that
// are alike, or all close to 1, round the same way time after time, and the errors add up.
template <class T>
struct Composed {
  T a = T(1);
  T lost = T(0);
  T b = T(0);
  // As one map, rounded once.
  __device__ __forceinline__ Affine<T> rounded() const { return {a + lost, b}; }
};
template <class T>
__device__ __forceinline__ Composed<T> compose(Composed<T> second, Composed<T> first) {
  const Product<T> p = product(second.a, first.a);
  return {p.rounded, mul_add(second.a, first.lost, mul_add(second.lost, first.a, p.lost)),
          mul_add(second.a, first.b, mul_add(second.lost, first.b, second.b))};
}
template <class T>
__device__ __forceinline__ T apply(Composed<T> map, T h) {
  return mul_add(map.a, h, mul_add(map.lost, h, map.b));
}
template <class T>
__device__ __forceinline__ Composed<T> shuffle_up(Composed<T> map, int delta) {
  return {shuffle_up(map.a, delta), shuffle_up(map.lost, delta), shuffle_up(map.b, delta)};
}

// What no partial product (a) and no partial result (b) of two maps in a row exceeds, from what
// holds for each of them. Sums, so that a NaN is kept: then nothing is certain.
template <class S, class R>
__device__ __forceinline__ Affine<R> bound_of_both(Affine<R> second, Composed<S> first,
                                                   Affine<R> of_first) {
  return {of_first.a + magnitude(first.a) * second.a,
          of_first.b + (magnitude(first.b) * second.a + second.b)};
}

// The larger one of two bounds. A NaN is not larger: what it spoils stays spoilt without us. But a
// product of complex numbers may be one because it has overflowed, and that must be told.
template <class S>
__device__ __forceinline__ Real<S> larger(Real<S> x, Real<S> y) {
  if constexpr (!std::is_same_v<S, Real<S>>) {
    return y <= x || x != x ? x : y;
  } else if constexpr (sizeof(S) == 4) {
    return fmaxf(x, y);
  } else {
    return fmax(x, y);
  }
}

// The least of what a warp's lanes have.
__device__ __forceinline__ int least_of_warp(int value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_min_sync(0xffffffffu, value);
#else
  for (int delta = 16; delta > 0; delta /= 2) {
    value = min(value, __shfl_xor_sync(0xffffffffu, value, delta));
  }
  return value;
#endif
}

// The bits that any of a warp's lanes has.
__device__ __forceinline__ uint32_t bits_of_warp(uint32_t value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_or_sync(0xffffffffu, value);
#else
  for (int delta = 16; delta > 0; delta /= 2) {
    value |= __shfl_xor_sync(0xffffffffu, value, delta);
  }
  return value;
#endif
}

// A map may be applied to such a state.
template <class S>
__device__ __forceinline__ bool state_within(S s) {
  return magnitude(s) <= Bounds<Real<S>>::state;
}

template <class T>
inline constexpr DType kDType = DType::kF32;
template <>
inline constexpr DType kDType<Float16> = DType::kF16;
template <>
inline constexpr DType kDType<BFloat16> = DType::kBF16;
template <>
inline constexpr DType kDType<double> = DType::kF64;
template <>
inline constexpr DType kDType<Complex64> = DType::kC64;
template <>
inline constexpr DType kDType<Complex128> = DType::kC128;

// The type of the state for operands of type T.
template <class T>
using StateOf = std::conditional_t<sizeof(T) == 2, float, T>;

template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};

// Elements in a 16-byte access.
template <class T>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

// Loads `count` (at most N) elements `stride` apart, the r-th from data[r * stride], into `out`;
// the rest keep their values. A whole run of neighbours is read in 16-byte accesses.
template <class S, int N, class T>
__device__ __forceinline__ void load_run(S (&out)[N], const T* data, int64_t stride, int count) {
  if constexpr (N % kVector<T> == 0) {
    if (count == N && (stride == 1 || stride == -1)) {
      const T* low = stride == 1 ? data : data - (N - 1);
      if (reinterpret_cast<uintptr_t>(low) % 16 == 0) {
        Pack<T, kVector<T>> packs[N / kVector<T>];
#pragma unroll
        for (int k = 0; k < N / kVector<T>; ++k) {
          packs[k] = reinterpret_cast<const Pack<T, kVector<T>>*>(low)[k];
        }
#pragma unroll
        for (int r = 0; r < N; ++r) {
          const S up = load_as<S>(packs[r / kVector<T>].v[r % kVector<T>]);
          const int q = N - 1 - r;
          const S down = load_as<S>(packs[q / kVector<T>].v[q % kVector<T>]);
          out[r] = stride == 1 ? up : down;
        }
        return;
      }
    }
  }
  if (stride == 0) {
    const S value = count > 0 ? load_as<S>(*data) : S(0);
#pragma unroll
    for (int r = 0; r < N; ++r) out[r] = r < count ? value : out[r];
  } else if (count == N) {
#pragma unroll
    for (int r = 0; r < N; ++r) out[r] = load_as<S>(data[r * stride]);
  } else {
#pragma unroll
    for (int r = 0; r < N; ++r) {
      if (r < count) out[r] = load_as<S>(data[r * stride]);
    }
  }
}

template <class S, int N, class T>
__device__ __forceinline__ void store_run(const S (&in)[N], T* data, int64_t stride, int count) {
  if constexpr (N % kVector<T> == 0) {
    if (count == N && (stride == 1 || stride == -1)) {
      T* low = stride == 1 ? data : data - (N - 1);
      if (reinterpret_cast<uintptr_t>(low) % 16 == 0) {
#pragma unroll
        for (int k = 0; k < N / kVector<T>; ++k) {
          Pack<T, kVector<T>> pack;
#pragma unroll
          for (int j = 0; j < kVector<T>; ++j) {
            const int r = k * kVector<T> + j;
            pack.v[j] = store_as<T>(stride == 1 ? in[r] : in[N - 1 - r]);
          }
          reinterpret_cast<Pack<T, kVector<T>>*>(low)[k] = pack;
        }
        return;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < N; ++r) {
    if (r < count) data[r * stride] = store_as<T>(in[r]);
  }
}

// The same for an operand whose type is known only at run time, at (outer o, inner i), times t, t +
// direction, ...
template <class S, int N>
__device__ __forceinline__ void load_run(S (&out)[N], const Input& in, int64_t o, int64_t i,
                                         int64_t t, int direction, int count) {
  const int64_t offset = in.at.outer_offset(o) + in.at.inner_offset(i) + t * in.at.time_stride;
  visit<S>(in.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    load_run(out, static_cast<const T*>(in.data) + offset, direction * in.at.time_stride, count);
  });
}

template <class S>
__device__ __forceinline__ S load_one(const Input& in, int64_t o, int64_t i, int64_t t) {
  S value[1];
  load_run<S, 1>(value, in, o, i, t, 1, 1);
  return value[0];
}

template <class S>
__device__ __forceinline__ void store_one(const Output& out, int64_t index, S value) {
  visit<S>(out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    static_cast<T*>(out.data)[index] = store_as<T>(value);
  });
}

// What one step reads; for a tangent, x holds da h_prev + db.
template <class S>
struct Step {
  S a;
  S x;
  S h;  // h_prev; cotangent only
  bool cut;
};

// What one step writes besides the state.
template <class S>
struct Written {
  S y;
  S da_out;  // cotangent only
};

// One step of the recurrence (the formulas stand in core/problem.h). A cut is a select: the past
// may be anything.
template <Op kOp, class S>
__device__ __forceinline__ Written<S> advance(S& s, const Step<S>& in) {
  if constexpr (kOp == Op::kCotangent) {
    const S u = in.x + s;
    s = in.cut ? S(0) : in.a * u;
    return {u, in.cut ? S(0) : u * in.h};
  } else {
    s = in.cut ? in.x : mul_add(in.a, s, in.x);
    return {s, S(0)};
  }
}

// What a step adds to the bound of partial results, s being the state after it. Of a cotangent u
// counts as well: it may overflow, which a tiny factor behind it would hide.
template <Op kOp, class S>
__device__ __forceinline__ Real<S> reach(const S& s, const Written<S>& out) {
  if constexpr (kOp == Op::kCotangent) {
    return larger<S>(magnitude(s), magnitude(out.y));
  } else {
    return magnitude(s);
  }
}

// The step's coefficient: d s_new / d s_old.
template <class S>
__device__ __forceinline__ S coefficient(const Step<S>& in) {
  return in.cut ? S(0) : in.a;
}

}  // namespace jax_scan
