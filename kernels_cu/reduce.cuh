// SPDX-License-Identifier: MIT
// Reductions in a fixed order: over a thread's packs, over the lanes of a warp, over the warps of a
// block, over the blocks of a cluster. The operation is Sum or Max (operations.cuh). The CPU build
// replaces this file.
#pragma once
#include "memory.cuh"
#include "ptx.cuh"

// Reduces over a thread's packs of a chunk: value i is the result over item i of all packs.
template <class B, class Op = Sum>
struct ItemReduction {
  using Operation = Op;
  Pack<Item<B>, items_per_pack<B>> values = {};

  template <class At>
  __device__ void add(At at, Item<B> v) {
    values.item[at.index] = Op::of(values.item[at.index], v);
  }
  template <class At>
  __device__ void add_product(At at, Item<B> a, Item<B> b) {
    static_assert(same_type<Op, Sum>, "add_product is only for sums");
    values.item[at.index] = fma(a, b, values.item[at.index]);
  }
  // Returns the result over all items of a row, and overwrites the values.
  __device__ PerRow<B> result() {
    fold<items_per_pack<B> / 2>();
    if constexpr (paired<B> && !strided_rows)
      return Op::of(values.item[0].high, values.item[0].low);
    else
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

// Reduces over a thread's chunks of a row.
template <class B, class Op = Sum>
struct RowReduction {
  using Operation = Op;
  using C = typename B::compute_t;
  Accumulator<Op, C> chunks;

  template <class Reduction>
  __device__ void add(Reduction& chunk) {
    chunks.add(chunk.result());
  }
  __device__ C result() const { return chunks.value; }
};
template <class B>
using RowSum = RowReduction<B>;

// Whether one instruction finds the maximum over a warp. Numbers from +0 on are ordered as their
// bits are, and NaN is beyond infinity; -0 must not occur.
template <class Op, class C>
inline constexpr bool has_warp_maximum =
    same_type<Op, Max> && same_type<C, float> && __CUDA_ARCH__ >= 800;

// Reduces over aligned runs of `threads` lanes of a warp. Every lane gets its run's results.
template <int threads, class Op = Sum, class C, int n>
__device__ inline Pack<C, n> warp_all_reduce(Pack<C, n> v) {
  static_assert(threads <= 32 && (threads & (threads - 1)) == 0,
                "a run of lanes is a power of two");
  if constexpr (threads == 32 && has_warp_maximum<Op, C>) {
    unrolled<n>([&](int i) {
      v.item[i] = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(v.item[i])));
    });
    return v;
  }
#pragma unroll
  for (int mask = threads / 2; mask > 0; mask /= 2)
    unrolled<n>([&](int i) {
      v.item[i] = Op::of(v.item[i], __shfl_xor_sync(0xffffffffu, v.item[i], mask));
    });
  return v;
}

// The lanes that reduce some values: a power of two, all 32 if there is an instruction for them.
template <class Op, class C>
__device__ constexpr int lanes_for(int values) {
  if (has_warp_maximum<Op, C>) return 32;
  int lanes = 1;
  while (lanes < values && lanes < 32) lanes *= 2;
  return lanes;
}

// Values that a block's warps exchange. Reductions alternate between values[0] and values[1], so
// each needs only one barrier: a warp may write its next values while another reads the last ones.
template <class C, int warps>
struct BlockScratch {
  static constexpr int max_values = 3;
  C values[2][warps][max_values];
};

// Reduces over a block. Every thread gets the results. `turn` counts this thread's calls.
template <int warps, class Op = Sum, class C, int n>
__device__ inline Pack<C, n> block_all_reduce(Pack<C, n> v, BlockScratch<C, warps>& scratch,
                                              int& turn) {
  static_assert(warps <= 32 && n <= BlockScratch<C, warps>::max_values,
                "scratch has room for max_values values of each of at most 32 warps");
  v = warp_all_reduce<32, Op>(v);
  auto& values = scratch.values[turn++ % 2];
  if (threadIdx.x % 32 == 0) unrolled<n>([&](int i) { values[threadIdx.x / 32][i] = v.item[i]; });
  __syncthreads();
  constexpr int lanes = lanes_for<Op, C>(warps);
  const int lane = threadIdx.x % lanes;
  unrolled<n>([&](int i) { v.item[i] = lane < warps ? values[lane][i] : C(0); });
  return warp_all_reduce<lanes, Op>(v);
}

// Values that a cluster's warps send to each block. A warp sends its values of turn t only after it
// has read all values of turn t - 1. So a thread that has received the values of turn t from all
// warps may send its values of turn t + 1, which overwrite values of turn t - 1. A block waits for
// all values that are sent to it, so nothing is sent to a block that has ended.
template <class C, int warps>
struct ClusterScratch : BlockScratch<C, warps> {
  Arrivals arrivals[2];

  __device__ void begin() {
    if (threadIdx.x < 2) begin_arrivals(arrivals[threadIdx.x]);
    cluster_begun();
  }
};

