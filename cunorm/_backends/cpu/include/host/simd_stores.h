// SPDX-License-Identifier: MIT
// Stores of several vectors of results.
#pragma once
#include "simd.h"

namespace simd {

template <int count, class T, class V>
inline void store_all(T* p, const V* v) {
#pragma GCC unroll 32
  for (int i = 0; i < count; ++i) store(p + i * int(sizeof(V) / sizeof(v[0][0])), v[i]);
}
// Rarely called, so not inlined: inlining it would force the vectors into memory.
__attribute__((noinline, cold)) inline void store_pair(bf16* p, Floats low, Floats high) {
  store(p, low);
  store(p + lanes<float>, high);
}
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_PAIRS
using Pair = __m512i;  // two rounded vectors
// Rounds two vectors at a time, with one test for all of them. Returns false if a result is zero or
// subnormal, because the instruction treats subnormals as zeros.
template <int pairs>
inline bool round_pairs(const Floats* v, Pair* rounded) {
  const __m512i exponents = _mm512_set1_epi16(0x7f80);
  __mmask32 normal = ~0u;
#pragma GCC unroll 32
  for (int i = 0; i < pairs; ++i) {
    rounded[i] = (__m512i)_mm512_cvtne2ps_pbh((__m512)v[2 * i + 1], (__m512)v[2 * i]);
    normal = _mm512_mask_test_epi16_mask(normal, rounded[i], exponents);
  }
  return normal == ~0u;
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define HAS_PAIRS
using Pair = __m256i;  // two rounded vectors
inline __m256i rounded_bits(Floats v) {
  const Words bits = (Words)v;
  return (__m256i)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
// Rounds two vectors at a time, with one test for all of them. Returns false if there is a NaN.
template <int pairs>
inline bool round_pairs(const Floats* v, Pair* rounded) {
  constexpr int in_order = 0xd8;
  __m256 has_nan = _mm256_setzero_ps();
#pragma GCC unroll 32
  for (int i = 0; i < pairs; ++i) {
    const Floats low = v[2 * i], high = v[2 * i + 1];
    const __m256i packed = _mm256_packus_epi32(rounded_bits(low), rounded_bits(high));
    rounded[i] = _mm256_permute4x64_epi64(packed, in_order);
    has_nan = _mm256_or_ps(has_nan, _mm256_cmp_ps((__m256)low, (__m256)high, _CMP_UNORD_Q));
  }
  return _mm256_movemask_ps(has_nan) == 0;
}
#endif
// Stores pairs of vectors, by put(p, bits) for each rounded pair or, without HAS_PAIRS, for each
// rounded vector. If round_pairs returns false, `store_pair` stores them.
template <int pairs, class Put>
inline void store_pairs(bf16* p, const Floats* v, const Put& put) {
#ifdef HAS_PAIRS
  constexpr int pair = 2 * lanes<float>;
  Pair rounded[pairs > 0 ? pairs : 1];
  if (__builtin_expect(round_pairs<pairs>(v, rounded), 1)) {
#pragma GCC unroll 32
    for (int i = 0; i < pairs; ++i) put(p + i * pair, rounded[i]);
  } else {
#pragma GCC unroll 32
    for (int i = 0; i < pairs; ++i) store_pair(p + i * pair, v[2 * i], v[2 * i + 1]);
  }
#else
#pragma GCC unroll 32
  for (int i = 0; i < 2 * pairs; ++i) put(p + i * lanes<float>, to_bf16(v[i]));
#endif
}
#undef HAS_PAIRS
template <int count>
inline void store_all(bf16* p, const Floats* v) {
  store_pairs<count / 2>(p, v, [](void* p, auto bits) { store_bits(p, bits); });
  if constexpr (count % 2 != 0) store(p + (count - 1) * lanes<float>, v[count - 1]);
}

}  // namespace simd
