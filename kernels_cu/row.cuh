// SPDX-License-Identifier: MIT
// A row and the team of threads that shares it.
//
// A team is threads_per_row threads. Up to a warp's worth, a block holds several teams and each
// takes its own row; beyond that the block is one team. Thread t of a team owns the packs t, t +
// threads_per_row, ... of the row. It keeps them in registers (B::packs of them), or, where
// B::packs is 0, reads them again in each pass ("streamed"). The CPU build is a team of one thread:
// its rows stay in the cache, so that it streams.
#pragma once
#include "memory.cuh"
#include "reduce.cuh"

// Where an operand's rows are: up to three leading axes, strides in elements.
template <class T>
struct Rows {
  T* data;
  index_t inner, middle;  // sizes of the last two leading axes
  index_t outer_stride, middle_stride, inner_stride;

  __device__ T* at(index_t row) const {
    if (row < inner) return data + row * inner_stride;
    const index_t rest = row / inner;
    return data + (rest / middle) * outer_stride + (rest % middle) * middle_stride +
           (row % inner) * inner_stride;
  }
};

template <class B>
struct Team {
  using C = typename B::compute_t;
  static constexpr int threads = B::threads_per_row;
  static constexpr int warps = threads > 32 ? threads / 32 : 1;
  static constexpr int per_block = B::threads / threads;
  using Scratch = BlockScratch<C, warps>;

  Scratch& scratch;
  int turn = 0;

  __device__ explicit Team(Scratch& scratch) : scratch(scratch) {}

  __device__ int index() const { return threadIdx.x / threads; }
  __device__ int thread() const { return threadIdx.x % threads; }
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
    } else {
      return block_all_reduce<warps>(v, scratch, turn);
    }
  }
  __device__ C all_reduce(C v) { return all_reduce(Pack<C, 1>{{v}}).item[0]; }
};

// The groups of per_block rows that this block walks. One thread walks neighbours, which its caches
// like; on a GPU the blocks together sweep through memory.
struct RowGroups {
  index_t first, last, step;
};
template <class B>
__device__ inline RowGroups row_groups_of_block(index_t rows) {
  const index_t groups = (rows + Team<B>::per_block - 1) / Team<B>::per_block;
  if constexpr (B::threads == 1)
    return {groups * blockIdx.x / gridDim.x, groups * (blockIdx.x + 1) / gridDim.x, 1};
  else
    return {blockIdx.x, groups, gridDim.x};
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

  // use(i, column, pack) for each pack that start() loaded.
  template <class Use>
  __device__ void for_each_kept(const Team<B>& team, Use use) const {
#pragma unroll
    for (int i = 0; i < kept_packs; ++i) use(i, team.column(i), kept[i]);
  }

  // use(i, column, pack) for each pack of the row, where start() has loaded its first.
  template <class Load, class Use>
  __device__ void first_pass(const Team<B>& team, index_t width, Load load, Use use) const {
    for_each_kept(team, use);
    if constexpr (B::packs == 0) stream(team, team.column(1), width, load, use);
  }

  // The same again; `reload` is called only where nothing was kept.
  template <class Load, class Use>
  __device__ void next_pass(const Team<B>& team, index_t width, Load reload, Use use) const {
    if constexpr (B::packs > 0)
      for_each_kept(team, use);
    else
      stream(team, team.column(0), width, reload, use);
  }

 private:
  template <class Load, class Use>
  __device__ void stream(const Team<B>& team, index_t first_column, index_t width, Load load,
                         Use use) const {
#pragma unroll 2
    for (index_t column = first_column; column < width; column += Team<B>::threads * B::pack)
      use(0, column, load(column));
  }
};
