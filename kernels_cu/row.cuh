// SPDX-License-Identifier: MIT
// A row as one of its team's threads sees it.
//
// Thread t of a team has the packs t, t + threads_per_row, ... of the row. It holds B::packs of
// them in registers at a time: a chunk. A row of one chunk is held; a longer one is streamed
// (streamed.cuh). The CPU build replaces this file.
#pragma once
#include "operands.cuh"
#include "reduce.cuh"

template <class B>
inline constexpr index_t chunk_width = index_t(Team<B>::threads) * B::pack * B::packs;
template <class B>
inline constexpr bool streamed = B::width > chunk_width<B>;

// A streamed row may have nearly 2^31 columns, and its last chunk may end beyond.
template <class B>
using column_t = either<streamed<B>, index_t, int>;

// One of the packs that a thread holds, where it begins in the row, and whether it is inside.
template <class B>
struct PackAt {
  int index;
  column_t<B> column;
  bool live;
};

template <class B>
struct Chunk {
  column_t<B> first;  // where the thread's first pack begins
  column_t<B> end;    // of the row; 0 for a team that has no row

  template <class F>
  __device__ void for_each_pack(F f) const {
#pragma unroll
    for (int i = 0; i < B::packs; ++i) {
      constexpr int of_all = Team<B>::threads * B::pack;  // columns of all threads' packs
      const column_t<B> column = first + i * of_all;
      // If no thread's pack is beyond the row, all that is tested is whether there is a row.
      const bool is_full =
          streamed<B> ? B::width % chunk_width<B> == 0 : (i + 1) * of_all <= B::width;
      f(PackAt<B>{i, column, inside(is_full ? 0 : column, end)});
    }
  }
};

// Which rows of a group a team takes. All blocks move through memory together. If a block has
// several teams, the last ones may find no row left.
template <class B>
struct Row;
template <class B>
struct Walk {
  Team<B>& team;
  BlockShare share;
  index_t rows;  // of the group
  int thread;    // of the team

  // The last number is a row's width: a CPU's walk needs it.
  __device__ Walk(Team<B>& team, const BlockShare& share, index_t rows, index_t)
      : team(team), share(share), rows(rows), thread(team.thread()) {}

  // A row of the team, which may be beyond the last.
  __device__ Row<B> row(index_t number) const {
    const index_t row = first_row(number) + (Team<B>::per_block == 1 ? 0 : team.index());
    return {*this, number, share.row_index(row), inside(row, rows)};
  }

  // Whether most blocks of the grid run at once, so that the latency of one more load shows.
  static __device__ bool is_short() { return gridDim.x <= 512; }

  // All columns, as of some row.
  __device__ Row<B> whole_row() const { return {*this, 0, 0, true}; }

  template <class Visit>
  __device__ void for_each_row(Visit visit) const {
    for (index_t number = 0; first_row(number) < rows; ++number) {
      Row<B> row = this->row(number);
      if constexpr (Team<B>::per_block == 1) row.exists = true;  // compilers do not find this
      visit(row);
    }
  }

 private:
  __device__ index_t first_row(index_t number) const {  // of the block's teams
    return (share.block + number * share.blocks) * Team<B>::per_block;
  }
};

template <class B>
struct Row {
  const Walk<B>& walk;
  index_t number;  // in the walk
  index_t index;   // among the rows of all groups
  bool exists;

  __device__ Row after(int rows) const { return walk.row(number + rows); }

  // An operand's row.
  template <class T>
  __device__ T* of(const Rows<T>& operand) const {
    return operand.at(index);
  }

  __device__ Chunk<B> chunk(column_t<B> begin) const {
    return {begin + walk.thread * B::pack, exists ? column_t<B>(B::width) : 0};
  }
  // All of the thread's, of a row that is held.
  __device__ Chunk<B> columns() const { return chunk(0); }
};

// An operand's packs of a row, as they are stored. `once` is for a CPU: even of a streamed row, the
// kernel loads no pack a second time.
template <class B, class T, bool once = false>
struct RowPacks {
  const T* row;
  LoadedPack<B, T> packs[B::packs];

  __device__ explicit RowPacks(const T* row) : row(row) {}

  // Starts to load a chunk.
  __device__ void load(const Chunk<B>& chunk) {
    if constexpr (present<T>)
      chunk.for_each_pack(
          [&](auto at) { packs[at.index] = load_where<B>(at.live, row + at.column); });
  }
  // Into the second-level cache.
  __device__ void prefetch(const Chunk<B>& chunk) const {
    if constexpr (present<T>)
      chunk.for_each_pack([&](auto at) {
        if (at.live) prefetch_pack(row + at.column);
      });
  }
  __device__ LoadedPack<B, T> operator[](const PackAt<B>& at) const { return packs[at.index]; }
};

// A parameter's packs, which are the same for all rows.
template <class B, class T>
using ParameterPacks = RowPacks<B, T>;

template <class B, class T, bool read_again = false>
using RowOutput = OutputPack<B, T, read_again>;

// An operand's packs of rows to come, on their way to shared memory.
template <class B, class T>
struct StagedPacks {
  SharedPacks<B, T> shared;

  __device__ explicit StagedPacks(SharedMemory& memory)
      : shared(memory, present<T> ? B::stages * B::packs : 0) {}

  // Starts the copies of the thread's packs.
  template <class Packs>
  __device__ void copy(const Packs& packs, const Row<B>& row, int slot) const {
    if constexpr (present<T>)
      row.columns().for_each_pack([&](auto at) {
        if (at.live) shared.copy(slot * B::packs + at.index, packs.row + at.column);
      });
  }
  template <class Packs>
  __device__ void take(Packs& packs, const Row<B>& row, int slot) const {
    if constexpr (present<T>)
      row.columns().for_each_pack([&](auto at) {
        packs.packs[at.index] = shared.load_where(at.live, slot * B::packs + at.index);
      });
  }
};
