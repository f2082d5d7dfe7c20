// SPDX-License-Identifier: MIT
// The CPU's math.cuh: exp, erfc and tanh of whole SIMD vectors, without a branch; reciprocal_root
// of one number, computed in double, so that a float is rounded once.
//
// Every element goes through the same operations, which are fused where the source says fma. So a
// result does not depend on how many elements a vector has. exp is within 1.1 ulp, tanh within 1.5,
// erfc of a float within 1.8 and of a double within 2.25.
//
// The polynomials are minimax approximations, by Remez's algorithm in 50 digits. exp's coefficients
// were rounded one by one, each time with a new fit of the others; tanh's all together; erfc's were
// moved to neighbouring numbers while that helped. `error` is the largest error of the polynomial
// with rounded coefficients, relative to the function.
#pragma once
#include "simd.h"

namespace math {

inline constexpr bool approximate = false;

template <class C>
inline C reciprocal_root(C v) {
  return C(1.0 / sqrt(double(v)));
}

template <class C>
inline C divided(C sum, C count) {
  return sum / count;
}

// Divides by one number several times.
template <class C, bool is_any>
struct Divisor {
  C value;

  explicit Divisor(C divisor) : value(divisor) {}

  template <class V>
  V quotient(V v) const {
    return v / value;
  }
};

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
template <class C>
inline C not_negative(C v) {
  return v < 0 ? 0 : v;
}

template <class V>
inline V at_least(V v, double bound) {
  return select(v < constant<V>(bound), constant<V>(bound), v);  // keeps NaN
}
template <class V>
inline V at_most(V v, double bound) {
  return select(v > constant<V>(bound), constant<V>(bound), v);
}

#if defined(__AVX512F__) && defined(__AVX512BW__)
// Each of these is one instruction, which returns its second operand if an operand is NaN.
inline simd::Floats at_least(simd::Floats v, double bound) {
  return (simd::Floats)_mm512_max_ps(_mm512_set1_ps(float(bound)), (__m512)v);
}
inline simd::Floats at_most(simd::Floats v, double bound) {
  return (simd::Floats)_mm512_min_ps(_mm512_set1_ps(float(bound)), (__m512)v);
}
#elif defined(__AVX__)
inline simd::Floats at_least(simd::Floats v, double bound) {
  return (simd::Floats)_mm256_max_ps(_mm256_set1_ps(float(bound)), (__m256)v);
}
inline simd::Floats at_most(simd::Floats v, double bound) {
  return (simd::Floats)_mm256_min_ps(_mm256_set1_ps(float(bound)), (__m256)v);
}
#endif

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
inline V reciprocal(V v) {
  return 1.0f / v;
}

// Returns the sum of coefficients[i] * v^(i - first), from i = first on.
template <int first = 0, class V, class C, int count>
inline V polynomial(V v, const C (&coefficients)[count]) {
  V sum = constant<V>(coefficients[count - 1]);
#pragma GCC unroll 32
  for (int i = count - 2; i >= first; --i) sum = fma(sum, v, constant<V>(coefficients[i]));
  return sum;
}

// e^v = 2^n e^r, |r| <= ln(2) / 2; e^r = 1 + r + r^2 polynomial(r).
template <class C>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr int mantissa_bits = 23, exponent_bias = 127;
  static constexpr float lowest = -104, highest = 89;  // beyond, the result is 0 or infinity
  static constexpr float logistic_lowest = -89;        // e^89 is infinite
  static constexpr float logistic_highest = 87.5;      // from v = 87 on, the computed e^-v is 0
  static constexpr float to_integer = 0x1.8p23f;       // adding it rounds to an integer
  static constexpr float log2_e = 0x1.715476p0f;
  static constexpr float ln2_high = 0x1.62ep-1f, ln2_low = 0x1.0bfbe8p-15f;  // n ln2_high is exact
  static constexpr float polynomial[] = {0x1.fffffcp-2f, 0x1.55548cp-3f, 0x1.555858p-5f,
                                         0x1.123de0p-7f, 0x1.6ac74ap-10f};  // error 3.2e-9
};
template <>
struct ExpConstants<double> {
  static constexpr int mantissa_bits = 52, exponent_bias = 1023;
  static constexpr double lowest = -746, highest = 710;
  static constexpr double logistic_lowest = -710, logistic_highest = 708.5;
  static constexpr double to_integer = 0x1.8p52;
  static constexpr double log2_e = 0x1.71547652b82fep0;
  static constexpr double ln2_high = 0x1.62e42fefa2p-1, ln2_low = 0x1.9ef35793c7673p-41;
  static constexpr double polynomial[] = {
      0x1.000000000000ap-1,  0x1.5555555555697p-3,  0x1.55555555511bfp-5,  0x1.11111110cee63p-7,
      0x1.6c16c180d463ep-10, 0x1.a01a02c75da31p-13, 0x1.a019a4e952055p-16, 0x1.71dc088e84d82p-19,
      0x1.28a2916177ef9p-22, 0x1.b1c8c2c2b51f8p-26};  // error 7.5e-18
};

