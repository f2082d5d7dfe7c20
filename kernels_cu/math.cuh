// SPDX-License-Identifier: MIT
// The mathematical functions of the kernels, for one float or double.
//
// Those of activations.cuh are CUDA's own but for the three small ones. The CPU build replaces this
// file: there their V is a SIMD vector.
#pragma once

namespace math {

using ::erfc;
using ::fabs;
using ::tanh;

// Where results have 16 bits, the hardware's approximations serve: 2^v within 2 ulp, of a v whose
// rounding moves it as that of any exponential's argument does, and 1 / v within 1 ulp.
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

// Not below a bound, or not above it; NaN stays NaN.
template <class V>
__device__ inline V at_least(V v, double bound) {
  return v < static_cast<V>(bound) ? static_cast<V>(bound) : v;
}
template <class V>
__device__ inline V at_most(V v, double bound) {
  return v > static_cast<V>(bound) ? static_cast<V>(bound) : v;
}

// e * s, where s = 1 / (1 + e): 0 if e is infinite. Saturation makes NaN 0, too.
__device__ inline float share(float e, float s) {
  asm("mul.ftz.sat.f32 %0, %1, %2;" : "=f"(e) : "f"(e), "f"(s));
  return e;
}
__device__ inline double share(double e, double s) { return fmin(e, 0x1.fffffffffffffp1023) * s; }

// 1 / v for v from 1 to infinity. The division of CUDA calls a subroutine for the sake of the
// values that cannot occur here; this is its first approximation, 0 from 2^126 on, and one step of
// Newton's, within 1 ulp.
__device__ inline float reciprocal(float v) {
  const float approximation = __fdividef(1.0f, v);
  if constexpr (approximate) return approximation;
  const float refined = fma(fma(-v, approximation, 1.0f), approximation, approximation);
  return v < 0x1p126f ? refined : approximation;
}
__device__ inline double reciprocal(double v) { return 1.0 / v; }

// s(v) = 1 / (1 + e^-v), 1 - s(v), and v within bounds beyond which one of both is 0. Where s(v) is
// 0, so is the complement, which is multiplied by it.
template <class V>
struct Logistic {
  V value, complement, bounded;
};
template <class V>
__device__ inline Logistic<V> logistic(V v) {
  const V e = exp(-v), value = reciprocal(1.0f + e);
  return {value, share(e, value), at_most(at_least(v, -1000), 1000)};
}

// 1 / sqrt(v), rounded about once: the approximation of the hardware and one step of Newton's, with
// what rounding the product loses. At zero and infinity the approximation is right, the step NaN.
__device__ inline float reciprocal_root(float v) {
  const float approximation = rsqrtf(v), product = v * approximation;
  const float lost = fma(v, approximation, -product);
  const float rest = fma(-lost, approximation, fma(-product, approximation, 1.0f));
  const float refined = fma(0.5f * approximation, rest, approximation);
  return rest == rest ? refined : approximation;
}
__device__ inline double reciprocal_root(double v) { return 1.0 / sqrt(v); }

// sum / count, rounded once, for a count that a compiler knows: what rounding leaves of the
// quotient is made up for. Infinity and NaN stay what they are.
template <class C>
__device__ inline C divided(C sum, C count) {
  const C inverse = C(1) / count, quotient = sum * inverse;
  const C rest = fma(-quotient, count, sum);
  return rest == rest ? fma(rest, inverse, quotient) : quotient;
}

}  // namespace math
