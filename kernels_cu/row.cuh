// SPDX-License-Identifier: MIT
// A row and the team of threads that shares it.
//
// A team is threads_per_row threads. Up to a warp's worth, a block holds several teams and each
// takes its own row; beyond that the block is one team, or the cluster of blocks is, for long rows.
// Thread t of a team owns the packs t, t + threads_per_row, ... of the row. It keeps them in
// registers (B::packs of them), or, where B::packs is 0, reads them again in each pass
// ("streamed"). The CPU build is a team of one thread: its rows stay in the cache, so that it
// streams.
//
// Where a row of x falls into groups with statistics of their own, each group's columns are rows
// for themselves: `row` below is such a one. A block stays with one group, and so with one part of
// the weight.
#pragma once
#include "items.cuh"
#include "reduce.cuh"

// Where an operand's rows are: up to three leading axes, strides in elements.
template <class T>
struct Rows {
  T* data;
  index_t inner, middle;  // sizes of the last two leading axes
  index_t outer_stride, middle_stride, inner_stride;

  __device__ T* at(index_t row) const {
    if constexpr (!present<T>) return data;
    if (row < inner) return data + row * inner_stride;
    const index_t rest = row / inner;
    return data + (rest / middle) * outer_stride + (rest % middle) * middle_stride +
           (row % inner) * inner_stride;
  }
};

// From one row of sums in memory to the next: whole cache lines.
__device__ inline index_t sum_pitch(index_t width) { return (width + 15) / 16 * 16; }

template <template <class> class Arguments, class B>
__device__ inline index_t row_width(const Arguments<B>& arguments) {
  return B::width > 0 ? B::width : arguments.width;
}

template <template <class> class Arguments, class B>
__device__ inline index_t row_groups(const Arguments<B>& arguments) {
  return B::groups > 0 ? B::groups : arguments.groups;
}

// The group of columns that a block, or a cluster of them, has, and its place among the blocks, or
// clusters, that have the same.
struct BlockShare {
  index_t groups, group, block, blocks;

  __device__ BlockShare(index_t groups, int cluster)
      : groups(groups),
        group(blockIdx.x / cluster % groups),
        block(blockIdx.x / cluster / groups),
        blocks(gridDim.x / cluster / groups) {}

  // The number, among the rows of all groups, of a row of the block's group.
  __device__ index_t row_index(index_t row) const { return row * groups + group; }
};

template <class B>
struct Team {
  using C = typename B::compute_t;
  static constexpr int threads = B::threads_per_row;
  static constexpr int blocks = threads > B::threads ? threads / B::threads : 1;  // of its cluster
  static constexpr int warps = threads > 32 ? threads / blocks / 32 : 1;          // of a block
  static constexpr int per_block = blocks > 1 ? 1 : B::threads / threads;
  using Scratch = BlockScratch<C, warps>;

  Scratch& scratch;
  int turn = 0;

  __device__ explicit Team(Scratch& scratch) : scratch(scratch) {}

  __device__ int index() const { return threadIdx.x / threads; }
  __device__ int thread() const {
    if constexpr (blocks > 1)
      return cluster_rank() * B::threads + threadIdx.x;
    else
      return threadIdx.x % threads;
  }
  // A block of one team takes rows that there are; of several teams, the last may find none left.
  static __device__ bool has_row(index_t row, index_t rows) {
    if constexpr (per_block == 1)
      return true;
    else
      return inside(row, rows);
  }

  __device__ index_t column(index_t pack) const { return (pack * threads + thread()) * B::pack; }

  // Every thread of the team gets the sums over the team.
  template <int n>
  __device__ Pack<C, n> all_reduce(const Pack<C, n>& v) {
    if constexpr (threads == 1) {
      return v;
    } else if constexpr (threads <= 32) {
      return warp_all_reduce<threads>(v);
    } else if constexpr (blocks == 1) {
      return block_all_reduce<warps>(v, scratch, turn);
    } else {
      return cluster_all_reduce<warps, blocks>(v, scratch, turn);
    }
  }
  __device__ C all_reduce(C v) { return all_reduce(Pack<C, 1>{{v}}).item[0]; }

  // After the last sums.
  __device__ void end() const {
    if constexpr (blocks > 1) cluster_barrier();
  }
};

