// SPDX-License-Identifier: MIT
// Stores of vectors past the caches.
#pragma once
#include "simd.h"

namespace simd {

// store() past the caches, where the machine can and the address is aligned.
template <class T, class C>
inline constexpr bool can_stream = false;
template <class T, class V>
inline void store_non_temporal(T* p, V v) {
  store(p, v);
}
#if defined(__AVX2__)
template <>
inline constexpr bool can_stream<fp32, float> = true;
inline void stream(__m256i* p, __m256i v) { _mm256_stream_si256(p, v); }
#if defined(__AVX512F__)
inline void stream(__m512i* p, __m512i v) { _mm512_stream_si512(p, v); }
#endif

template <class Bits, class T>
inline void store_non_temporal_as(T* p, Floats v) {
  T converted[lanes<float>];
  store(converted, v);
  const Bits bits = load_bits<Bits>(converted);
  if (reinterpret_cast<std::uintptr_t>(p) % sizeof(bits) == 0)
    stream(reinterpret_cast<Bits*>(p), bits);
  else
    store_bits(p, bits);
}
#if defined(__AVX512F__) && defined(__AVX512BW__)
// Of 16 bits: elsewhere a part of a pack is one cache line, and such stores, one for each of the
// results of several rows in turn, take three times as long as others (measured).
template <>
inline constexpr bool can_stream<bf16, float> = true;
template <>
inline constexpr bool can_stream<fp16, float> = true;
inline void store_non_temporal(fp32* p, Floats v) { store_non_temporal_as<__m512i>(p, v); }
inline void store_non_temporal(bf16* p, Floats v) { store_non_temporal_as<__m256i>(p, v); }
inline void store_non_temporal(fp16* p, Floats v) { store_non_temporal_as<__m256i>(p, v); }
#else
inline void store_non_temporal(fp32* p, Floats v) { store_non_temporal_as<__m256i>(p, v); }
#endif
#endif

// One vector after the other.
template <int count, class T, class V>
inline void store_all_non_temporal(T* p, const V* v) {
#pragma GCC unroll 32
  for (int i = 0; i < count; ++i)
    store_non_temporal(p + i * int(sizeof(V) / sizeof(v[0][0])), v[i]);
}

// Such stores are seen by other threads only after this.
inline void finish_non_temporal_stores() {
#if defined(__SSE__)
  _mm_sfence();
#endif
}

}  // namespace simd
