// SPDX-License-Identifier: MIT
// SIMD vectors of fp32 and fp64 by the compiler's vector extension, with loads and stores that
// convert.
//
// A vector is as wide as the machine's registers. Sums are added in a number of parts that does not
// depend on that width, so no result depends on it.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "intrinsics.h"
#include "operations.cuh"
#include "types.cuh"

namespace simd {

#if defined(__AVX512F__) && defined(__AVX512BW__)
inline constexpr int bytes = 64;
#elif defined(__AVX__)
inline constexpr int bytes = 32;
#else
inline constexpr int bytes = 16;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int registers = 32;
#else
inline constexpr int registers = 16;
#endif

template <class C>
inline constexpr int lanes = bytes / int(sizeof(C));

typedef float Floats __attribute__((vector_size(bytes)));
typedef double Doubles __attribute__((vector_size(bytes)));

template <class C>
struct VectorType;
template <>
struct VectorType<float> {
  using type = Floats;
};
template <>
struct VectorType<double> {
  using type = Doubles;
};
template <class C>
using Vector = typename VectorType<C>::type;

typedef uint32_t Words __attribute__((vector_size(bytes)));
typedef uint16_t HalfWords __attribute__((vector_size(bytes / 2)));
typedef float FloatsOfDoubles
    __attribute__((vector_size(bytes / 2)));  // as many floats as a vector has doubles
typedef int32_t IntsOfDoubles __attribute__((vector_size(bytes / 2)));
typedef int64_t LongInts __attribute__((vector_size(bytes)));

template <class V>
inline V load_bits(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
template <class V>
inline void store_bits(void* p, V v) {
  std::memcpy(p, &v, sizeof(v));
}

// load<C>(p) loads as many elements as a vector of C has, and converts them.
template <class C, class T>
inline Vector<C> load(const T* p) {
  Vector<C> v;
  for (int i = 0; i < lanes<C>; ++i) v[i] = convert<C>(p[i]);
  return v;
}
// Conversions between 16 bits and double are long and rare, so they are not inlined. Otherwise a
// build would have hundreds of copies, and take ten times as long to compile.
template <>
__attribute__((noinline)) inline Doubles load<double>(const fp16* p) {
  Doubles v;
  for (int i = 0; i < lanes<double>; ++i) v[i] = convert<double>(p[i]);
  return v;
}
template <>
__attribute__((noinline)) inline Doubles load<double>(const bf16* p) {
  Doubles v;
  for (int i = 0; i < lanes<double>; ++i) v[i] = convert<double>(p[i]);
  return v;
}
template <>
inline Floats load<float>(const fp32* p) {
  return load_bits<Floats>(p);
}
template <>
inline Doubles load<double>(const fp64* p) {
  return load_bits<Doubles>(p);
}
template <>
inline Doubles load<double>(const fp32* p) {
  return __builtin_convertvector(load_bits<FloatsOfDoubles>(p), Doubles);
}
template <>
inline Floats load<float>(const bf16* p) {
#if defined(__aarch64__)
  return (Floats)vshll_n_u16(load_bits<uint16x4_t>(p), 16);  // GCC 12 compiles the #else line badly
#elif defined(__AVX512F__) && defined(__AVX512BW__)
  // One instruction moves an element's bits to the upper half of each word, and zeros to the lower.
  const __m512i from = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0,
                                        6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
  const __m512i bits = _mm512_castsi256_si512(load_bits<__m256i>(p));
  return (Floats)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, from, bits);
#elif defined(__AVX2__)
  // One instruction shuffles the bytes within each half of a register.
  const __m256i from = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7, -1,
                                        -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  const __m256i bits = _mm256_broadcastsi128_si256(load_bits<__m128i>(p));
  return (Floats)_mm256_shuffle_epi8(bits, from);
#else
  return (Floats)(__builtin_convertvector(load_bits<HalfWords>(p), Words) << 16);
#endif
}

// store(p, v) stores the vector's elements, rounded to T.
template <class T, class V>
inline void store(T* p, V v) {
  for (int i = 0; i < int(sizeof(V) / sizeof(v[0])); ++i) p[i] = convert<T>(v[i]);
}
inline void store(fp32* p, Floats v) { store_bits(p, v); }
inline void store(fp64* p, Doubles v) { store_bits(p, v); }
inline void store(fp32* p, Doubles v) {
  store_bits(p, __builtin_convertvector(v, FloatsOfDoubles));
}
inline HalfWords to_bf16(Floats v) {
  const Words bits = (Words)v;
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
  // The instruction treats subnormals as zeros, so it is used only if there are no subnormals.
  constexpr int subnormal = 0x20;
  if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)v, subnormal) == 0, 1))
    return (HalfWords)_mm512_cvtneps_pbh((__m512)v);
#endif
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words quiet_nan = (bits >> 16) | 0x40u;
  return __builtin_convertvector(v == v ? rounded : quiet_nan, HalfWords);
}
inline void store(bf16* p, Floats v) { store_bits(p, to_bf16(v)); }
inline Floats bits_of(Floats v, fp32) { return v; }

#if defined(__AVX512F__) && defined(__AVX512BW__)
template <>
inline Floats load<float>(const fp16* p) {
  return (Floats)_mm512_cvtph_ps(load_bits<__m256i>(p));
}
inline __m256i bits_of(Floats v, fp16) {
  return _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline void store(fp16* p, Floats v) { store_bits(p, bits_of(v, fp16())); }
inline Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
inline Doubles fma(Doubles a, Doubles b, Doubles c) {
  return (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
#elif defined(__AVX__) && defined(__F16C__) && defined(__FMA__)
template <>
inline Floats load<float>(const fp16* p) {
  return (Floats)_mm256_cvtph_ps(load_bits<__m128i>(p));
}
inline __m128i bits_of(Floats v, fp16) {
  return _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
}
inline void store(fp16* p, Floats v) { store_bits(p, bits_of(v, fp16())); }
inline Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
inline Doubles fma(Doubles a, Doubles b, Doubles c) {
  return (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
#elif defined(__aarch64__)
template <>
inline Floats load<float>(const fp16* p) {
  return (Floats)vcvt_f32_f16(load_bits<float16x4_t>(p));
}
inline void store(fp16* p, Floats v) { store_bits(p, vcvt_f16_f32((float32x4_t)v)); }
inline Floats fma(Floats a, Floats b, Floats c) {
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
inline Doubles fma(Doubles a, Doubles b, Doubles c) {
  return (Doubles)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
#else
template <class V>
inline V fma(V a, V b, V c) {
  for (int i = 0; i < int(sizeof(V) / sizeof(a[0])); ++i) a[i] = std::fma(a[i], b[i], c[i]);
  return a;
}
#endif

// Reduces over the elements: combines the upper and the lower half until one element is left.
template <class Op, class V>
inline auto reduce(V v) {
  constexpr int count = sizeof(V) / sizeof(v[0]);
#ifdef __clang__
  std::remove_reference_t<decltype(v[0])> items[count];
  std::memcpy(items, &v, sizeof(v));
  for (int half = count / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) items[i] = Op::of(items[i], items[i + half]);
  return items[0];
#else
  decltype(v == v) lane;
  for (int i = 0; i < count; ++i) lane[i] = i;
  for (int half = count / 2; half > 0; half /= 2) v = Op::of(v, __builtin_shuffle(v, lane ^ half));
  return v[0];
#endif
}

}  // namespace simd

using simd::fma;
