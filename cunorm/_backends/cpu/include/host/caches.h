// SPDX-License-Identifier: MIT
// Prefetches, and memory that stays in a core's caches from one pass to the next.
#pragma once
#include "memory.cuh"
#include "shared.h"

inline constexpr int cache_line = 64;

// GCC drops calls of a function that only prefetches, as if the function had no effect. So these
// functions are always inlined.
template <class B, class T>
__forceinline__ void prefetch_part(const T* row, index_t column) {
  constexpr int to_read = 0, to_second_level = 2;
  for (int i = 0; i < part_elements<B>; i += cache_line / int(sizeof(T)))
    __builtin_prefetch(row + column + i, to_read, to_second_level);
}
template <class B>
inline void prefetch_part(const absent*, index_t) {}

template <class B, class T>
__forceinline__ void prefetch_output_part(T* row, index_t column) {
  constexpr int to_write = 1, to_first_level = 3;
  if constexpr (streams<B, T>) return;
  for (int i = 0; i < part_elements<B>; i += cache_line / int(sizeof(T)))
    __builtin_prefetch(row + column + i, to_write, to_first_level);
}
template <class B>
inline void prefetch_output_part(absent*, index_t) {}

SHARED {
  struct alignas(cache_line) CacheLine {
    unsigned char bytes[cache_line];
  };
  template <index_t lines>
  inline thread_local CacheLine kept_lines[lines];
}

// Returns the thread's memory for packs. The asm hides from GCC that the address is that of
// thread-local memory; otherwise GCC would look it up in each step of a loop.
template <class V, int packs>
inline V* kept_packs() {
  if constexpr (packs == 0) {
    return nullptr;
  } else {
    constexpr index_t lines = (sizeof(V) * packs + cache_line - 1) / cache_line;
    V* address = reinterpret_cast<V*>(kept_lines<lines>);
    asm("" : "+r"(address));
    return address;
  }
}
