// SPDX-License-Identifier: MIT
// A row as one of its team's threads sees it.
//
// Thread t of a team has the packs t, t + threads_per_row, ... of the row. It holds B::packs packs
// in registers at a time; what the team holds at a time is a chunk. A row of one chunk is held; a
// longer row is streamed (streamed.cuh). The CPU build replaces this file.
#pragma once
#include "operands.cuh"
#include "reduce.cuh"

// The columns, and the rows, of a pack.
template <class B>
inline constexpr int pack_columns = strided_rows ? 1 : B::pack;
template <class B>
inline constexpr int pack_rows = strided_rows ? B::pack : 1;
template <class B>
inline constexpr index_t chunk_width = index_t(Team<B>::threads) * pack_columns<B> * B::packs;
template <class B>
inline constexpr bool streamed = B::width > chunk_width<B>;

// A streamed row may have nearly 2^31 columns, so the columns of its last chunk may not fit an int.
template <class B>
using column_t = either<streamed<B>, index_t, int>;

// A pack that a thread holds: its index, its first column, and whether it is inside the row. If so,
// it is loaded. If rows are strided, it is also loaded if the team has no row.
template <class B>
struct PackAt {
  int index;
  column_t<B> column;
  bool live, loaded;
};

template <class B, class F>
__device__ inline void for_each_item(const PackAt<B>& at, F f) {
#pragma unroll
  for (int i = 0; i < items_per_pack<B>; ++i) f(ItemAt{i, at.live, at.loaded});
}

template <class B>
struct Chunk {
  column_t<B> first;  // where the thread's first pack begins
  column_t<B> end;    // where the row ends; 0 if the team has no row

  template <class F>
  __device__ void for_each_pack(F f) const {
#pragma unroll
    for (int i = 0; i < B::packs; ++i) {
      constexpr int of_all = Team<B>::threads * pack_columns<B>;  // of one pack of each thread
      const column_t<B> column = first + i * of_all;
      // If no pack can be beyond the row, test only whether the team has a row.
      const bool is_full =
          streamed<B> ? B::width % chunk_width<B> == 0 : (i + 1) * of_all <= B::width;
      const bool live = inside(is_full ? 0 : column, end);
      f(PackAt<B>{i, column, live, strided_rows ? is_full || inside(column, B::width) : live});
    }
  }
};

template <class B>
struct Row;
// The rows that a team takes, all of one group. The blocks take neighbouring rows at the same time.
// If a block has several teams, the last teams may find no row left.
template <class B>
struct Walk {
  Team<B>& team;
  BlockShare share;
  index_t rows;  // rows of the group
  int thread;    // the thread's index in the team

  // The last parameter is the width of a row, which only a CPU uses.
  __device__ Walk(Team<B>& team, const BlockShare& share, index_t rows, index_t)
      : team(team), share(share), rows(rows), thread(team.thread()) {}

  // The row that the team takes after `number` others. It may lie beyond the last row.
  __device__ Row<B> row(index_t number) const {
    const int team_row = Team<B>::per_block == 1 ? 0 : team.index() * pack_rows<B>;
    const index_t row = first_row(number) + team_row;
    const bool exists = inside(row, rows);
    // Without a row, a team loads the last one: then loads of strided rows need no condition.
    const index_t loaded = strided_rows && !exists ? rows - pack_rows<B> : row;
    return {*this, number, share.row_index(loaded), exists};
  }

  // Whether most blocks of the grid start at once, so that they all wait for their first loads.
  static __device__ bool is_short() { return gridDim.x <= 512; }

  // Stands for any row: all rows have the same columns.
  __device__ Row<B> whole_row() const { return {*this, 0, 0, true}; }

  template <class Visit>
  __device__ void for_each_row(Visit visit) const {
    for (index_t number = 0; first_row(number) < rows; ++number) {
      Row<B> row = this->row(number);
      if constexpr (Team<B>::per_block == 1) row.exists = true;  // compilers cannot deduce this
      visit(row);
    }
  }

 private:
  __device__ index_t first_row(index_t number) const {  // the row of the block's first team
    return (share.block + number * share.blocks) * Team<B>::per_block * pack_rows<B>;
  }
};

template <class B>
struct Row {
  const Walk<B>& walk;
  index_t number;  // index in the walk
  index_t index;   // index among the rows of all groups
  bool exists;

