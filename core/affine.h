// The scan's algebra, for host and device.
//
// A step h -> a h + b is an affine map. Maps compose associatively,
//     (a2, b2) after (a1, b1) = (a2 a1, a2 b1 + b2),
// which is all the parallelism that a linear recurrence has.
#pragma once

#include <cmath>

#if defined(__CUDACC__)
#define JAX_SCAN_HD __host__ __device__ __forceinline__
#else
#define JAX_SCAN_HD inline
#endif

namespace jax_scan {

template <class T>
struct Complex {
  T re = 0;
  T im = 0;
  Complex() = default;
  JAX_SCAN_HD constexpr Complex(T real, T imag = 0) : re(real), im(imag) {}
};

template <class T>
JAX_SCAN_HD Complex<T> operator+(Complex<T> x, Complex<T> y) {
  return {x.re + y.re, x.im + y.im};
}

template <class T>
JAX_SCAN_HD Complex<T> operator*(Complex<T> x, Complex<T> y) {
  return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
}

// a x + b; one rounding per real operation where the target has a fused multiply-add.
JAX_SCAN_HD float mul_add(float a, float x, float b) {
#if defined(__CUDA_ARCH__)
  return fmaf(a, x, b);
#else
  return a * x + b;
#endif
}

JAX_SCAN_HD double mul_add(double a, double x, double b) {
#if defined(__CUDA_ARCH__)
  return fma(a, x, b);
#else
  return a * x + b;
#endif
}

template <class T>
JAX_SCAN_HD Complex<T> mul_add(Complex<T> a, Complex<T> x, Complex<T> b) {
  return {mul_add(a.re, x.re, mul_add(-a.im, x.im, b.re)),
          mul_add(a.re, x.im, mul_add(a.im, x.re, b.im))};
}

// The largest component's absolute value.
JAX_SCAN_HD float magnitude(float x) { return fabsf(x); }
JAX_SCAN_HD double magnitude(double x) { return fabs(x); }
template <class T>
JAX_SCAN_HD T magnitude(Complex<T> x) {
  const T re = magnitude(x.re), im = magnitude(x.im);
  // Written so that a NaN in either component wins.
  return re > im || re != re ? re : im;
}

template <class T>
struct RealOf {
  using type = T;
};
template <class T>
struct RealOf<Complex<T>> {
  using type = T;
};
template <class T>
using Real = typename RealOf<T>::type;

// The map h -> a h + b.
template <class T>
struct Affine {
  T a = T(1);
  T b = T(0);
};

template <class T>
JAX_SCAN_HD Affine<T> compose(Affine<T> second, Affine<T> first) {
  return {second.a * first.a, mul_add(second.a, first.b, second.b)};
}

template <class T>
JAX_SCAN_HD T apply(Affine<T> map, T h) {
  return mul_add(map.a, h, map.b);
}

// How large the pieces may get while A h + B still stands for the step-by-step recurrence: within
// these bounds no state of the recurrence overflows, and no product of factors does. A NaN compares
// false, so it is never within.
template <class R>
struct Bounds;
template <>
struct Bounds<float> {
  static constexpr float product = 0x1p40f, state = 0x1p80f, local = 0x1p100f;
};
template <>
struct Bounds<double> {
  static constexpr double product = 0x1p300, state = 0x1p600, local = 0x1p800;
};

}  // namespace jax_scan