// use(first, count) for those of a group's rows that the team takes, up to `at_once` at a time. One
// thread walks neighbours, which its caches like; on a GPU the blocks together sweep through
// memory.
template <class B, class Use>
__device__ inline void for_each_rows(const Team<B>& team, const BlockShare& share, index_t rows,
                                     int at_once, Use use) {
  if constexpr (B::threads == 1) {
    const index_t last = rows * (share.block + 1) / share.blocks;
    for (index_t row = rows * share.block / share.blocks; row < last; row += at_once)
      use(row, row + at_once < last ? at_once : static_cast<int>(last - row));
  } else {
    constexpr index_t per_block = Team<B>::per_block;
    for (index_t row = share.block * per_block; row < rows; row += share.blocks * per_block)
      use(row + team.index(), 1);
  }
}

// Where nothing is to be done after a run of packs.
struct NoEndRun {
  __device__ void operator()() const {}
};

// use(i, column) for each pack of the row that is the thread's, from the first-th on, and end_run()
// after at most 16 of them and after the last.
template <class B, class Use, class EndRun = NoEndRun>
__device__ inline void for_each_pack(const Team<B>& team, index_t width, Use use,
                                     EndRun end_run = {}, int first = 0) {
  if constexpr (B::packs > 0) {
#pragma unroll
    for (int i = 0; i < B::packs; ++i) {
      use(i, team.column(i));
      if (i % 16 == 15 || i == B::packs - 1) end_run();
    }
  } else {
    for_each_column<B>(
        team.column(first), Team<B>::threads * B::pack, width, [&](auto column) { use(0, column); },
        end_run);
  }
}

// What was kept, as if just loaded: a compiler that knew it was converted before would hold the
// converted items in registers too, more than the plan allows for. (Of 16 bits alone there is
// nothing to gain: converted, they take no more.)
template <class Kept>
__device__ inline Kept as_loaded(Kept kept) {
  if constexpr (sizeof(Kept) % sizeof(unsigned) == 0) {
    unsigned words[sizeof(Kept) / sizeof(unsigned)];
    memcpy(words, &kept, sizeof(Kept));
#pragma unroll
    for (unsigned& word : words) asm volatile("" : "+r"(word));
    memcpy(&kept, words, sizeof(Kept));
  }
  return kept;
}

// A row as one thread sees it: pack by pack, from registers or from memory again.
template <class B, class Kept>
struct RowPacks {
  static constexpr int kept_packs = B::packs > 0 ? B::packs : 1;
  Kept kept[kept_packs];

  // Loads the packs that are kept, or only the first of a streamed row.
  template <class Load>
  __device__ void start(const Team<B>& team, Load load) {
#pragma unroll
    for (int i = 0; i < kept_packs; ++i) kept[i] = load(team.column(i));
  }

  // Pack i, at `column`; `reload` is called only where nothing was kept.
  template <class Column, class Load>
  __device__ Kept pack(int i, Column column, Load reload) const {
    if constexpr (B::packs > 0)
      return as_loaded(kept[i]);
    else
      return reload(column);
  }

  // use(column, pack) for each pack that start() loaded, and end_run() as in for_each_pack. Not
  // as_loaded: what compilers keep of the packs between the passes of the moments saves registers.
  template <class Use, class EndRun>
  __device__ void for_each_kept(const Team<B>& team, Use use, EndRun end_run) const {
#pragma unroll
    for (int i = 0; i < kept_packs; ++i) {
      use(team.column(i), kept[i]);
      if (i % 16 == 15 || i == kept_packs - 1) end_run();
    }
  }

  // The same for each pack of the row, where start() has loaded its first.
  template <class Load, class Use, class EndRun>
  __device__ void first_pass(const Team<B>& team, index_t width, Load load, Use use,
                             EndRun end_run) const {
    for_each_kept(team, use, end_run);
    if constexpr (B::packs == 0)
      for_each_pack(team, width, [&](int, auto column) { use(column, load(column)); }, end_run, 1);
  }

  // The same again; `reload` is called only where nothing was kept.
  template <class Load, class Use, class EndRun = NoEndRun>
  __device__ void next_pass(const Team<B>& team, index_t width, Load reload, Use use,
                            EndRun end_run = {}) const {
    for_each_pack(
        team, width, [&](int i, auto column) { use(column, pack(i, column, reload)); }, end_run);
  }
};
