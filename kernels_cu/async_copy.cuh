// SPDX-License-Identifier: MIT
// Copies from global to shared memory that go on while the thread that made them computes.
// From compute capability 8.0 on.
//
// A thread's copies since its last commit form a group. Once it has waited for the group, the
// thread itself sees what was copied; others do behind a barrier.
#pragma once

// Starts a copy; both addresses are multiples of `bytes`. One of 16 bytes passes by the L1 cache.
template <int bytes>
__device__ inline void async_copy(void* shared, const void* global) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(bytes)
                 : "memory");
}

// Ends a group, be it empty.
__device__ inline void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups but the newest `pending`.
template <int pending>
__device__ inline void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
