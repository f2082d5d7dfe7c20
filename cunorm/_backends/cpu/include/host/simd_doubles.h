// SPDX-License-Identifier: MIT
// Stores of vectors of fp64 as 16 bits, rounded once.
#pragma once
#include "simd_stores.h"

namespace simd {

// Rounds to odd: returns v if it is a float, else, of the two floats around v, the one whose last
// bit is set. Rounding that float to 16 bits then gives the same as rounding the double once.
inline FloatsOfDoubles round_to_odd(Doubles v) {
  const auto nearest = __builtin_convertvector(v, FloatsOfDoubles);
  const auto back = __builtin_convertvector(nearest, Doubles);
  const LongInts magnitude = LongInts{} + 0x7fffffffffffffff;
  const auto is_larger = (Doubles)((LongInts)back & magnitude) > (Doubles)((LongInts)v & magnitude);
  const auto toward_zero =
      (IntsOfDoubles)nearest + __builtin_convertvector(is_larger, IntsOfDoubles);
  const auto is_inexact = __builtin_convertvector(back != v, IntsOfDoubles);
  return (FloatsOfDoubles)(toward_zero | (is_inexact & 1));
}
// Rounds to odd if v is not subnormal as a float: keeps the upper bits of v, and sets the last of
// them if any lower bit is set.
inline FloatsOfDoubles round_normal_to_odd(Doubles v) {
  const LongInts bits = (LongInts)v, others = LongInts{} + 0x1fffffff;
  const LongInts rounded = (bits | ((bits & others) + others)) & ~others;
  return __builtin_convertvector((Doubles)rounded, FloatsOfDoubles);
}
inline Floats joined(FloatsOfDoubles low, FloatsOfDoubles high) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (Floats)_mm512_insertf64x4(_mm512_castpd256_pd512((__m256d)low), (__m256d)high, 1);
#elif defined(__AVX__)
  return (Floats)_mm256_set_m128((__m128)high, (__m128)low);
#else
  const FloatsOfDoubles halves[] = {low, high};
  return load_bits<Floats>(halves);
#endif
}
inline Words are_subnormal(Floats v) {
  const Words magnitude = (Words)v << 1;
  return (Words)(magnitude - 1u < 0x00ffffffu);
}
inline bool any(Words found) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_test_epi32_mask((__m512i)found, (__m512i)found) != 0;
#elif defined(__AVX__)
  return !_mm256_testz_si256((__m256i)found, (__m256i)found);
#else
  uint32_t bits = 0;
  for (int i = 0; i < lanes<float>; ++i) bits |= found[i];
  return bits != 0;
#endif
}
template <class Half>
inline void store_half(Half* p, Doubles v) {
  Half halves[lanes<float>];
  store(halves, joined(round_to_odd(v), FloatsOfDoubles{}));
  std::memcpy(p, halves, lanes<double> * sizeof(Half));
}
// Not inlined, for the same reason as the loads in simd.h.
__attribute__((noinline)) inline void store(fp16* p, Doubles v) { store_half(p, v); }
__attribute__((noinline)) inline void store(bf16* p, Doubles v) { store_half(p, v); }

template <int count, class Half>
inline void store_all_halves(Half* p, const Doubles* v) {
  constexpr int pairs = count / 2;
  Floats rounded[pairs + 1];
  Words subnormal = {};
#pragma GCC unroll 32
  for (int i = 0; i < pairs; ++i) {
    rounded[i] = joined(round_normal_to_odd(v[2 * i]), round_normal_to_odd(v[2 * i + 1]));
    subnormal |= are_subnormal(rounded[i]);
  }
  if (any(subnormal))
    for (int i = 0; i < pairs; ++i)
      rounded[i] = joined(round_to_odd(v[2 * i]), round_to_odd(v[2 * i + 1]));
  store_all<pairs>(p, rounded);
  if constexpr (count % 2 != 0) store(p + (count - 1) * lanes<double>, v[count - 1]);
}
template <int count>
__attribute__((noinline)) void store_all(fp16* p, const Doubles* v) {
  store_all_halves<count>(p, v);
}
template <int count>
__attribute__((noinline)) void store_all(bf16* p, const Doubles* v) {
  store_all_halves<count>(p, v);
}

}  // namespace simd
