// SPDX-License-Identifier: MIT
// Stores of vectors of fp64 as 16 bits, rounded once.
#pragma once
#include "simd_stores.h"

namespace simd {

// Rounds to float so that another rounding, to 16 bits, gives what one of the double would: of two
// floats around it, the one whose last bit is set.
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
inline Floats round_to_odd(Doubles low, Doubles high) {
  const FloatsOfDoubles halves[] = {round_to_odd(low), round_to_odd(high)};
  return load_bits<Floats>(halves);
}
template <class Half>
inline void store_half(Half* p, Doubles v) {
  Half halves[lanes<float>];
  store(halves, round_to_odd(v, Doubles{}));
  std::memcpy(p, halves, lanes<double> * sizeof(Half));
}
// As for loads, called and not inlined.
__attribute__((noinline)) inline void store(fp16* p, Doubles v) { store_half(p, v); }
__attribute__((noinline)) inline void store(bf16* p, Doubles v) { store_half(p, v); }

template <int count, class Half>
inline void store_all_halves(Half* p, const Doubles* v) {
  for (int i = 0; i + 1 < count; i += 2) store(p + i * lanes<double>, round_to_odd(v[i], v[i + 1]));
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
