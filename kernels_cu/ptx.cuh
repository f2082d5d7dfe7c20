// SPDX-License-Identifier: MIT
// What CUDA C++ has no plain word for: shared memory that the launch gives, launches that overlap,
// copies that go on by themselves, clusters of blocks. The CPU build replaces this file.
#pragma once
#include "memory.cuh"

// Shared memory of the size that the launch says, aligned for every type: parts of it, one after
// the other.
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

// Has the second-level cache fetch what lies there.
__device__ inline void prefetch_pack(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// ---- Launches in pairs, from compute capability 9.0 on: the second begins while the first runs,
// if the host allows it (Launch.dependent of _core/build.py), and else after it.

// In the first: once each block has said so, or has ended, blocks of the second find room. Only a
// build that has a second says so, as others' kernels may read before they wait.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// In the second: waits until the first has ended, and then sees what it stored. Each thread waits,
// before it touches global memory: so the second ends after the first.
__device__ inline void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- Copies from global to shared memory, from compute capability 8.0 on. A thread's copies since
// its last commit form a group. Once it has waited for the group, the thread itself sees what was
// copied; others do behind a barrier.

// Starts a copy; both addresses are multiples of `bytes`. One of 16 bytes passes by the L1 cache.
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

// Ends a group, be it empty.
__device__ inline void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups but the newest `pending`.
template <int pending>
__device__ inline void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Packs of an operand in shared memory. Those of neighbouring threads are neighbours, so that no
// two of them wait for the same bank.
template <class B, class T>
struct SharedPacks {
  using Moved = Words<B, T>;
  using Word = typename Moved::Word;
  Word* words;

  // So many for each thread.
  __device__ SharedPacks(SharedMemory& memory, int packs)
      : words(memory.take<Word>(packs * Moved::count * B::threads)) {}

  // Starts to copy a pack to the thread's place of that number, or copies it.
  template <bool async = true>
  __device__ void copy(int number, const T* pack) const {
    const auto* const from = reinterpret_cast<const Word*>(pack);
    unrolled<Moved::count>([&](int i) {
      if constexpr (async)
        async_copy<sizeof(Word)>(place(number, i), from + i);
      else
        *place(number, i) = from[i];
    });
  }
  __device__ LoadedPack<B, T> load_where(bool live, int number) const {
    Moved moved = {};
    if (live) unrolled<Moved::count>([&](int i) { moved.word[i] = *place(number, i); });
    return unpacked<B, T>(moved);
  }

 private:
  __device__ Word* place(int number, int word) const {
    return words + (number * Moved::count + word) * B::threads + threadIdx.x;
  }
};

// ---- Clusters: blocks that store to each other's shared memory. From compute capability 9.0 on.
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

// An mbarrier: its phase ends when it was told once what bytes to expect, and they have come.
using Arrivals = unsigned long long;

__device__ inline void begin_arrivals(Arrivals& arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&arrivals))
               : "memory");
}

// A thread of a cluster says that its arrivals have begun, and later, before it sends anything,
// waits until all others have said so. It sees which arrivals have begun then, but no other stores.
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

// Waits for the end of the phase, which is an even or an odd one, and then sees what has come. It
// acquires at the block's scope, though data come from the cluster, as CUTLASS does: an acquire of
// the cluster's scope would empty the L1 cache, which holds nothing of shared memory.
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

// Stores a value to *place in block `rank`, of whose arrivals its bytes are some.
template <class T>
__device__ inline void cluster_send(T value, T* place, Arrivals& arrivals, int rank) {
  const auto there = [&](const void* shared) {
    unsigned address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(shared_address(shared)), "r"(rank));
    return address;
  };
#define SEND "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
  if constexpr (sizeof(T) == 4)
    asm volatile(SEND ".b32 [%0], %1, [%2];" ::"r"(there(place)), "f"(value), "r"(there(&arrivals))
                 : "memory");
  else
    asm volatile(SEND ".b64 [%0], %1, [%2];" ::"r"(there(place)), "d"(value), "r"(there(&arrivals))
                 : "memory");
#undef SEND
}
