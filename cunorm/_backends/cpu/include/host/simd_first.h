// SPDX-License-Identifier: MIT
// Loads and stores of the first elements of a SIMD vector whose other elements lie outside a row.
#pragma once
#include "simd.h"

namespace simd {

// Returns a vector with all bits set in its first `count` numbers, and none in the others.
template <class Int, int bytes>
inline auto first_lanes(Int count) {
  typedef Int V __attribute__((vector_size(bytes)));
  V lane;
  for (int i = 0; i < bytes / int(sizeof(Int)); ++i) lane[i] = i;
  return lane < count;
}

// These load and store the first `count` elements, at least one. A load gives zeros for the other
// elements; a store leaves them as they are.
template <class V, class T>
inline V load_first(const T* p, int count) {
  V v{};
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const unsigned mask = (1u << count) - 1;
  if constexpr (sizeof(V) == 64 && sizeof(T) == 8)
    return (V)_mm512_maskz_loadu_epi64(mask, p);
  else if constexpr (sizeof(V) == 64 && sizeof(T) == 4)
    return (V)_mm512_maskz_loadu_epi32(mask, p);
  else if constexpr (sizeof(V) == 32 && sizeof(T) == 4)
    return (V)_mm256_maskz_loadu_epi32(mask, p);
  else if constexpr (sizeof(V) == 32 && sizeof(T) == 2)
    return (V)_mm256_maskz_loadu_epi16(mask, p);
#elif defined(__AVX2__)
  if constexpr (sizeof(V) == 32 && sizeof(T) == 8)
    return (V)_mm256_maskload_epi64((const long long*)p, (__m256i)first_lanes<int64_t, 32>(count));
  else if constexpr (sizeof(V) == 32 && sizeof(T) == 4)
    return (V)_mm256_maskload_epi32((const int*)p, (__m256i)first_lanes<int32_t, 32>(count));
  else if constexpr (sizeof(V) == 16 && sizeof(T) == 4)
    return (V)_mm_maskload_epi32((const int*)p, (__m128i)first_lanes<int32_t, 16>(count));
#endif
  if (count * sizeof(T) == sizeof(V)) return load_bits<V>(p);
  std::memcpy(&v, p, count * sizeof(T));
  return v;
}
template <class V, class T>
inline void store_first(T* p, V v, int count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const unsigned mask = (1u << count) - 1;
  if constexpr (sizeof(V) == 64 && sizeof(T) == 8)
    return _mm512_mask_storeu_epi64(p, mask, (__m512i)v);
  else if constexpr (sizeof(V) == 64 && sizeof(T) == 4)
    return _mm512_mask_storeu_epi32(p, mask, (__m512i)v);
  else if constexpr (sizeof(V) == 32 && sizeof(T) == 4)
    return _mm256_mask_storeu_epi32(p, mask, (__m256i)v);
  else if constexpr (sizeof(V) == 32 && sizeof(T) == 2)
    return _mm256_mask_storeu_epi16(p, mask, (__m256i)v);
#elif defined(__AVX2__)
  if constexpr (sizeof(V) == 32 && sizeof(T) == 8)
    return _mm256_maskstore_epi64((long long*)p, (__m256i)first_lanes<int64_t, 32>(count),
                                  (__m256i)v);
  else if constexpr (sizeof(V) == 32 && sizeof(T) == 4)
    return _mm256_maskstore_epi32((int*)p, (__m256i)first_lanes<int32_t, 32>(count), (__m256i)v);
  else if constexpr (sizeof(V) == 16 && sizeof(T) == 4)
    return _mm_maskstore_epi32((int*)p, (__m128i)first_lanes<int32_t, 16>(count), (__m128i)v);
#endif
  if (count * sizeof(T) == sizeof(V)) return store_bits(p, v);
  std::memcpy(p, &v, count * sizeof(T));
}

// Returns the first `count` elements of v, and the other elements of `others`.
template <class V>
inline V first_elements(V v, int count, V others) {
  using Int = std::conditional_t<sizeof(v[0]) == 8, int64_t, int32_t>;
  return first_lanes<Int, sizeof(V)>(count) ? v : others;
}

}  // namespace simd
