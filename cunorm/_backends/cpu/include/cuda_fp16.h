// SPDX-License-Identifier: MIT
// Stands in for CUDA's cuda_fp16.h on a CPU: the type and the conversions that the kernels use.
//
// A float16 has 1 sign, 5 exponent and 10 fraction bits. Conversions use bit arithmetic, because it
// vectorises. Where a machine has instructions that convert vectors of floats, simd.h uses them.
#pragma once
#include "narrow_float.h"

struct __half {
  std::uint16_t bits;
};

inline float __half2float(__half h) {
  const std::uint32_t sign = std::uint32_t(h.bits & 0x8000) << 16;
  const std::int32_t magnitude = h.bits & 0x7fff;
  // A subnormal's bits count multiples of 2^-24. Infinity and NaN get float's largest exponent.
  constexpr std::int32_t smallest_normal = 1 << 10, infinity = 31 << 10, rebias = (127 - 15) << 23;
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  const std::int32_t normal = (magnitude << 13) + rebias + (magnitude >= infinity ? rebias : 0);
  const std::uint32_t wide = narrow_float::select(magnitude < smallest_normal,
                                                  narrow_float::bit_cast<std::uint32_t>(subnormal),
                                                  static_cast<std::uint32_t>(normal));
  return narrow_float::bit_cast<float>(sign | wide);
}

inline __half __float2half_rn(float v) { return {narrow_float::round_to_16_bits<10, 15>(v)}; }

inline __half __double2half(double v) { return {narrow_float::round_to_16_bits<10, 15>(v)}; }
