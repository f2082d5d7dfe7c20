// SPDX-License-Identifier: MIT
// Pack: the consecutive elements that one thread handles at a time.
//
// How many there are follows from the width and the operands' types alone, never from a pointer's
// alignment, so the order in which a row is summed is part of what the row's width means.
#pragma once
#include "dtypes.cuh"

template <class T, int size>
struct Pack {
  T item[size];
};
template <int size>
struct Pack<absent, size> {};

// f(0), f(1), ... f(count - 1) with constant arguments, so that what they index can stay in
// registers.
template <int count, int first = 0, class F>
__device__ inline void unrolled(const F& f) {
  if constexpr (first < count) {
    f(first);
    unrolled<count, first + 1>(f);
  }
}
