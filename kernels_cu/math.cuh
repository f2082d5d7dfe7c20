// SPDX-License-Identifier: MIT
// The mathematical functions of the kernels, for one float or double; some for a pair of floats.
//
// The CPU build replaces this file: there V is a SIMD vector.
#pragma once
#include "pairs.cuh"

namespace math {

using ::erfc;
using ::fabs;
using ::tanh;

// In group norms with results of 16 bits, the hardware's approximations are accurate enough: 2^v
// within 2 ulp, 1 / v within 1 ulp. e^v = 2^(v log2 e) also has the rounding error of v log2 e.
#ifndef APPROXIMATE
#define APPROXIMATE false
#endif
inline constexpr bool approximate = APPROXIMATE;

template <class V>
__device__ inline V exp(V v) {
  if constexpr (approximate && sizeof(V) == sizeof(float)) return __expf(v);
  return ::exp(v);
}

template <class V>
__device__ inline V constant(double v) {
  return static_cast<V>(v);
}

template <class V>
__device__ inline V select(bool condition, V yes, V no) {
  return condition ? yes : no;
}

// The maximum, or the minimum, of v and a bound. NaN stays NaN.
template <class V>
__device__ inline V at_least(V v, double bound) {
  return v < static_cast<V>(bound) ? static_cast<V>(bound) : v;
}
template <class V>
__device__ inline V at_most(V v, double bound) {
  return v > static_cast<V>(bound) ? static_cast<V>(bound) : v;
}

// Returns e * s, where s = 1 / (1 + e): this is 1 - s. If e is infinite, e * s would be NaN, and
// both functions return 0. For float, the instruction's saturation turns NaN into 0.
__device__ inline float saturating_product(float e, float s) {
  asm("mul.ftz.sat.f32 %0, %1, %2;" : "=f"(e) : "f"(e), "f"(s));
  return e;
}
__device__ inline double saturating_product(double e, double s) {
  return fmin(e, 0x1.fffffffffffffp1023) * s;
}

// Returns 1 / v within 1 ulp, for v from 1 on; for a float above 2^126 it returns 0, which is the
// hardware's approximation. CUDA's division would contain a subroutine for extreme values.
__device__ inline float reciprocal(float v) {
  const float approximation = __fdividef(1.0f, v);
  if constexpr (approximate) return approximation;
  const float refined = fma(fma(-v, approximation, 1.0f), approximation, approximation);
  return v < 0x1p126f ? refined : approximation;
}
__device__ inline double reciprocal(double v) { return 1.0 / v; }

// s(v) = 1 / (1 + e^-v), the complement 1 - s(v), and v clamped to bounds beyond which s(v) or the
// complement is 0. The complement is computed as e^-v s(v), so where s(v) is 0 it is 0, not 1.
template <class V>
struct Logistic {
  V value, complement, bounded;
};
template <class V>
__device__ inline Logistic<V> logistic(V v) {
  const V e = exp(-v), value = reciprocal(1.0f + e);
  return {value, saturating_product(e, value), at_most(at_least(v, -1000), 1000)};
}

// Returns 1 / sqrt(v), rounded about once. For float, a Newton step refines the hardware's
// approximation; `lost` is the rounding error of `product`. If v is 0 or infinite, the step is NaN;
// the approximation is exact.
__device__ inline float reciprocal_root(float v) {
  const float approximation = rsqrtf(v), product = v * approximation;
  const float lost = fma(v, approximation, -product);
  const float rest = fma(-lost, approximation, fma(-product, approximation, 1.0f));
  const float refined = fma(0.5f * approximation, rest, approximation);
  return rest == rest ? refined : approximation;
}
__device__ inline double reciprocal_root(double v) { return 1.0 / sqrt(v); }
__device__ inline FloatPair reciprocal_root(FloatPair v) {
  return {reciprocal_root(v.low), reciprocal_root(v.high)};
}

// Returns sum / count, rounded once: `rest`, the remainder, corrects the rounded quotient. An
// infinite quotient or NaN is not corrected. Compilers compute 1 / count if they know the count.
template <class C>
__device__ inline C divided(C sum, C count) {
  const C inverse = C(1) / count, quotient = sum * inverse;
  const C rest = fma(-quotient, count, sum);
  return rest == rest ? fma(rest, inverse, quotient) : quotient;
}
__device__ inline FloatPair divided(FloatPair sum, float count) {
  return {divided(sum.low, count), divided(sum.high, count)};
}

// Returns a variance that rounding may have made negative. NaN stays NaN.
template <class C>
__device__ inline C not_negative(C v) {
  return v < 0 ? 0 : v;
}
__device__ inline FloatPair not_negative(FloatPair v) {
  return {not_negative(v.low), not_negative(v.high)};
}

// Divides by one number from 0 on. By Markstein's theorem, `found` is the quotient rounded once if
// `near` is within an ulp of it; near the numbers at which rounding to 5 bits changes its result,
// all divisors were verified. `lost` is exact unless the quotient is so small that its code is 0.
//
// Unless `is_any`, the divisor is at least 2^-20, and quotients of finite numbers are finite. Else
// `power` makes the inverse a normal number, and `found` is NaN if the quotient is infinite or NaN.
template <class C, bool is_any>
struct Divisor {
  static constexpr bool has_power = is_any && sizeof(C) == sizeof(float);
  C power, divisor, inverse;

  __device__ explicit Divisor(C given) : divisor(given) {
    if constexpr (has_power) {
      power = given < C(0x1p-64) ? C(0x1p64) : given > C(0x1p64) ? C(0x1p-64) : C(1);
      divisor *= power;
    }
    inverse = 1 / divisor;
    if (!is_any && inverse == 0) divisor = 0;  // it is infinite: quotients are 0
  }
  template <class V>
  __device__ V quotient(V v) const {
    if constexpr (has_power) v *= power;
    const V near = v * inverse, lost = fma(near, divisor, -v), found = fma(-lost, inverse, near);
    if constexpr (is_any) return unless_nan(found, near);
    return found;
  }
};

}  // namespace math
