// SPDX-License-Identifier: MIT
// The emulator's async_copy.cuh: copies that arrive no sooner than they are waited for.
#pragma once

template <int bytes>
__device__ inline void async_copy(void* shared, const void* global) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  emulation_async_copy(shared, global, bytes);
}

__device__ inline void async_commit() { emulation_async_commit(); }

template <int pending>
__device__ inline void async_wait() {
  static_assert(pending >= 0, "a number of groups");
  emulation_async_wait(pending);
}