// Reduces over the blocks of a cluster, each of `warps` warps. Every thread gets the results.
template <int warps, int blocks, class Op = Sum, class C, int n>
__device__ inline Pack<C, n> cluster_all_reduce(Pack<C, n> v,
                                                ClusterScratch<C, warps * blocks>& scratch,
                                                int& turn) {
  constexpr int senders = warps * blocks, lanes = lanes_for<Op, C>(senders);
  static_assert(blocks <= 32, "each lane of a warp sends to at most one block");
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
  v = {};
#pragma unroll
  for (int first = 0; first < senders; first += lanes)
    if (const int from = first + lane % lanes; from < senders)
      unrolled<n>([&](int i) { v.item[i] = Op::of(v.item[i], values[from][i]); });
  __syncwarp();  // the warp reads all values before it sends again
  return warp_all_reduce<lanes, Op>(v);
}

// Values that the warps of a block exchange for each of its teams, if neighbouring threads are of
// different teams. Reductions alternate as with BlockScratch.
template <class V, int warps, int teams>
struct TeamsScratch {
  V values[2][BlockScratch<V, 1>::max_values][warps][teams];
};

// Returns the value that the lane at an exclusive or of the index with `mask` has.
template <class V>
__device__ inline V from_lane_xor(V v, int mask) {
  return __shfl_xor_sync(0xffffffffu, v, mask);
}
__device__ inline FloatPair from_lane_xor(FloatPair v, int mask) {
  return {from_lane_xor(v.low, mask), from_lane_xor(v.high, mask)};
}

// Reduces over teams whose threads are `teams` threads apart, so that warps have threads of all
// teams. Every thread gets the results.
template <int warps, int teams, class Op = Sum, class V, int n>
__device__ inline Pack<V, n> teams_all_reduce(Pack<V, n> v, TeamsScratch<V, warps, teams>& scratch,
                                              int& turn) {
  const int team = threadIdx.x % teams;
#pragma unroll
  for (int mask = teams; mask < 32; mask *= 2)
    unrolled<n>([&](int i) { v.item[i] = Op::of(v.item[i], from_lane_xor(v.item[i], mask)); });
  if constexpr (warps == 1) return v;
  auto& values = scratch.values[turn++ % 2];
  unrolled<n>([&](int i) { values[i][threadIdx.x / 32][team] = v.item[i]; });
  __syncthreads();
  constexpr int chains = warps % 4 == 0 ? 4 : 1;  // additions of one do not wait for another's
  unrolled<n>([&](int i) {
    Pack<V, chains> found = {};
#pragma unroll
    for (int warp = 0; warp < warps; warp += chains)
      unrolled<chains>(
          [&](int j) { found.item[j] = Op::of(found.item[j], values[i][warp + j][team]); });
    v.item[i] = found.item[0];
    unrolled<chains, 1>([&](int j) { v.item[i] = Op::of(v.item[i], found.item[j]); });
  });
  return v;
}

// The threads_per_row threads that share a row. Teams of at most 32 threads share a block, and each
// takes its own row. A larger team is a block or, for long rows, a cluster of blocks. If rows are
// strided, all teams share blocks, and neighbouring threads take neighbouring rows.
template <class B>
struct Team {
  using C = typename B::compute_t;
  static constexpr int threads = B::threads_per_row;
  static constexpr int blocks = threads > B::threads ? threads / B::threads : 1;  // per cluster
  static constexpr int warps = threads > 32 ? threads / blocks / 32 : 1;          // per block
  static constexpr int per_block = blocks > 1 ? 1 : B::threads / threads;
  using Scratch =
      either<strided_rows, TeamsScratch<PerRow<B>, B::threads / 32, per_block>,
             either<(blocks > 1), ClusterScratch<C, warps * blocks>, BlockScratch<C, warps>>>;

  Scratch& scratch;
  int turn = 0;

  __device__ explicit Team(Scratch& scratch) : scratch(scratch) {
    if constexpr (blocks > 1 && B::reduces) scratch.begin();
  }

  __device__ int index() const {
    return strided_rows ? threadIdx.x % per_block : threadIdx.x / threads;
  }
  __device__ int thread() const {
    if constexpr (strided_rows)
      return threadIdx.x / per_block;
    else if constexpr (blocks > 1)
      return cluster_rank() * B::threads + threadIdx.x;
    else
      return threadIdx.x % threads;
  }

  // Completes reductions over the team, all by the same operation. Every thread gets the results.
  template <class First, class... Others>
  __device__ Pack<PerRow<B>, 1 + sizeof...(Others)> all_reduce(First& first, Others&... others) {
    using Op = typename First::Operation;
    static_assert((same_type<Op, typename Others::Operation> && ...), "one operation for all");
    const Pack<PerRow<B>, 1 + sizeof...(Others)> v = {{first.result(), others.result()...}};
    if constexpr (strided_rows)
      return teams_all_reduce<B::threads / 32, per_block, Op>(v, scratch, turn);
    else if constexpr (threads <= 32)
      return warp_all_reduce<threads, Op>(v);
    else if constexpr (blocks == 1)
      return block_all_reduce<warps, Op>(v, scratch, turn);
    else
      return cluster_all_reduce<warps, blocks, Op>(v, scratch, turn);
  }
};
