// SPDX-License-Identifier: MIT
// Storage types, and `convert`, which converts between any two of them.
//
// An operand is stored in fp16, bf16, fp32 or fp64; kernels compute in fp32 or fp64. `absent` is
// the type of an operand that a build does not have. Code for an optional operand stands under `if
// constexpr (present<...>)`.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using fp16 = __half;
using bf16 = __nv_bfloat16;
using fp32 = float;
using fp64 = double;
using index_t = long long;

template <class A, class B>
inline constexpr bool same_type = false;
template <class A>
inline constexpr bool same_type<A, A> = true;

struct absent {};
template <class T>
inline constexpr bool present = !same_type<const T, const absent>;

template <bool condition, class First, class Second>
struct Either {
  using type = First;
};
template <class First, class Second>
struct Either<false, First, Second> {
  using type = Second;
};
template <bool condition, class First, class Second>
using either = typename Either<condition, First, Second>::type;

// Whether the columns of a row lie apart in memory and neighbouring rows side by side, as the
// channels and positions of an image with channels first do.
#ifndef STRIDED_ROWS
#define STRIDED_ROWS false
#endif
inline constexpr bool strided_rows = STRIDED_ROWS;

// A number in a kernel's argument struct. It takes eight bytes.
template <class C>
struct alignas(8) Number {
  C value;
  __device__ operator C() const { return value; }
};

__device__ inline fp32 to_wide(fp16 v) { return __half2float(v); }
__device__ inline fp32 to_wide(bf16 v) { return __bfloat162float(v); }
__device__ inline fp16 to_narrow(fp32 v, fp16) { return __float2half_rn(v); }
__device__ inline fp16 to_narrow(fp64 v, fp16) { return __double2half(v); }
__device__ inline bf16 to_narrow(fp32 v, bf16) { return __float2bfloat16_rn(v); }
__device__ inline bf16 to_narrow(fp64 v, bf16) { return __double2bfloat16(v); }

// convert<To>(v) rounds once, to nearest even.
template <class To, class From>
__device__ inline To convert(From v) {
  if constexpr (same_type<To, From>)
    return v;
  else if constexpr (sizeof(From) == 2)
    return to_wide(v);
  else if constexpr (sizeof(To) == 2)
    return to_narrow(v, To());
  else
    return static_cast<To>(v);
}

// An array of values, such as B::pack consecutive elements that one thread handles together.
// B::pack determines the order of sums, so it does not depend on the alignment of operands.
template <class T, int size>
struct Pack {
  T item[size];
};
template <int size>
struct Pack<absent, size> {};

// Calls f(0), f(1), ... f(count - 1). The arguments are constants, so that arrays which they index
// can stay in registers.
template <int count, int first = 0, class F>
__device__ inline void unrolled(const F& f) {
  if constexpr (first < count) {
    f(first);
    unrolled<count, first + 1>(f);
  }
}

// The offset of an index along one or two axes.
struct AxesMap {
  index_t inner, outer_stride, inner_stride;  // inner: the size of the last axis

  template <int axes>
  __device__ index_t at(index_t index) const {
    if (axes == 1 || index < inner) return index * inner_stride;
    return index / inner * outer_stride + index % inner * inner_stride;
  }
};

// The distance between rows of sums in memory, in elements: whole cache lines of a CPU.
__device__ inline index_t sum_pitch(index_t width) { return (width + 15) / 16 * 16; }
