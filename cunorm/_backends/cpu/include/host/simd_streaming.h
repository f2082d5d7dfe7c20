// SPDX-License-Identifier: MIT
// Stores of vectors past the caches.
#pragma once
#include "simd_stores.h"

namespace simd {

// Whether a result can be stored past the caches, which is one of `results`. Of 16 bits, several
// cannot without AVX-512: a part of a pack is one cache line then, and stores of lines of two
// results in turn take three times as long as others (measured).
template <class T, class C, int results>
inline constexpr bool can_stream = false;
#if defined(__SSE2__)
template <int results>
inline constexpr bool can_stream<fp32, float, results> = true;
template <int results>
inline constexpr bool can_stream<bf16, float, results> =
    bytes == 64 || (bytes == 32 && results == 1);
template <int results>
inline constexpr bool can_stream<fp16, float, results> = can_stream<bf16, float, results>;
#endif

// store() of one vector after the other, past the caches where the address allows: allocators align
// to the 16 bytes of such a store at least, and the machine joins them to whole lines.
template <int count, class T, class V>
inline void store_all_non_temporal(T* p, const V* v) {
#if defined(__SSE2__)
  constexpr int piece = sizeof(__m128i);
  if (reinterpret_cast<std::uintptr_t>(p) % piece == 0) {
    alignas(bytes) T converted[count * int(sizeof(V) / sizeof(v[0][0]))];
    static_assert(sizeof(converted) % piece == 0, "it is stored in pieces");
    store_all<count>(converted, v);
    const auto* const from = reinterpret_cast<const __m128i*>(converted);
#pragma GCC unroll 32
    for (int i = 0; i < int(sizeof(converted)) / piece; ++i)
      _mm_stream_si128(reinterpret_cast<__m128i*>(p) + i, from[i]);
    return;
  }
#endif
  store_all<count>(p, v);
}

// Such stores are seen by other threads only after this.
inline void finish_non_temporal_stores() {
#if defined(__SSE__)
  _mm_sfence();
#endif
}

}  // namespace simd
