// SPDX-License-Identifier: MIT
// The operations of reductions, which begin with 0. V is an item or a number.
#pragma once
#include "types.cuh"

struct Sum {
  template <class V>
  static __device__ V of(V a, V b) {
    return a + b;
  }
};

// The maximum of numbers from 0 on, or NaN if any is NaN.
struct Max {
  template <class V>
  static __device__ V of(V a, V b) {
    return (a > b) | (a != a) ? a : b;
  }
#if __CUDA_ARCH__ >= 800
  static __device__ float of(float a, float b) {
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(b));
    return a;
  }
#endif
};

// Reduces values that come one after the other.
template <class Op, class V>
struct Accumulator {
  V value = {};

  __device__ void add(V v) { value = Op::of(value, v); }
};

// Kahan's summation: rounding errors do not add up. An infinite sum has no compensation.
template <class V>
struct Accumulator<Sum, V> {
  V value = {}, compensation = {};

  __device__ void add(V v) {
    v -= compensation;
    const V next = value + v;
    compensation = next - next == V{} ? (next - value) - v : V{};
    value = next;
  }
};
