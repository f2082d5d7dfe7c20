// SPDX-License-Identifier: MIT
// The activations of gates and of group norms: value and derivative at a point.
//
//   identity   z                       silu       z s(z)
//   sigmoid    s(z) = 1 / (1 + e^-z)   tanh       tanh z
//   relu       max(z, 0)               gelu       z/2 erfc(-z / sqrt 2)
//   gelu_tanh  z/2 (1 + tanh u) = z s(2u),   u = sqrt(2 / pi) (z + 0.044715 z^3)
//
// V is float or double; on a CPU it is a SIMD vector of either. A build selects a struct by its
// name. The complement 1 - s(z) is not computed by subtraction, so it stays accurate in the tails.
// If s(z) or the complement is subnormal or nearly so, it loses digits or becomes 0. At an infinity
// a derivative is its limit, except that silu's is NaN if math::approximate. NaN gives NaN,
// but identity's derivative is 1.
// Compilers drop the value or the derivative where a kernel does not use it.
#pragma once
#include "math.cuh"

template <class V>
struct Activated {
  V value, derivative;
};

namespace activations {

// Clamps z to [-1000, 1000], so that no power of z is infinite. Beyond these bounds, the
// derivatives of gelu and gelu_tanh are constant.
template <class V>
__device__ inline V bounded(V z) {
  return math::at_most(math::at_least(z, -1000), 1000);
}

struct identity {
  template <class V>
  static __device__ Activated<V> at(V z) {
    return {z, math::constant<V>(1)};
  }
};

struct sigmoid {
  template <class V>
  static __device__ Activated<V> at(V z) {
    const auto s = math::logistic(z);
    return {s.value, s.value * s.complement};
  }
};

struct silu {
  template <class V>
  static __device__ Activated<V> at(V z) {
    const auto s = math::logistic(z);
    const V value = z * s.value;
    if constexpr (math::approximate) return {value, fma(value, s.complement, s.value)};
    return {value, s.value * fma(s.bounded, s.complement, math::constant<V>(1))};
  }
};

struct tanh {
  template <class V>
  static __device__ Activated<V> at(V z) {
    const V e = math::exp(-2.0f * math::fabs(z));
    const V distance = 2.0f * e * math::reciprocal(1.0f + e);  // 1 - |tanh z|
    return {math::tanh(z), distance * (2.0f - distance)};
  }
};

// NaN fails each comparison, so both results are NaN.
struct relu {
  template <class V>
  static __device__ Activated<V> at(V z) {
    const V zero = math::constant<V>(0), one = math::constant<V>(1);
    return {math::select(z <= zero, zero, z),
            math::select(z <= zero, zero, math::select(z > zero, one, z))};
  }
};

struct gelu {
  template <class V>
  static __device__ Activated<V> at(V z) {
    const V cumulative = 0.5f * math::erfc(z * math::constant<V>(-0.70710678118654752440));
    const V b = bounded(z), square = b * b, lost = fma(b, b, -square);
    // e is e^(-b^2 / 2), corrected to first order for `lost`, the rounding error of `square`.
    const V e =
        math::exp(-0.5f * square) * fma(lost, math::constant<V>(-0.5), math::constant<V>(1));
    return {z * cumulative, fma(b * e, math::constant<V>(0.39894228040143267794), cumulative)};
  }
};

struct gelu_tanh {
  template <class V>
  static __device__ Activated<V> at(V z) {
    constexpr double slope = 1.5957691216057307118, cubic = 0.044715 * slope;  // coefficients of 2u
    const V first = math::constant<V>(slope);
    const V b = bounded(z), square = b * b;
    const auto s = math::logistic(b * fma(square, math::constant<V>(cubic), first));
    const V slope_there = fma(square, math::constant<V>(3 * cubic), first);
    return {z * s.value, s.value * fma(b * s.complement, slope_there, math::constant<V>(1))};
  }
};

}  // namespace activations
