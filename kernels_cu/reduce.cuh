// SPDX-License-Identifier: MIT
// Sums in a fixed order: over a thread's packs, over the lanes of a warp, over the warps of a
// block.
#pragma once
#include "memory.cuh"

// One thread's sum over its packs, kept item by item: item i of every pack is added to sum i, and
// end_pack() called after each pack. Every 16 packs the sums move up a level, and every 32 times
// from there to the last, so that no chain of additions is long, which would add up its roundings.
template <class B>
struct LaneSum {
  static constexpr int items = items_per_pack<B>;
  Pack<Item<B>, items> recent = {}, middle = {}, total = {};
  int packs = 0;

  template <class At>
  __device__ void add(At at, Item<B> v) {
    recent.item[at.index] += v;
  }
  template <class At>
  __device__ void add_product(At at, Item<B> a, Item<B> b) {
    recent.item[at.index] = fma(a, b, recent.item[at.index]);
  }

  __device__ void end_pack() {
    if (++packs % 16 != 0) return;
    move_up(recent, middle);
    if (packs % (16 * 32) == 0) move_up(middle, total);
  }

  __device__ Pack<Item<B>, items> by_item() const {
    if (packs < 16) return recent;
    Pack<Item<B>, items> sum;
    unrolled<items>(
        [&](int i) { sum.item[i] = total.item[i] + (middle.item[i] + recent.item[i]); });
    return sum;
  }

  // The sum over all items.
  __device__ typename B::compute_t value() const {
    auto sum = by_item();
    fold<items / 2>(sum);
    return item_sum(sum.item[0]);
  }

 private:
  static __device__ void move_up(Pack<Item<B>, items>& from, Pack<Item<B>, items>& to) {
    unrolled<items>([&](int i) { to.item[i] += from.item[i]; });
    from = {};
  }

  template <int half>
  static __device__ void fold(Pack<Item<B>, items>& sum) {
    unrolled<half>([&](int i) { sum.item[i] += sum.item[i + half]; });
    if constexpr (half > 1) fold<half / 2>(sum);
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

// Every thread of the block gets the sums over the block. `turn` counts this thread's calls.
template <int warps, class C, int n>
__device__ inline Pack<C, n> block_all_reduce(Pack<C, n> v, BlockScratch<C, warps>& scratch,
                                              int& turn) {
  static_assert(warps <= 32 && n <= BlockScratch<C, warps>::max_sums,
                "scratch holds a few sums of up to 32 warps");
  v = warp_all_reduce<32>(v);
  auto& sums = scratch.sums[turn++ % 2];
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < n; ++i) sums[warp][i] = v.item[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < n; ++i) v.item[i] = sums[threadIdx.x % warps][i];
  return warp_all_reduce<warps>(v);
}
