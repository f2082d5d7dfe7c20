// SPDX-License-Identifier: MIT
// A store of a whole access, under emulation: as any other.
#pragma once
#include "access.cuh"

template <class A>
inline void global_store_whole(A* address, A value) {
  global_store(address, value);
}
