// SPDX-License-Identifier: MIT
// Stands in for CUDA's cuda_bf16.h on a CPU: the type and the conversions that the kernels use.
//
// A bfloat16 is the upper half of a float: 1 sign, 8 exponent and 7 fraction bits.
#pragma once
#include "narrow_float.h"

struct __nv_bfloat16 {
  std::uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 h) {
  return narrow_float::bit_cast<float>(std::uint32_t(h.bits) << 16);
}

inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  return {narrow_float::round_to_16_bits<7, 127>(v)};
}

inline __nv_bfloat16 __double2bfloat16(double v) {
  return {narrow_float::round_to_16_bits<7, 127>(v)};
}
