// SPDX-License-Identifier: MIT
// The operations of reductions. V is a number; on a CPU also a SIMD vector.
#pragma once
#include "types.cuh"

struct Sum {
  template <class V>
  static __device__ V identity() {
    return V{};
  }
  template <class V>
  static __device__ V of(V a, V b) {
    return a + b;
  }
};

// The maximum, or NaN if any value is NaN.
struct Max {
  template <class V>
  static __device__ V identity() {
    return V{} - 0x1p127f * 2;  // -infinity
  }
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

// A pack of identities, with which reductions begin.
template <class Op, class V, int n>
struct FilledPack : Pack<V, n> {
  __device__ FilledPack() {
    unrolled<n>([&](int i) { this->item[i] = Op::template identity<V>(); });
  }
};
template <class Op, class V, int n>
using Identities = either<same_type<Op, Sum>, Pack<V, n>, FilledPack<Op, V, n>>;

// Reduces values that come one after the other.
template <class Op, class V>
struct Accumulator {
  V value = Op::template identity<V>();

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
