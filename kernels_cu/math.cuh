// SPDX-License-Identifier: MIT
// The mathematical functions of the kernels, for one float or double.
//
// Most are CUDA's own. The CPU build replaces this file: there V is a SIMD vector.
#pragma once

namespace math {

using ::erfc;
using ::fabs;
using ::tanh;

// For results of 16 bits the hardware's approximations are accurate enough: 2^v is within 2 ulp,
// and 1 / v within 1 ulp. An exponential also has the error of rounding its argument.
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

// Returns e * s. It is 1 - s if s = 1 / (1 + e), and 0 if e is infinite: saturation makes NaN 0.
__device__ inline float saturating_product(float e, float s) {
  asm("mul.ftz.sat.f32 %0, %1, %2;" : "=f"(e) : "f"(e), "f"(s));
  return e;
}
__device__ inline double saturating_product(double e, double s) {
  return fmin(e, 0x1.fffffffffffffp1023) * s;
}

// Returns 1 / v within 1 ulp, for v from 1 to infinity: an approximation, which is 0 from 2^126 on,
// and one Newton step. CUDA's division has a subroutine for values that do not occur here.
__device__ inline float reciprocal(float v) {
  const float approximation = __fdividef(1.0f, v);
  if constexpr (approximate) return approximation;
  const float refined = fma(fma(-v, approximation, 1.0f), approximation, approximation);
  return v < 0x1p126f ? refined : approximation;
}
__device__ inline double reciprocal(double v) { return 1.0 / v; }

// s(v) = 1 / (1 + e^-v), the complement 1 - s(v), and v clamped to bounds beyond which s(v) or the
// complement is 0. The complement is a multiple of s(v), so it is 0 where s(v) is 0.
template <class V>
struct Logistic {
  V value, complement, bounded;
};
template <class V>
__device__ inline Logistic<V> logistic(V v) {
  const V e = exp(-v), value = reciprocal(1.0f + e);
  return {value, saturating_product(e, value), at_most(at_least(v, -1000), 1000)};
}

// Returns 1 / sqrt(v), rounded about once: the hardware's approximation and a Newton step with the
// rounding error of the product. At zero and infinity the approximation is exact and the step NaN.
__device__ inline float reciprocal_root(float v) {
  const float approximation = rsqrtf(v), product = v * approximation;
  const float lost = fma(v, approximation, -product);
  const float rest = fma(-lost, approximation, fma(-product, approximation, 1.0f));
  const float refined = fma(0.5f * approximation, rest, approximation);
  return rest == rest ? refined : approximation;
}
__device__ inline double reciprocal_root(double v) { return 1.0 / sqrt(v); }

// Returns sum / count, rounded once, if the compiler knows the count: the remainder corrects the
// rounded quotient. Infinity and NaN stay as they are.
template <class C>
__device__ inline C divided(C sum, C count) {
  const C inverse = C(1) / count, quotient = sum * inverse;
  const C rest = fma(-quotient, count, sum);
  return rest == rest ? fma(rest, inverse, quotient) : quotient;
}

}  // namespace math