template <class V>
struct Reduced {
  V n, r;  // v = n ln(2) + r
};

// Reduces a v between lowest and highest.
template <class V>
inline Reduced<V> reduced(V v) {
  using K = ExpConstants<typename Element<V>::type>;
  const V to_integer = constant<V>(K::to_integer);
  const V n = fma(v, constant<V>(K::log2_e), to_integer) - to_integer;
  return {n, fma(n, constant<V>(-K::ln2_low), fma(n, constant<V>(-K::ln2_high), v))};
}

// Reduces any v. Beyond lowest and highest, n is such that exp is 0 or infinity.
template <class V>
inline Reduced<V> reduced_of_any(V v) {
  using K = ExpConstants<typename Element<V>::type>;
  return reduced(at_most(at_least(v, K::lowest), K::highest));
}

// Returns v 2^n, rounded once. It multiplies twice, because 2^n alone may be subnormal or infinite.
template <class V>
inline V scaled(V v, V n) {
  using K = ExpConstants<typename Element<V>::type>;
  // The shifts drop the bits that to_integer adds.
  const Integers<V> whole = (Integers<V>)(n + constant<V>(K::to_integer));
  const Integers<V> half = whole >> 1, rest = whole - half, one = (Integers<V>)constant<V>(1);
  v *= (V)((half << K::mantissa_bits) + one);
  return v * (V)((rest << K::mantissa_bits) + one);
}
#if defined(__AVX512F__) && defined(__AVX512BW__)
inline simd::Floats scaled(simd::Floats v, simd::Floats n) {
  return (simd::Floats)_mm512_scalef_ps((__m512)v, (__m512)n);
}
#if defined(__AVX512DQ__)
// scalef takes any n, even infinity or NaN. A meaningless r is clamped to a small number.
inline Reduced<simd::Floats> reduced_of_any(simd::Floats v) {
  const Reduced<simd::Floats> found = reduced(v);
  constexpr int smaller_magnitude = 2;  // with the sign of the first operand
  const __m512 r = _mm512_range_ps((__m512)found.r, _mm512_set1_ps(0.5f), smaller_magnitude);
  return {found.n, (simd::Floats)r};
}
#endif
#endif

// Returns scale * e^r. Scaling r instead of the result makes the chain of operations shorter.
template <class V>
inline V exp_of_rest(V r, V scale = constant<V>(1)) {
  const auto& coefficients = ExpConstants<typename Element<V>::type>::polynomial;
  return fma(fma(polynomial(r, coefficients), r, constant<V>(1)), scale * r, scale);
}
template <class V>
inline V exp(V v) {
  const auto [n, r] = reduced_of_any(v);
  return scaled(exp_of_rest(r), n);
}

// s(v) = 1 / (1 + e^-v), the complement 1 - s(v), and v clamped to bounds beyond which s(v) or the
// complement is 0. The complement is computed as e^-v s(v), so where s(v) is 0 it is 0, not 1.
template <class V>
struct Logistic {
  V value, complement, bounded;
};

// Computes e^-v / 2, which is finite wherever s(v) is not 0. Its scale 2^(n - 1) is a normal number
// or 0. If e^-v is below 1.7e-38 (for doubles 3.2e-308), the complement is 0.
template <class V>
inline Logistic<V> logistic(V v) {
  using K = ExpConstants<typename Element<V>::type>;
  const V one = constant<V>(1), to_integer = constant<V>(K::to_integer);
  const V bounded = at_most(at_least(v, K::logistic_lowest), K::logistic_highest);
  const V shifted_n = fma(bounded, constant<V>(-K::log2_e), to_integer), n = shifted_n - to_integer;
  const V r = fma(n, constant<V>(-K::ln2_low), fma(n, constant<V>(-K::ln2_high), -bounded));
  const Integers<V> exponent = (Integers<V>)shifted_n << K::mantissa_bits;
  const V half = exp_of_rest(r, (V)(exponent + (Integers<V>)constant<V>(0.5)));
  const V value = reciprocal(fma(half, constant<V>(2), one));
  return {value, half * (value + value), bounded};
}

// |tanh v| = |v + v^3 polynomial(v^2)| up to |v| = 0.55, then 1 - 2 e / (1 + e), e = exp(-2 |v|).
template <class C>
struct TanhConstants;
template <>
struct TanhConstants<float> {
  static constexpr float polynomial[] = {-0x1.55554ap-2f, 0x1.110d26p-3f, -0x1.b9287ap-5f,
                                         0x1.593cfcp-6f, -0x1.9b300ep-8f};  // error 4.3e-9
};
template <>
struct TanhConstants<double> {
  static constexpr double polynomial[] = {
      -0x1.555555555554fp-2,  0x1.111111111079fp-3,  -0x1.ba1ba1b97d89dp-5,  0x1.664f485970d56p-6,
      -0x1.226e2f1480b82p-7,  0x1.d6d29b97bf89fp-9,  -0x1.7d8fd3b7ba216p-10, 0x1.3483aee0c40b5p-11,
      -0x1.e96fc8f0cbe71p-13, 0x1.5d746298ebae9p-14, -0x1.47111e7a2f17cp-16};  // error 2.3e-18
};

