// SPDX-License-Identifier: MIT
// Reductions in a fixed order: over a thread's packs, over the lanes of a warp, over the warps of a
// block, over the blocks of a cluster. The operation is Sum or Max (operations.cuh). The CPU build
// replaces this file.
#pragma once
#include "memory.cuh"
#include "ptx.cuh"

// Of one thread, over the packs of a chunk: value i is that of item i of all packs.
template <class B, class Op = Sum>
struct ItemReduction {
  using Operation = Op;
  Identities<Op, Item<B>, items_per_pack<B>> values = {};

  template <class At>
  __device__ void add(At at, Item<B> v) {
    values.item[at.index] = Op::of(values.item[at.index], v);
  }
  template <class At>
  __device__ void add_product(At at, Item<B> a, Item<B> b) {
    static_assert(same_type<Op, Sum>, "a product is added");
    values.item[at.index] = fma(a, b, values.item[at.index]);
  }
  // Over all items; it overwrites the values.
  __device__ Item<B> result() {
    fold<items_per_pack<B> / 2>();
    return values.item[0];
  }

 private:
  template <int half>
  __device__ void fold() {
    unrolled<half>([&](int i) { values.item[i] = Op::of(values.item[i + half], values.item[i]); });
    if constexpr (half > 1) fold<half / 2>();
  }
};
template <class B>
using ItemSums = ItemReduction<B>;

// Of one thread, over the chunks of a row.
template <class B, class Op = Sum>
struct RowReduction {
  using Operation = Op;
  using C = typename B::compute_t;
  Accumulator<Op, C> chunks;

  __device__ void add(ItemReduction<B, Op>& chunk) { chunks.add(chunk.result()); }
  __device__ C result() const { return chunks.value; }
};
template <class B>
using RowSum = RowReduction<B>;

// Every thread of each aligned run of `threads` lanes of a warp gets the results over the run.
template <int threads, class Op = Sum, class C, int n>
__device__ inline Pack<C, n> warp_all_reduce(Pack<C, n> v) {
  static_assert(threads <= 32 && (threads & (threads - 1)) == 0,
                "a run of lanes is a power of two");
#pragma unroll
  for (int mask = threads / 2; mask > 0; mask /= 2)
    unrolled<n>([&](int i) {
      v.item[i] = Op::of(v.item[i], __shfl_xor_sync(0xffffffffu, v.item[i], mask));
    });
  return v;
}

// The least power of two that is not less, but at most a warp's lanes.
__device__ constexpr int lanes_for(int values) {
  int lanes = 1;
  while (lanes < values && lanes < 32) lanes *= 2;
  return lanes;
}

// What the warps of a block exchange. Two halves used in turn: a warp may write its next values
// while another still reads the last ones, so one barrier a reduction is enough.
template <class C, int warps>
struct BlockScratch {
  static constexpr int max_values = 3;
  C values[2][warps][max_values];
};

// Every thread of the block gets the results over the block. `turn` counts this thread's calls.
template <int warps, class Op = Sum, class C, int n>
__device__ inline Pack<C, n> block_all_reduce(Pack<C, n> v, BlockScratch<C, warps>& scratch,
                                              int& turn) {
  static_assert(warps <= 32 && n <= BlockScratch<C, warps>::max_values,
                "scratch holds a few values of up to 32 warps");
  v = warp_all_reduce<32, Op>(v);
  auto& values = scratch.values[turn++ % 2];
  if (threadIdx.x % 32 == 0) unrolled<n>([&](int i) { values[threadIdx.x / 32][i] = v.item[i]; });
  __syncthreads();
  constexpr int lanes = lanes_for(warps);
  const int lane = threadIdx.x % lanes;
  unrolled<n>(
      [&](int i) { v.item[i] = lane < warps ? values[lane][i] : Op::template identity<C>(); });
  return warp_all_reduce<lanes, Op>(v);
}

