// SPDX-License-Identifier: MIT
// Stores of vectors that bypass the caches.
#pragma once
#include "simd_stores.h"

namespace simd {

// Whether the stores of `results` results can bypass the caches. Without AVX-512, several results
// of 16 bits cannot: a part of a pack is then one cache line, and alternating stores to lines of
// two results take three times as long as other stores (measured).
template <class T, class C, int results>
inline constexpr bool can_stream = false;
#if defined(__SSE2__)
template <int results>
inline constexpr bool can_stream<fp32, float, results> = true;
template <int results>
inline constexpr bool can_stream<bf16, float, results> =
    bytes == 64 || (bytes == 32 && results == 1);
#if defined(__F16C__) && defined(__FMA__)  // then bits_of takes fp16
template <int results>
inline constexpr bool can_stream<fp16, float, results> = can_stream<bf16, float, results>;
#endif
#endif

#if defined(__SSE2__)
// Stores in pieces of 16 bytes, the least alignment of allocators. The machine combines the pieces.
template <class Bits>
inline void stream_pieces(void* p, Bits bits) {
  char* const pieces = static_cast<char*>(p);
#if defined(__AVX512F__)
  if constexpr (sizeof(bits) == 64) {
    stream_pieces(pieces, _mm512_castsi512_si256((__m512i)bits));
    stream_pieces(pieces + 32, _mm512_extracti64x4_epi64((__m512i)bits, 1));
    return;
  }
#endif
#if defined(__AVX__)
  if constexpr (sizeof(bits) == 32) {
    stream_pieces(pieces, _mm256_castsi256_si128((__m256i)bits));
    stream_pieces(pieces + 16, _mm256_extractf128_si256((__m256i)bits, 1));
    return;
  }
#endif
  static_assert(sizeof(bits) % 16 == 0, "a piece has 16 bytes");
  if constexpr (sizeof(bits) == 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(pieces), (__m128i)bits);
}
// Stores at once or in pieces. The stores bypass the caches if the address is a multiple of 16.
template <class Bits>
inline void stream(void* p, Bits bits) {
  const auto address = reinterpret_cast<std::uintptr_t>(p);
#if defined(__AVX512F__)
  if constexpr (sizeof(bits) == 64)
    if (address % 64 == 0) return _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)bits);
#endif
#if defined(__AVX__)
  if constexpr (sizeof(bits) == 32)
    if (address % 32 == 0) return _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)bits);
#endif
  if (address % 16 == 0)
    stream_pieces(p, bits);
  else
    store_bits(p, bits);
}
#else
template <class Bits>
inline void stream(void* p, Bits bits) {
  store_bits(p, bits);
}
#endif

template <int count, class T, class V>
inline void store_all_non_temporal(T* p, const V* v) {
  if constexpr (same_type<T, bf16>) {
    static_assert(count % 2 == 0);
    store_pairs<count / 2>(p, v, [](void* p, auto bits) { stream(p, bits); });
  } else {
#pragma GCC unroll 32
    for (int i = 0; i < count; ++i) stream(p + i * lanes<float>, bits_of(v[i], T()));
  }
}

// Other threads see non-temporal stores only after this call.
inline void finish_non_temporal_stores() {
#if defined(__SSE__)
  _mm_sfence();
#endif
}

}  // namespace simd
