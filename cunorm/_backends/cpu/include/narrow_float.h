// SPDX-License-Identifier: MIT
// Rounds a float or double to a 16-bit floating-point format: to nearest even, in one step.
//
// It uses integer arithmetic, and masks instead of branches, so that a plain loop over an array
// vectorises. As on CUDA, a NaN of either sign becomes 0x7fff.
#pragma once
#include <cstdint>
#include <cstring>

namespace narrow_float {

template <class Wide>
struct Format;
template <>
struct Format<float> {
  using Bits = std::uint32_t;
  using Signed = std::int32_t;
  static constexpr int size = 32, fraction = 23, bias = 127;
};
template <>
struct Format<double> {
  using Bits = std::uint64_t;
  using Signed = std::int64_t;
  static constexpr int size = 64, fraction = 52, bias = 1023;
};

template <class To, class From>
inline To bit_cast(From v) {
  static_assert(sizeof(To) == sizeof(From), "the same number of bits");
  To out;
  std::memcpy(&out, &v, sizeof(out));
  return out;
}

// Selects by masks, because compilers turn the ternary operator into a branch around the
// floating-point arithmetic of its operands, and a loop with a branch does not vectorise.
template <class Bits>
inline Bits select(bool condition, Bits if_true, Bits if_false) {
  const Bits mask = Bits(0) - static_cast<Bits>(condition);
  return if_false ^ ((if_true ^ if_false) & mask);
}

// The 16-bit format has a sign, an exponent with bias `bias`, and `fraction` fraction bits.
template <int fraction, int bias, class Wide>
inline std::uint16_t round_to_16_bits(Wide v) {
  using From = Format<Wide>;
  using Bits = typename From::Bits;
  using Signed = typename From::Signed;  // AVX2 cannot compare unsigned integers
  const Bits bits = bit_cast<Bits>(v);
  const Bits sign = bits >> (From::size - 16) & 0x8000u;
  const Bits magnitude = bits & ~Bits(0) >> 1;
  const Signed ordered = static_cast<Signed>(magnitude);

  // A carry out of the fraction correctly raises the exponent, if need be to infinity.
  constexpr int drop = From::fraction - fraction;
  constexpr Bits rebias = Bits(From::bias - bias) << From::fraction;
  constexpr Bits half_less_one = (Bits(1) << (drop - 1)) - 1;
  const Bits odd = magnitude >> drop & 1;
  Bits rounded = (magnitude - rebias + half_less_one + odd) >> drop;

  if constexpr (bias < From::bias) {
    // A value below the smallest normal is added to `power`, a power of two. The last bit of the
    // sum is worth the format's smallest subnormal, so the addition rounds the value and leaves the
    // result in the sum's last bits.
    constexpr int exponent = From::fraction + 1 - bias - fraction;
    constexpr Bits power = Bits(From::bias + exponent) << From::fraction;
    const Wide sum = bit_cast<Wide>(magnitude) + bit_cast<Wide>(power);
    constexpr Signed smallest_normal = Signed(From::bias + 1 - bias) << From::fraction;
    rounded = select(ordered < smallest_normal, bit_cast<Bits>(sum) - power, rounded);

    constexpr Signed overflow = Signed(From::bias + 1 + bias) << From::fraction;
    constexpr Bits infinity = Bits(2 * bias + 1) << fraction;
    rounded = select(ordered >= overflow, infinity, rounded);
  }
  constexpr Signed wide_infinity = Signed(2 * From::bias + 1) << From::fraction;
  return static_cast<std::uint16_t>(select(ordered > wide_infinity, Bits(0x7fff), sign | rounded));
}

}  // namespace narrow_float