  __device__ Row after(int rows) const { return walk.row(number + rows); }

  template <class T, int axes>
  __device__ T* of(const Rows<T, axes>& operand) const {
    return operand.at(index);
  }
  template <class T, int axes>
  __device__ SteppedRow<T> of(const SteppedRows<T, axes>& operand) const {
    return {operand.at(index), operand.step};
  }

  __device__ Chunk<B> chunk(column_t<B> begin) const {
    return {begin + walk.thread * pack_columns<B>, exists ? column_t<B>(B::width) : 0};
  }
  // All of the thread's packs of a held row.
  __device__ Chunk<B> columns() const { return chunk(0); }
};

// An operand's packs of a row, in the operand's type. `once`, which only a CPU uses, says that the
// kernel loads each pack only once, even if the row is streamed.
template <class B, class T, bool once = false>
struct RowPacks {
  RowPointer<const T> row;
  LoadedPack<B, T> packs[B::packs];

  __device__ explicit RowPacks(RowPointer<const T> row) : row(row) {}

  // Starts to load a chunk.
  __device__ void load(const Chunk<B>& chunk) {
    if constexpr (present<T>)
      chunk.for_each_pack(
          [&](auto at) { packs[at.index] = load_where<B>(at.loaded, row + at.column); });
  }
  // Prefetches into the second-level cache.
  __device__ void prefetch(const Chunk<B>& chunk) const {
    if constexpr (present<T>)
      chunk.for_each_pack([&](auto at) {
        if (at.live) prefetch_pack(row + at.column);
      });
  }
  __device__ LoadedPack<B, T> operator[](const PackAt<B>& at) const { return packs[at.index]; }
};

// One number for each row, in place of an operand's packs.
template <class B, class T>
struct ScalarPacks {
  RowPointer<const T> row;
  EqualItems<B> items = {};

  __device__ explicit ScalarPacks(RowPointer<const T> row) : row(row) {}

  __device__ void load(const Chunk<B>& chunk) {
    if (inside(0, chunk.end)) items.item = convert<Item<B>>(*(row + 0));
  }
  __device__ EqualItems<B> operator[](const PackAt<B>&) const { return items; }
};
template <class B, class T, bool once = false>
using GatePacks = either<B::scalar_gate, ScalarPacks<B, T>, RowPacks<B, T, once>>;

// A parameter's elements for strided rows: the rows of a warp share them, so the first-level cache
// has them, and no register holds them.
template <class B, class T>
struct ParameterElements {
  const T* row;

  __device__ explicit ParameterElements(const T* row) : row(row) {}
  __device__ void load(const Chunk<B>&) const {}
  __device__ void prefetch(const Chunk<B>&) const {}
  __device__ EqualItems<B> operator[](const PackAt<B>& at) const {
    return {at.loaded ? convert<typename B::compute_t>(row[at.column]) : typename B::compute_t(0)};
  }
};
template <class B>
struct ParameterElements<B, absent> {
  template <class Row>
  __device__ explicit ParameterElements(Row) {}
  __device__ void load(const Chunk<B>&) const {}
  __device__ void prefetch(const Chunk<B>&) const {}
};

// A parameter's packs.
template <class B, class T>
using ParameterPacks = either<strided_rows, ParameterElements<B, T>, RowPacks<B, T>>;

template <class B, class T, bool read_again = false>
using RowOutput = OutputPack<B, T, read_again, RowPointer<T>>;

// Adds a pack to what its row holds; both are rounded once.
template <class B, class T, class Held>
__device__ inline void add_to_stored(T* row, const RowOutput<B, Held, true>& pack,
                                     const PackAt<B>& at) {
  auto sums = load_where<B>(at.live, static_cast<const T*>(row + at.column));
  unrolled<B::pack>(
      [&](int i) { sums.item[i] = convert<T>(convert<Held>(sums.item[i]) + pack.value.item[i]); });
  store_where<B>(at.live, row + at.column, sums);
}

// An operand's packs of the next rows, which are being copied to shared memory.
template <class B, class T>
struct StagedPacks {
  SharedPacks<B, T> shared;

  __device__ explicit StagedPacks(SharedMemory& memory)
      : shared(memory, present<T> ? B::stages * B::packs : 0) {}

  // Starts to copy the thread's packs.
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
