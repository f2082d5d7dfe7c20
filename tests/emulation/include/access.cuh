// SPDX-License-Identifier: MIT
// The emulator's access.cuh: checks and counts every access to global memory.
#pragma once

template <class A>
__device__ inline A global_load(const A* address) {
  emulation_access(address, sizeof(A), alignof(A), false);
  return *address;
}

template <class A>
__device__ inline void global_store(A* address, A value) {
  emulation_access(address, sizeof(A), alignof(A), true);
  *address = value;
}
