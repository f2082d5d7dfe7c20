// SPDX-License-Identifier: MIT
// The activations of gates: each one's value and derivative at a point.
//
//   identity   z                       silu       z s(z)
//   sigmoid    s(z) = 1 / (1 + e^-z)   tanh       tanh z
//   relu       max(z, 0)               gelu       z/2 erfc(-z / sqrt 2)
//   gelu_tanh  z/2 (1 + tanh u) = z s(2u),   u = sqrt(2 / pi) (z + 0.044715 z^3)
//
// V is float or double, on the CPU a vector of them: a build picks one of the structs by its name,
// and the same text serves both. Exponentials are of negative numbers alone, so that nothing
// overflows, and 1 - s(z) is never a difference, so that tails keep their accuracy. A caller that
// uses the value alone pays for that alone, once all is inlined. NaN gives NaN.
#pragma once
#include "math.cuh"

template <class V>
struct Activated {
  V value, derivative;
};

namespace activations {

// s(z) and 1 - s(z), of a sign and a magnitude. The smaller of the two is 0 where it is subnormal
// and the machine flushes those.
template <class V>
struct Logistic {
  V value, complement;
};
template <class V>
__device__ inline Logistic<V> logistic(V sign, V magnitude) {
  const V e = math::exp(-magnitude);
  const V larger = math::reciprocal_of_1_to_2(1.0f + e);
  const V smaller = e * larger;
  return {math::select(sign < 0.0f, smaller, larger), math::select(sign < 0.0f, larger, smaller)};
}

// |z|, at most 64: there every tail is 0 and every power finite, in double too.
template <class V>
__device__ inline V bounded_magnitude(V z) {
  const V magnitude = math::fabs(z), bound = math::constant<V>(64);
  return math::select(magnitude > bound, bound, magnitude);
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
    const auto s = logistic(z, math::fabs(z));
    return {s.value, s.value * s.complement};
  }
};

struct silu {
  template <class V>
  static __device__ Activated<V> at(V z) {
    const auto s = logistic(z, math::fabs(z));
    return {z * s.value, s.value * fma(z, s.complement, math::constant<V>(1))};
  }
};

struct tanh {
  template <class V>
  static __device__ Activated<V> at(V z) {
    const V e = math::exp(-math::fabs(z));
    const V sech = 2.0f * e * math::reciprocal_of_1_to_2(1.0f + e * e);
    return {math::tanh(z), sech * sech};
  }
};

// Neither comparison holds for NaN.
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
    // e^(-z^2 / 2), with what the square lost by rounding put in to first order.
    const V a = bounded_magnitude(z), square = a * a, lost = fma(a, a, -square);
    const V e = math::exp(-0.5f * square) * fma(lost, math::constant<V>(-0.5), math::constant<V>(1));
    const V density = e * math::constant<V>(0.39894228040143267794);
    return {z * cumulative, fma(z, density, cumulative)};
  }
};

struct gelu_tanh {
  template <class V>
  static __device__ Activated<V> at(V z) {
    constexpr double slope = 1.5957691216057307118, cubic = slope * 0.044715;  // of 2u at 0
    const V a = bounded_magnitude(z), square = a * a;
    const auto s = logistic(
        z, a * fma(square, math::constant<V>(cubic), math::constant<V>(slope)));
    const V slope_at_z =
        fma(square, math::constant<V>(3 * cubic), math::constant<V>(slope));
    return {z * s.value, fma(z, s.value * s.complement * slope_at_z, s.value)};
  }
};

}  // namespace activations
