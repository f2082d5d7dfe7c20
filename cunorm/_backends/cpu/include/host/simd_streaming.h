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
#if defined(__AVX512F__) && defined(__AVX512BW__)
template <>
inline constexpr bool can_stream<fp32, float> = true;
template <>
inline constexpr bool can_stream<bf16, float> = true;
template <>
inline constexpr bool can_stream<fp16, float> = true;

inline bool is_aligned(const void* p, int bytes) {
  return reinterpret_cast<std::uintptr_t>(p) % bytes == 0;
}
inline void store_non_temporal(fp32* p, Floats v) {
  if (is_aligned(p, 64))
    _mm512_stream_ps(p, (__m512)v);
  else
    store(p, v);
}
template <class Half>
inline void store_half_non_temporal(Half* p, Floats v) {
  Half rounded[lanes<float>];
  store(rounded, v);
  if (is_aligned(p, 32))
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), load_bits<__m256i>(rounded));
  else
    store_bits(p, load_bits<__m256i>(rounded));
}
inline void store_non_temporal(bf16* p, Floats v) { store_half_non_temporal(p, v); }
inline void store_non_temporal(fp16* p, Floats v) { store_half_non_temporal(p, v); }
#endif

// Such stores are seen by other threads only after this.
inline void finish_non_temporal_stores() {
#if defined(__SSE__)
  _mm_sfence();
#endif
}

}  // namespace simd
