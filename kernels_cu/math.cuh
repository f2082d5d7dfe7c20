// SPDX-License-Identifier: MIT
// The mathematical functions that activations.cuh is written in, for one float or double.
//
// They are CUDA's own but for two small ones. The CPU build replaces this file: there V is a SIMD
// vector.
#pragma once

namespace math {

using ::erfc;
using ::exp;
using ::fabs;
using ::tanh;

template <class V>
__device__ inline V constant(double v) {
  return static_cast<V>(v);
}

template <class V>
__device__ inline V select(bool condition, V yes, V no) {
  return condition ? yes : no;
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

}  // namespace math
