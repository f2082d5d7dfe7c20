// SPDX-License-Identifier: MIT
// The functions through which every byte of global memory goes.
#pragma once

template <class A>
__device__ inline A global_load(const A* address) {
  return *address;
}

template <class A>
__device__ inline void global_store(A* address, A value) {
  *address = value;
}
