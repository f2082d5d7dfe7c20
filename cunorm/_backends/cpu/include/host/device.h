// SPDX-License-Identifier: MIT
// Defines for a CPU what kernels use of CUDA. A block has one thread, so barriers and shuffles do
// nothing. launch.h runs the blocks on all cores.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "gang.h"

// `flatten` inlines all calls; otherwise accumulators would not stay in registers.
#define __global__ __attribute__((flatten, noinline))
#define __device__
#define __forceinline__ __attribute__((always_inline)) inline
#define __shared__ thread_local static
#define __launch_bounds__(...)

using std::fma;
using std::max;
using std::memcpy;
using std::min;
using std::sqrt;

struct Dim3 {
  unsigned x = 0;
};
constexpr Dim3 threadIdx;
SHARED { inline thread_local Dim3 blockIdx, gridDim; }

inline void __syncthreads() {}
template <class T>
inline T __shfl_xor_sync(unsigned, T v, int) {
  return v;
}
