// SPDX-License-Identifier: MIT
// The transposition of square blocks of elements, in SIMD registers.
#pragma once
#include <utility>

#include "simd.h"

namespace simd {

// The bits of a row of a block: as many elements as a register has, but of 2 bytes half as many.
template <int size>
struct BlockRow;
template <>
struct BlockRow<2> {
  typedef uint16_t type __attribute__((vector_size(bytes / 2)));
};
template <>
struct BlockRow<4> {
  typedef uint32_t type __attribute__((vector_size(bytes)));
};
template <>
struct BlockRow<8> {
  typedef uint64_t type __attribute__((vector_size(bytes)));
};

// Returns the elements of a and b in turn: of their lower or of their upper halves.
template <bool upper, class V, int... i>
__forceinline__ V interleaved(V a, V b, std::integer_sequence<int, i...>) {
  constexpr int count = sizeof...(i), half = upper ? count / 2 : 0;
#ifdef __clang__
  return __builtin_shufflevector(a, b, (half + i / 2 + i % 2 * count)...);
#else
  using Lanes = decltype(a == b);
  return __builtin_shuffle(a, b, Lanes{(half + i / 2 + i % 2 * count)...});
#endif
}

// Transposes a block: each step is a perfect shuffle of all elements.
template <class V, int count, int steps = count>
__forceinline__ void transpose(V (&rows)[count]) {
  if constexpr (steps > 1) {
    V shuffled[count];
    unrolled<count / 2>([&](int i) {
      constexpr std::make_integer_sequence<int, count> lanes;
      shuffled[2 * i] = interleaved<false>(rows[i], rows[i + count / 2], lanes);
      shuffled[2 * i + 1] = interleaved<true>(rows[i], rows[i + count / 2], lanes);
    });
    transpose<V, count, steps / 2>(shuffled);
    unrolled<count>([&](int i) { rows[i] = shuffled[i]; });
  }
}

}  // namespace simd