template <class V>
inline V tanh(V v) {
  using K = TanhConstants<typename Element<V>::type>;
  const V square = v * v, small = fma(square * v, polynomial(square, K::polynomial), v);
  const V magnitude = fabs(v), e = exp(-2.0f * magnitude);
  const V large = 1.0f - 2.0f * e * reciprocal(1.0f + e);
  return copysign(select(magnitude > constant<V>(0.55), large, small), v);
}

// erfc a = r e^(-a^2) polynomial(r - middle), r = 1 / (a + 3), for a >= 0. Up to a = 9, r - middle
// is exact. `middle` is chosen so that the first coefficient is close to its rounded value.
template <class C>
struct ErfcConstants;
template <>
struct ErfcConstants<float> {
  static constexpr float largest = 10.1f;  // beyond, the result is 0
  static constexpr float middle = 0x1.55582ap-3f;
  static constexpr float polynomial[] = {0x1.12f3fep+0f,  0x1.533cf8p+2f,  0x1.53fd28p+4f,
                                         0x1.0c418ep+6f,  0x1.35d484p+7f,  0x1.a16804p+7f,
                                         -0x1.c9cba4p+5f, -0x1.af20d0p+9f, -0x1.96b306p+9f,
                                         0x1.9a9b08p+11f};  // error 8.2e-9
};
template <>
struct ErfcConstants<double> {
  static constexpr double largest = 27.3;
  static constexpr double middle = 0x1.54b9p-3;
  static constexpr double polynomial[] = {
      0x1.128aa99068a9dp+0,   0x1.5269e367cd0ebp+2,  0x1.530355e081450p+4,  0x1.0b816220c2641p+6,
      0x1.35319b3270c62p+7,   0x1.a16a987eb2b4fp+7,  -0x1.b65e3352217c9p+5, -0x1.a79195e001362p+9,
      -0x1.d0345ae4ceac0p+9,  0x1.5a3abfdd3bb07p+11, 0x1.98bc3bf2f40d6p+12, -0x1.545eb350c3a12p+13,
      -0x1.2af38da528985p+15, 0x1.dd76d8cad14c5p+15, 0x1.aadbb058a7b72p+17, -0x1.c4ccd39016570p+18,
      -0x1.1a3539fb86994p+20, 0x1.dae46d458dbc3p+21, 0x1.0646d48f08b3dp+22, -0x1.ba2e4efe2a8a3p+24,
      0x1.78e66cdc816a1p+22,  0x1.fbae701501782p+26, -0x1.628c331967a9ap+27};  // error 2.3e-17
};

// `share` is about -(a + 3) times the derivative of log(e^(a^2) erfc a). It converts the relative
// error of r to a relative error of the result.
template <class V>
inline V inlined_erfc(V v) {
  using K = ErfcConstants<typename Element<V>::type>;
  const V one = constant<V>(1), first = constant<V>(K::polynomial[0]);
  const V a = at_most(fabs(v), K::largest), square = a * a, square_lost = fma(a, a, -square);
  const V sum = a + 3.0f, sum_lost = a - (sum - 3.0f);
  const V r = 1.0f / sum, r_lost = fma(-sum_lost, r, fma(-sum, r, one));
  const V t = r - K::middle, share = fma(t, constant<V>(8.1), constant<V>(2));

  // p is the polynomial, factor is p * r, and p_lost and factor_lost are their rounding errors.
  const V rest = polynomial<1>(t, K::polynomial);
  const V p = fma(rest, t, first), p_lost = fma(rest, t, first - p);
  const V factor = p * r, factor_lost = fma(p_lost, r, fma(p, r, -factor));
  const V lost = fma(factor, fma(r_lost, share, -square_lost), factor_lost);

  using E = ExpConstants<typename Element<V>::type>;
  const auto [n, e_r] = reduced(-square);
  const V fraction = fma(e_r * e_r, math::polynomial(e_r, E::polynomial), e_r);  // e^e_r - 1
  const V added = fma(factor, fraction, fma(lost, fraction, lost));
  const V tail = scaled(factor + added, n);
  return select(v < 0.0f, 2.0f - tail, tail);
}

inline simd::Floats erfc(simd::Floats v) { return inlined_erfc(v); }
// Not inlined: this halves the code to compile, and is as quick.
__attribute__((noinline)) inline simd::Doubles erfc(simd::Doubles v) { return inlined_erfc(v); }

}  // namespace math
