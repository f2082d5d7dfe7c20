// SPDX-License-Identifier: MIT
// Dynamic shared memory, dependent launches, asynchronous copies, and clusters of blocks. Inline
// PTX does what CUDA C++ cannot do as simply. The CPU build replaces this file.
#pragma once
#include "memory.cuh"

// Hands out the dynamic shared memory in parts, which are aligned for every type.
struct SharedMemory {
  unsigned char* next;

  __device__ SharedMemory() {
    extern __shared__ uint4 launch_shared[];
    next = reinterpret_cast<unsigned char*>(launch_shared);
  }
  template <class T>
  __device__ T* take(int count) {
    T* const part = reinterpret_cast<T*>(next);
    next += count * sizeof(T);
    return part;
  }
};

__device__ inline unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Prefetches into the second-level cache.
__device__ inline void prefetch_pack(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// ---- Dependent launches, from compute capability 9.0 on. If the host allows it (Launch.dependent
// of _core/build.py), the second launch may begin while the first still runs.

// Once each block of the first launch has called this or ended, the second launch may begin. A
// build that no second launch follows does not call it: an unrelated kernel might begin too early.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Each thread of the second launch calls wait_for_prerequisites before it touches global memory. It
// waits there until the first launch has ended and the first launch's stores are visible.
__device__ inline void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- Asynchronous copies from global to shared memory, from compute capability 8.0 on. A thread's
// copies since its last commit form a group. A thread that has waited for its group sees what was
// copied; other threads see it after a barrier.

// Starts a copy; both addresses are multiples of `bytes`. A copy of 16 bytes bypasses the L1 cache.
template <int bytes>
__device__ inline void async_copy(void* shared, const void* global) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
                 "l"(global)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(shared)),
                 "l"(global), "n"(bytes)
                 : "memory");
}

// Ends a group, which may be empty.
__device__ inline void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups except the `pending` newest groups.
template <int pending>
__device__ inline void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Packs of an operand in shared memory. Neighbouring threads have neighbouring words, so there are
// no bank conflicts.
template <class B, class T>
struct SharedPacks {
  using Moved = Words<B, T>;
  using Word = typename Moved::Word;
  Word* words;

  // Makes room for `packs` packs of each thread.
  __device__ SharedPacks(SharedMemory& memory, int packs)
      : words(memory.take<Word>(packs * Moved::count * B::threads)) {}

  // Copies a pack to the thread's pack `number`, asynchronously or at once.
  template <bool async = true>
  __device__ void copy(int number, const T* pack) const {
    const auto* const from = reinterpret_cast<const Word*>(pack);
    unrolled<Moved::count>([&](int i) {
      if constexpr (async)
        async_copy<sizeof(Word)>(address_of(number, i), from + i);
      else
        *address_of(number, i) = from[i];
    });
  }
  __device__ LoadedPack<B, T> load_where(bool live, int number) const {
    Moved moved = {};
    if (live) unrolled<Moved::count>([&](int i) { moved.word[i] = *address_of(number, i); });
    return unpacked<B, T>(moved);
  }

 private:
  __device__ Word* address_of(int number, int word) const {
    return words + (number * Moved::count + word) * B::threads + threadIdx.x;
  }
};

// ---- Clusters, from compute capability 9.0 on: blocks that store to each other's shared memory.
// The size of a cluster is a macro, because CuPy's launches have no attribute for it.
#if CLUSTER > 1
#define CLUSTER_LAUNCH __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_LAUNCH
#endif

// The rank of the block in its cluster.
__device__ inline int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// An mbarrier. Its phase ends when one thread has told it how many bytes to expect and that many
// bytes have arrived.
using Arrivals = unsigned long long;

__device__ inline void begin_arrivals(Arrivals& arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&arrivals))
               : "memory");
}

// All threads call cluster_begun; a thread that initializes arrivals does so before. All threads
// call wait_for_cluster before their first send. It waits until all threads of the cluster have
// called cluster_begun. Then the initialized arrivals are visible, but no other stores.
__device__ inline void cluster_begun() {
  asm volatile(
      "fence.mbarrier_init.release.cluster;\n\t"
      "barrier.cluster.arrive.relaxed.aligned;" ::
          : "memory");
}
__device__ inline void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ inline void expect_arrivals(Arrivals& arrivals, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&arrivals)),
      "r"(bytes)
      : "memory");
}

// Waits until the phase of this parity ends. Then the data that have arrived are visible. As in
// CUTLASS, the acquire is at block scope, although the data come from the cluster: an acquire at
// cluster scope would invalidate the L1 cache, which holds no shared memory.
__device__ inline void wait_for_arrivals(const Arrivals& arrivals, int parity) {
  for (int ended = 0; !ended;)
    asm volatile(
        "{.reg .pred ended;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, ended;}"
        : "=r"(ended)
        : "r"(shared_address(&arrivals)), "r"(parity)
        : "memory");
}

// Stores a value to *address in block `rank`. The bytes count as arrivals in that block.
template <class T>
__device__ inline void cluster_send(T value, T* address, Arrivals& arrivals, int rank) {
  const auto there = [&](const void* shared) {
    unsigned mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(mapped)
        : "r"(shared_address(shared)), "r"(rank));
    return mapped;
  };
#define SEND "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
  if constexpr (sizeof(T) == 4)
    asm volatile(SEND ".b32 [%0], %1, [%2];" ::"r"(there(address)), "f"(value),
                 "r"(there(&arrivals))
                 : "memory");
  else
    asm volatile(SEND ".b64 [%0], %1, [%2];" ::"r"(there(address)), "d"(value),
                 "r"(there(&arrivals))
                 : "memory");
#undef SEND
}
