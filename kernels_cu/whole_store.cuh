// SPDX-License-Identifier: MIT
// A store that no compiler cuts into smaller ones. The CPU build replaces this file.
#pragma once

template <class A>
__device__ inline void global_store_whole(A* address, A value) {
  if constexpr (sizeof(A) == 16 && alignof(A) == 16) {
    uint4 word;
    memcpy(&word, &value, sizeof(word));
    __stwb(reinterpret_cast<uint4*>(address), word);
  } else if constexpr (sizeof(A) == 8 && alignof(A) == 8) {
    uint2 word;
    memcpy(&word, &value, sizeof(word));
    __stwb(reinterpret_cast<uint2*>(address), word);
  } else {
    *address = value;
  }
}
