// Element types: their storage, and their conversion to and from the state's type.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "core/affine.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace jax_scan {

enum class DType : uint8_t { kF16, kBF16, kF32, kF64, kC64, kC128 };

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
using Complex64 = Complex<float>;
using Complex128 = Complex<double>;

JAX_SCAN_HD constexpr int byte_size(DType t) {
  switch (t) {
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kF32:
      return 4;
    case DType::kF64:
    case DType::kC64:
      return 8;
    case DType::kC128:
      return 16;
  }
  return 0;
}

constexpr const char* name(DType t) {
  switch (t) {
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF32:
      return "float32";
    case DType::kF64:
      return "float64";
    case DType::kC64:
      return "complex64";
    case DType::kC128:
      return "complex128";
  }
  return "?";
}

template <class T>
struct Tag {
  using type = T;
};

// Calls f(Tag<T>{}) with the storage type T of `t`: the one place where a run-time dtype becomes a
// type. S is the type of the state; only the types that a state of type S may be loaded from and
// stored to are compiled, and `readable` says which these are.
template <class S, class F>
JAX_SCAN_HD decltype(auto) visit(DType t, F&& f) {
  constexpr bool is_double = sizeof(Real<S>) == 8;
  constexpr bool is_complex = sizeof(S) != sizeof(Real<S>);
  switch (t) {
    case DType::kF16:
      return f(Tag<Float16>{});
    case DType::kBF16:
      return f(Tag<BFloat16>{});
    case DType::kF64:
      if constexpr (is_double) return f(Tag<double>{});
      break;
    case DType::kC64:
      if constexpr (is_complex) return f(Tag<Complex64>{});
      break;
    case DType::kC128:
      if constexpr (is_double && is_complex) return f(Tag<Complex128>{});
      break;
    case DType::kF32:
      break;
  }
  return f(Tag<float>{});
}

constexpr bool is_complex(DType t) { return t == DType::kC64 || t == DType::kC128; }
constexpr bool is_double(DType t) { return t == DType::kF64 || t == DType::kC128; }
constexpr bool readable(DType t, DType state) {
  return (is_complex(state) || !is_complex(t)) && (is_double(state) || !is_double(t));
}

namespace internal {

template <class To, class From>
JAX_SCAN_HD To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof(To));
  return y;
}

// IEEE half to single. Subnormals go through an integer, as XLA runs CPU code with denormals taken
// for zero.
JAX_SCAN_HD float half_bits_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  const uint32_t subnormal =
      bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t finite = magnitude < 0x400u ? subnormal : normal;
  return bit_cast<float>((magnitude >= 0x7c00u ? special : finite) | sign);
}

// Single to IEEE half, to nearest even. For results below 2^-14 the addition of 0.5 aligns the
// mantissa so that the adder rounds; above, the rounding bias is added to the bits.
JAX_SCAN_HD uint16_t float_to_half_bits(float x) {
  const uint32_t all = bit_cast<uint32_t>(x);
  const uint32_t sign = (all >> 16) & 0x8000u;
  const uint32_t u = all & 0x7fffffffu;
  const uint32_t tiny = bit_cast<uint32_t>(bit_cast<float>(u) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13;
  uint32_t h = u < 0x38800000u ? tiny : normal;
  h = u >= 0x477ff000u ? 0x7c00u : h;
  h = u > 0x7f800000u ? 0x7e00u : h;
  return static_cast<uint16_t>(h | sign);
}

JAX_SCAN_HD uint16_t float_to_bfloat_bits(float x) {
  const uint32_t u = bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (u >> 16) | 0x40u;
  return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

}  // namespace internal

// Reads a stored element in the state's type S.
template <class S, class T>
JAX_SCAN_HD S load_as(T x) {
  return S(static_cast<Real<S>>(x));
}
template <class S>
JAX_SCAN_HD S load_as(Float16 x) {
#if defined(__CUDA_ARCH__)
  return S(__half2float(__ushort_as_half(x.bits)));
#else
  return S(internal::half_bits_to_float(x.bits));
#endif
}
template <class S>
JAX_SCAN_HD S load_as(BFloat16 x) {
  return S(internal::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16));
}
template <class S, class T>
JAX_SCAN_HD S load_as(Complex<T> x) {
  return S(static_cast<Real<S>>(x.re), static_cast<Real<S>>(x.im));
}

// Rounds a state once to the stored type T; a real T takes the real part of a complex state.
template <class T>
struct Store {
  template <class S>
  JAX_SCAN_HD static T from(S x) {
    return static_cast<T>(real(x));
  }
  template <class R>
  JAX_SCAN_HD static R real(Complex<R> x) {
    return x.re;
  }
  JAX_SCAN_HD static float real(float x) { return x; }
  JAX_SCAN_HD static double real(double x) { return x; }
};
template <>
struct Store<Float16> {
  template <class S>
  JAX_SCAN_HD static Float16 from(S x) {
    const float y = Store<float>::from(x);
#if defined(__CUDA_ARCH__)
    return {__half_as_ushort(__float2half_rn(y))};
#else
    return {internal::float_to_half_bits(y)};
#endif
  }
};
template <>
struct Store<BFloat16> {
  template <class S>
  JAX_SCAN_HD static BFloat16 from(S x) {
    const float y = Store<float>::from(x);
#if defined(__CUDA_ARCH__)
    return {__bfloat16_as_ushort(__float2bfloat16_rn(y))};
#else
    return {internal::float_to_bfloat_bits(y)};
#endif
  }
};
template <class R>
struct Store<Complex<R>> {
  JAX_SCAN_HD static Complex<R> from(float x) { return {static_cast<R>(x)}; }
  JAX_SCAN_HD static Complex<R> from(double x) { return {static_cast<R>(x)}; }
  template <class Q>
  JAX_SCAN_HD static Complex<R> from(Complex<Q> x) {
    return {static_cast<R>(x.re), static_cast<R>(x.im)};
  }
};
template <class T, class S>
JAX_SCAN_HD T store_as(S x) {
  return Store<T>::from(x);
}

}  // namespace jax_scan