// What the warps of a cluster send to each of its blocks. Two halves are enough: a thread that has
// received one turn's values from all warps knows that these have read those of the turn before, as
// a warp's shuffles consume what it read before it sends the next. A block waits for all that is
// sent to it, so nothing is sent to one that has ended.
template <class C, int warps>
struct ClusterScratch : BlockScratch<C, warps> {
  Arrivals arrivals[2];

  __device__ void begin() {
    if (threadIdx.x < 2) begin_arrivals(arrivals[threadIdx.x]);
    cluster_begun();
  }
};

// The same over the blocks of a cluster, of which each has so many warps.
template <int warps, int blocks, class Op = Sum, class C, int n>
__device__ inline Pack<C, n> cluster_all_reduce(Pack<C, n> v,
                                                ClusterScratch<C, warps * blocks>& scratch,
                                                int& turn) {
  constexpr int senders = warps * blocks, lanes = lanes_for(senders);
  static_assert(blocks <= 32, "a lane of a warp sends to each block");
  auto& values = scratch.values[turn % 2];
  auto& arrivals = scratch.arrivals[turn % 2];
  const int lane = threadIdx.x % 32, sender = cluster_rank() * warps + threadIdx.x / 32;
  if (threadIdx.x == 0) expect_arrivals(arrivals, senders * sizeof(v));
  v = warp_all_reduce<32, Op>(v);
  if (turn == 0) wait_for_cluster();
  if (lane < blocks)
    unrolled<n>([&](int i) { cluster_send(v.item[i], &values[sender][i], arrivals, lane); });
  wait_for_arrivals(arrivals, turn / 2 % 2);
  ++turn;
  v = Identities<Op, C, n>{};
#pragma unroll
  for (int first = 0; first < senders; first += lanes)
    if (const int from = first + lane % lanes; from < senders)
      unrolled<n>([&](int i) { v.item[i] = Op::of(v.item[i], values[from][i]); });
  __syncwarp();  // the warp has read them before it sends again
  return warp_all_reduce<lanes, Op>(v);
}

// The threads that share a row: threads_per_row of them. Up to a warp's worth, a block holds
// several teams and each takes its own row; beyond that the block is one team, or the cluster of
// blocks is, for long rows.
template <class B>
struct Team {
  using C = typename B::compute_t;
  static constexpr int threads = B::threads_per_row;
  static constexpr int blocks = threads > B::threads ? threads / B::threads : 1;  // of its cluster
  static constexpr int warps = threads > 32 ? threads / blocks / 32 : 1;          // of a block
  static constexpr int per_block = blocks > 1 ? 1 : B::threads / threads;
  using Scratch = either<(blocks > 1), ClusterScratch<C, warps * blocks>, BlockScratch<C, warps>>;

  Scratch& scratch;
  int turn = 0;

  __device__ explicit Team(Scratch& scratch) : scratch(scratch) {
    if constexpr (blocks > 1 && B::reduces) scratch.begin();
  }

  __device__ int index() const { return threadIdx.x / threads; }
  __device__ int thread() const {
    if constexpr (blocks > 1)
      return cluster_rank() * B::threads + threadIdx.x;
    else
      return threadIdx.x % threads;
  }

  // Every thread of the team gets the results over the team, of reductions by one operation.
  template <class First, class... Others>
  __device__ Pack<C, 1 + sizeof...(Others)> all_reduce(First& first, Others&... others) {
    using Op = typename First::Operation;
    static_assert((same_type<Op, typename Others::Operation> && ...), "one operation for all");
    const Pack<C, 1 + sizeof...(Others)> v = {{first.result(), others.result()...}};
    if constexpr (threads <= 32)
      return warp_all_reduce<threads, Op>(v);
    else if constexpr (blocks == 1)
      return block_all_reduce<warps, Op>(v, scratch, turn);
    else
      return cluster_all_reduce<warps, blocks, Op>(v, scratch, turn);
  }
};
