// SPDX-License-Identifier: MIT
// Blocks that form a cluster: a barrier for all their threads, and each other's shared memory.
// From compute capability 9.0 on. The CPU build replaces this file.
#pragma once

// How many blocks form a cluster is compiled in, as CuPy's launches have no attribute for it.
#if CLUSTER > 1
#define CLUSTER_LAUNCH __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_LAUNCH
#endif

// The number of the block in its cluster.
__device__ inline int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Every thread of every block of the cluster waits here for all others, and then sees their stores.
__device__ inline void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n\t"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// The value that block `rank` has in the shared variable at *address of this block.
template <class T>
__device__ inline T cluster_load(const T* address, int rank) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a register holds the value");
  const unsigned here = static_cast<unsigned>(__cvta_generic_to_shared(address));
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  T value;
  if constexpr (sizeof(T) == 4)
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
  else
    asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(value) : "r"(there) : "memory");
  return value;
}
