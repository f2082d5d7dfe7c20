// SPDX-License-Identifier: MIT
// CUDA's built-ins for a kernel under emulation; included before the kernel's source.
//
// Every CUDA thread is a fiber of its own. The lanes of a warp wait for each other at shuffles, the
// threads of a block at barriers, the blocks of a cluster at cluster barriers, and between two such
// meetings a thread runs undisturbed. What this proves: indices, reductions, tails, barriers that
// are needed and missing, barriers that not all threads reach, accesses outside an array, bytes
// moved. Of clusters: that no block reads the shared memory of one that has not started, has ended
// or is of another cluster. Of asynchronous copies: that each is waited for by the thread that made
// it, before that reads the destination, and that nothing writes the source in the meantime.
//
// What it does not prove: the memory model (no two threads ever run at once, so that a store is
// seen by all the others at once and in order, and a race shows only where one of the orders tried
// changes the result); that a barrier stands between a thread's wait for a copy and another's use
// of it, as the wait shows the data to all (again, an order may); that a block reads another's
// shared memory by cluster_load alone; the alignment of accesses that do not go through access.cuh,
// cluster.cuh and async_copy.cuh; that the kernel ends (nothing stops an endless loop) or fits a
// GPU's registers and shared memory, or that a cluster of its size can run; speed.
//
// A __shared__ array must be declared in a function that is not a template, as the arrays share a
// linker section: the scheduler fills it with NaN bytes before each block
// and keeps a copy for each block of a cluster.
#pragma once
#include <cstring>

#include "emulation.h"

using std::memcpy;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
// `used` keeps the compiler from reasoning that nobody else reads or writes the array.
#define __shared__ static __attribute__((used, section("cunorm_shared")))

EmulationIndex threadIdx, blockIdx, blockDim, gridDim;
extern "C" __attribute__((weak, visibility("hidden"))) char __start_cunorm_shared[],
    __stop_cunorm_shared[];

inline void __syncthreads() { emulation_block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulation_warp_barrier(mask); }

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int distance) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA shuffles words of 32 and 64 bits");
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = emulation_shuffle_xor(mask, bits, static_cast<unsigned>(distance), sizeof(T));
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}

// The mathematical functions that kernels use. <cmath> would double the time a kernel compiles.
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float sqrt(float v) { return __builtin_sqrtf(v); }
inline double sqrt(double v) { return __builtin_sqrt(v); }
inline float exp(float v) { return __builtin_expf(v); }
inline double exp(double v) { return __builtin_exp(v); }
inline float erfc(float v) { return __builtin_erfcf(v); }
inline double erfc(double v) { return __builtin_erfc(v); }
inline float tanh(float v) { return __builtin_tanhf(v); }
inline double tanh(double v) { return __builtin_tanh(v); }
inline float fabs(float v) { return __builtin_fabsf(v); }
inline double fabs(double v) { return __builtin_fabs(v); }
inline float __fdividef(float a, float b) { return a / b; }

template <class Arguments>
inline void emulation_call(void (*kernel)(Arguments), const void* arguments) {
  kernel(*static_cast<const Arguments*>(arguments));
}
template <class Arguments>
constexpr long long emulation_argument_bytes(void (*)(Arguments)) {
  return sizeof(Arguments);
}

// Stands after the kernel's source. All but this one symbol is hidden (-fvisibility=hidden), so
// that the hundreds of kernels in a test process share nothing.
#define EMULATION_KERNEL(NAME)                                                              \
  extern "C" __attribute__((visibility("default"))) const EmulationKernel emulation_kernel; \
  const EmulationKernel emulation_kernel = {                                                \
      [](const void* arguments) { emulation_call(NAME, arguments); },                       \
      emulation_argument_bytes(NAME),                                                       \
      &threadIdx,                                                                           \
      &blockIdx,                                                                            \
      &blockDim,                                                                            \
      &gridDim,                                                                             \
      __start_cunorm_shared,                                                                \
      __stop_cunorm_shared};
