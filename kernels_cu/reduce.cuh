// SPDX-License-Identifier: MIT
// Sums in a fixed order: over a thread's packs, over the lanes of a warp, over the warps of a
// block, over the blocks of a cluster.
#pragma once
#include "cluster.cuh"
#include "items.cuh"

// A sum of runs. The CPU's one thread has many of them, so that it takes from each what adding the
// last one gave too much (Kahan's sum), unless that was infinite; a GPU's has few.
template <class B, class V>
struct RunSum {
  V sum = {}, excess = {};

  __device__ void add(V v) {
    if constexpr (B::threads == 1) {
      v -= excess;
      const V next = sum + v;
      excess = next - next == V{} ? (next - sum) - v : V{};
      sum = next;
    } else {
      sum += v;
    }
  }
};

// One thread's sum over its packs. Item i of every pack is added to sum i; after a run of at most
// 16 packs, end_run() folds those sums into one and adds it to the recent runs' sum, which moves on
// after 32 runs. So no chain of additions is long, which would add up its roundings.
template <class B>
struct LaneSum {
  using C = typename B::compute_t;
  static constexpr int items = items_per_pack<B>;
  static constexpr int recent_packs = 16 * 32;  // after which the sum moves on
  Items<B> run = {};
  RunSum<B, C> recent_runs;
  C total = 0;
  int runs = 0;

  template <class At>
  __device__ void add(At at, Item<B> v) {
    run.item[at.index] += v;
  }
  template <class At>
  __device__ void add_product(At at, Item<B> a, Item<B> b) {
    run.item[at.index] = fma(a, b, run.item[at.index]);
  }

  __device__ void end_run() {
    fold<items / 2>();
    recent_runs.add(item_sum(run.item[0]));
    unrolled<items>([&](int i) { run.item[i] = Item<B>{}; });
    if (++runs % 32 != 0) return;
    total += recent_runs.sum;
    recent_runs = {};
  }

  __device__ C value() const { return total + recent_runs.sum; }

 private:
  template <int half>
  __device__ void fold() {
    unrolled<half>([&](int i) { run.item[i] += run.item[i + half]; });
    if constexpr (half > 1) fold<half / 2>();
  }
};

// Every thread of each aligned run of `threads` lanes of a warp gets the sums over the run.
template <int threads, class C, int n>
__device__ inline Pack<C, n> warp_all_reduce(Pack<C, n> v) {
  static_assert(threads <= 32 && (threads & (threads - 1)) == 0,
                "a run of lanes is a power of two");
#pragma unroll
  for (int mask = threads / 2; mask > 0; mask /= 2) {
#pragma unroll
    for (int i = 0; i < n; ++i) v.item[i] += __shfl_xor_sync(0xffffffffu, v.item[i], mask);
  }
  return v;
}

// What the warps of a block exchange. Two halves used in turn: a warp may write its next sums while
// another still reads the last ones, so one barrier a reduction is enough.
template <class C, int warps>
struct BlockScratch {
  static constexpr int max_sums = 3;
  C sums[2][warps][max_sums];
};

// Leaves each warp's sums where the other warps find them, behind a barrier.
template <int warps, class C, int n>
__device__ inline auto& share_sums(Pack<C, n> v, BlockScratch<C, warps>& scratch, int& turn) {
  static_assert(warps <= 32 && n <= BlockScratch<C, warps>::max_sums,
                "scratch holds a few sums of up to 32 warps");
  v = warp_all_reduce<32>(v);
  auto& sums = scratch.sums[turn++ % 2];
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < n; ++i) sums[threadIdx.x / 32][i] = v.item[i];
  }
  return sums;
}

// Every thread of the block gets the sums over the block. `turn` counts this thread's calls.
template <int warps, class C, int n>
__device__ inline Pack<C, n> block_all_reduce(Pack<C, n> v, BlockScratch<C, warps>& scratch,
                                              int& turn) {
  const auto& sums = share_sums(v, scratch, turn);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < n; ++i) v.item[i] = sums[threadIdx.x % warps][i];
  return warp_all_reduce<warps>(v);
}

// The same over the blocks of a cluster. A block must not end before all have read its scratch.
template <int warps, int blocks, class C, int n>
__device__ inline Pack<C, n> cluster_all_reduce(Pack<C, n> v, BlockScratch<C, warps>& scratch,
                                                int& turn) {
  constexpr int shared_sums = warps * blocks, lanes = shared_sums < 32 ? shared_sums : 32;
  const auto& sums = share_sums(v, scratch, turn);
  cluster_barrier();
  v = {};
#pragma unroll
  for (int first = 0; first < shared_sums; first += lanes) {
    const int warp = first + threadIdx.x % lanes;
#pragma unroll
    for (int i = 0; i < n; ++i) v.item[i] += cluster_load(&sums[warp % warps][i], warp / warps);
  }
  return warp_all_reduce<lanes>(v);
}
