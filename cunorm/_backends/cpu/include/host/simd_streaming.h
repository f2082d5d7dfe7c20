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
template <>
inline constexpr bool can_stream<bf16, float> = true;
template <>
inline constexpr bool can_stream<fp16, float> = true;

#if defined(__AVX512F__) && defined(__AVX512BW__)
using Register = __m512i;
using HalfRegister = __m256i;
inline void stream(__m512i* p, __m512i v) { _mm512_stream_si512(p, v); }
#else
using Register = __m256i;
using HalfRegister = __m128i;
inline void stream(__m128i* p, __m128i v) { _mm_stream_si128(p, v); }
#endif
inline void stream(__m256i* p, __m256i v) { _mm256_stream_si256(p, v); }

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
inline void store_non_temporal(fp32* p, Floats v) { store_non_temporal_as<Register>(p, v); }
inline void store_non_temporal(bf16* p, Floats v) { store_non_temporal_as<HalfRegister>(p, v); }
inline void store_non_temporal(fp16* p, Floats v) { store_non_temporal_as<HalfRegister>(p, v); }
#endif

// Such stores are seen by other threads only after this.
inline void finish_non_temporal_stores() {
#if defined(__SSE__)
  _mm_sfence();
#endif
}

}  // namespace simd
