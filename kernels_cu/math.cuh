// SPDX-License-Identifier: MIT
// The mathematical functions of the kernels, for one float or double.
//
// Those of activations.cuh are CUDA's own but for the three small ones. The CPU build replaces this
// file: there their V is a SIMD vector.
#pragma once

namespace math {

using ::erfc;
using ::exp;
using ::fabs;
using ::tanh;

template <class V>
__device__ inline V exp_minus(V v) {
  return exp(-v);
}

// The largest finite float or double.
template <class V>
inline constexpr double largest_finite =
    sizeof(V) == sizeof(float) ? 0x1.fffffep127 : 0x1.fffffffffffffp1023;

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

// 1 / v for v from 1 to infinity. The division of CUDA calls a subroutine for the sake of the
// values that cannot occur here; this is its first approximation, 0 from 2^126 on, and one step of
// Newton's, within 1 ulp.
__device__ inline float reciprocal(float v) {
  const float approximation = __fdividef(1.0f, v);
  const float refined = fma(fma(-v, approximation, 1.0f), approximation, approximation);
  return v < 0x1p126f ? refined : approximation;
}
__device__ inline double reciprocal(double v) { return 1.0 / v; }
// numerator / v for such a v.
template <class V>
__device__ inline V quotient(V numerator, V v) {
  return numerator * reciprocal(v);
}

// numerator / sqrt(v), rounded about once: what rounding leaves of the root, of the numerator and
// of the quotient is made up for. Where either is below 2^-99 these rests may be lost, as
// subnormals are zero here, and the result is within 1.5 ulp. At zero and infinity it is the plain
// quotient.
__device__ inline float over_root(double numerator, float v) {
  const float root = sqrt(v), inverse = 1.0f / root;
  const float root_rest = 0.5f * fma(-root, root, v) * inverse;
  const float high = float(numerator), low = float(numerator - double(high));
  const float quotient = high / root;
  const float rest = fma(-quotient, root, high) + fma(-quotient, root_rest, low);
  const float result = fma(rest, inverse, quotient);
  return rest != 0 && result == result ? result : quotient;  // -0 stays -0
}
__device__ inline double over_root(double numerator, double v) { return numerator / sqrt(v); }

}  // namespace math
