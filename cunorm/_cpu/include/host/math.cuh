// SPDX-License-Identifier: MIT
// The CPU's math.cuh: exp, erfc and tanh of whole SIMD vectors, without a branch.
//
// Every element goes through the same operations, fused ones where the source says fma, so a result
// does not depend on how many elements a vector has. Polynomials are of least maximum error, from
// Remez's exchange in 50 digits with the coefficients rounded one by one, lowest first, and the
// rest fitted again; `error` is what they then leave, relative to the function.
#pragma once
#include "simd.h"

namespace math {

template <class V>
struct Element;
template <>
struct Element<simd::Floats> {
  using type = float;
};
template <>
struct Element<simd::Doubles> {
  using type = double;
};
template <class V>
using Integers = decltype(V{} == V{});

template <class V>
inline V constant(double v) {
  return V{} + typename Element<V>::type(v);
}
template <class V>
inline V select(Integers<V> condition, V yes, V no) {
  return condition ? yes : no;
}
template <class V>
inline V at_least(V v, double bound) {
  return select(v < constant<V>(bound), constant<V>(bound), v);  // keeps NaN
}
template <class V>
inline V at_most(V v, double bound) {
  return select(v > constant<V>(bound), constant<V>(bound), v);
}

template <class V>
inline V fabs(V v) {
  return (V)((Integers<V>)v & ~(Integers<V>)-V{});
}
template <class V>
inline V copysign(V magnitude, V sign) {
  const Integers<V> sign_bit = (Integers<V>)-V{};
  return (V)(((Integers<V>)magnitude & ~sign_bit) | ((Integers<V>)sign & sign_bit));
}
template <class V>
inline V reciprocal_of_1_to_2(V v) {
  return 1.0f / v;
}

template <class V, class C, int count>
inline V polynomial(V v, const C (&coefficients)[count]) {
  V sum = constant<V>(coefficients[count - 1]);
#pragma GCC unroll 32
  for (int i = count - 2; i >= 0; --i) sum = fma(sum, v, constant<V>(coefficients[i]));
  return sum;
}

// e^v = 2^n e^r, |r| <= ln(2) / 2; e^r = 1 + r + r^2 polynomial(r).
template <class C>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr int mantissa_bits = 23, exponent_bias = 127;
  static constexpr float lowest = -104, highest = 89;  // beyond, the result is 0 or infinity
  static constexpr float to_integer = 0x1.8p23f;       // added, it leaves an integer's bits
  static constexpr float log2_e = 0x1.715476p0f;
  static constexpr float ln2_high = 0x1.62ep-1f, ln2_low = 0x1.0bfbe8p-15f;  // n ln2_high is exact
  static constexpr float polynomial[] = {0x1.fffffcp-2f, 0x1.55548cp-3f, 0x1.555858p-5f,
                                         0x1.123de0p-7f, 0x1.6ac74ap-10f};  // error 3e-9
};
template <>
struct ExpConstants<double> {
  static constexpr int mantissa_bits = 52, exponent_bias = 1023;
  static constexpr double lowest = -746, highest = 710;
  static constexpr double to_integer = 0x1.8p52;
  static constexpr double log2_e = 0x1.71547652b82fep0;
  static constexpr double ln2_high = 0x1.62e42fefa2p-1, ln2_low = 0x1.9ef35793c7673p-41;
  static constexpr double polynomial[] = {
      0x1.000000000000ap-1,  0x1.5555555555697p-3,  0x1.55555555511bfp-5,  0x1.11111110cee63p-7,
      0x1.6c16c180d463ep-10, 0x1.a01a02c75da31p-13, 0x1.a019a4e952055p-16, 0x1.71dc088e84d82p-19,
      0x1.28a2916177ef9p-22, 0x1.b1c8c2c2b51f8p-26};  // error 8e-18
};

template <class V>
struct Exponential {
  V fraction;            // e^r - 1
  Integers<V> exponent;  // n
};

// Of v + correction, where correction is below an ulp or so of v, and v within the bounds.
template <class V>
inline Exponential<V> exponential(V v, V correction) {
  using K = ExpConstants<typename Element<V>::type>;
  const V to_integer = constant<V>(K::to_integer);
  const V shifted = fma(v, constant<V>(K::log2_e), to_integer);
  const V n = shifted - to_integer;
  const V r =
      fma(n, constant<V>(-K::ln2_low), fma(n, constant<V>(-K::ln2_high), v)) + correction;
  return {fma(r * r, polynomial(r, K::polynomial), r), (Integers<V>)shifted - (Integers<V>)to_integer};
}

// v 2^n in two steps, as 2^n alone may be subnormal or infinite.
template <class V>
inline V scaled(V v, Integers<V> n) {
  using K = ExpConstants<typename Element<V>::type>;
  const Integers<V> half = n >> 1, rest = n - half;
  v *= (V)((half + K::exponent_bias) << K::mantissa_bits);
  return v * (V)((rest + K::exponent_bias) << K::mantissa_bits);
}

template <class V>
inline V exp(V v) {
  using K = ExpConstants<typename Element<V>::type>;
  const auto e = exponential(at_most(at_least(v, K::lowest), K::highest), V{});
  return scaled(1.0f + e.fraction, e.exponent);
}

// tanh |v| = -m / (2 + m), m = e^(-2 |v|) - 1, which is 1 long before the bound.
template <class V>
inline V tanh(V v) {
  using K = ExpConstants<typename Element<V>::type>;
  const auto e = exponential(-2.0f * at_most(fabs(v), 20), V{});
  const V power = (V)((e.exponent + K::exponent_bias) << K::mantissa_bits);
  const V m = fma(power, e.fraction, power - 1.0f);
  return copysign(-m / (2.0f + m), v);
}

// erfc a = e^(-a^2) polynomial(t) / (a + 3), t = (a - 3) / (a + 3), for 0 <= a <= largest.
template <class C>
struct ErfcConstants;
template <>
struct ErfcConstants<float> {
  static constexpr float largest = 10.1;
  static constexpr float polynomial[] = {
      0x1.12f21ep+0f, -0x1.c44c4ap-1f, 0x1.2e3254p-1f,   -0x1.3dea76p-2f,  0x1.e99f10p-4f,
      -0x1.b7d6e2p-6f, -0x1.4a00a4p-10f, 0x1.937e12p-9f, -0x1.cbeca8p-12f, -0x1.3a67c0p-12f};
};
template <>
struct ErfcConstants<double> {
  static constexpr double largest = 27.3;
  static constexpr double polynomial[] = {1};
};

template <class V>
inline V erfc(V v) {
  using K = ErfcConstants<typename Element<V>::type>;
  const V a = at_most(fabs(v), K::largest), square = a * a, lost = fma(a, a, -square);
  const auto e = exponential(-square, -lost);
  const V reciprocal = 1.0f / (a + 3.0f);
  const V factor = polynomial(fma(reciprocal, constant<V>(-6), constant<V>(1)), K::polynomial) * reciprocal;
  const V tail = scaled(fma(factor, e.fraction, factor), e.exponent);
  return select(v < 0.0f, 2.0f - tail, tail);
}

}  // namespace math
