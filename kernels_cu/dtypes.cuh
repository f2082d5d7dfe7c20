// SPDX-License-Identifier: MIT
// Storage types and the one conversion between any two of them.
//
// An operand is stored in fp16, bf16, fp32 or fp64 and computed on in fp32 or fp64. `absent` is the
// type of an operand that a build does not have: code that handles an operand stands under `if
// constexpr (present<...>)`.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using fp16 = __half;
using bf16 = __nv_bfloat16;
using fp32 = float;
using fp64 = double;
using index_t = long long;

struct absent {};
template <class T>
inline constexpr bool present = true;
template <>
inline constexpr bool present<absent> = false;
template <>
inline constexpr bool present<const absent> = false;

// The first of two types that is present.
template <class First, class Second>
struct FirstPresent {
  using type = First;
};
template <class Second>
struct FirstPresent<absent, Second> {
  using type = Second;
};
template <class First, class Second>
using first_present = typename FirstPresent<First, Second>::type;

// The first type if the condition holds, else the second.
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

template <class A, class B>
inline constexpr bool same_type = false;
template <class A>
inline constexpr bool same_type<A, A> = true;

// An operand's pointer where it is to be read, else that of an absent operand.
template <bool condition, class T>
__device__ inline auto only_if(const T* pointer) {
  if constexpr (condition)
    return pointer;
  else
    return static_cast<const absent*>(nullptr);
}

// convert<To>(v) rounds once, to nearest even.
template <class To, class From>
struct Conversion {
  static __device__ To apply(From v) { return static_cast<To>(v); }
};
template <class T>
struct Conversion<T, T> {
  static __device__ T apply(T v) { return v; }
};
template <>
struct Conversion<fp32, fp16> {
  static __device__ fp32 apply(fp16 v) { return __half2float(v); }
};
template <>
struct Conversion<fp64, fp16> {
  static __device__ fp64 apply(fp16 v) { return __half2float(v); }
};
template <>
struct Conversion<fp32, bf16> {
  static __device__ fp32 apply(bf16 v) { return __bfloat162float(v); }
};
template <>
struct Conversion<fp64, bf16> {
  static __device__ fp64 apply(bf16 v) { return __bfloat162float(v); }
};
template <>
struct Conversion<fp16, fp32> {
  static __device__ fp16 apply(fp32 v) { return __float2half_rn(v); }
};
template <>
struct Conversion<fp16, fp64> {
  static __device__ fp16 apply(fp64 v) { return __double2half(v); }
};
template <>
struct Conversion<bf16, fp32> {
  static __device__ bf16 apply(fp32 v) { return __float2bfloat16_rn(v); }
};
template <>
struct Conversion<bf16, fp64> {
  static __device__ bf16 apply(fp64 v) { return __double2bfloat16(v); }
};

template <class To, class From>
__device__ inline To convert(From v) {
  return Conversion<To, From>::apply(v);
}
