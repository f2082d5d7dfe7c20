// SPDX-License-Identifier: MIT
// A row as one of its team's threads sees it.
//
// Thread t of a team owns the packs t, t + threads_per_row, ... of the row. It holds B::packs of
// them in registers at a time: a chunk. A row that is held is one chunk, loaded once; a longer one
// is streamed, chunk by chunk, and again in the second pass, from its end backwards, as what was
// read last is in the caches still. The CPU build replaces this file.
#pragma once
#include "operands.cuh"
#include "reduce.cuh"

template <class B>
inline constexpr index_t chunk_width = index_t(Team<B>::threads) * B::pack * B::packs;
template <class B>
inline constexpr bool streamed = B::width > chunk_width<B>;

// Whether every chunk of a row is full.
template <class B>
inline constexpr bool full = B::width % chunk_width<B> == 0;

// A streamed row may have nearly 2^31 columns, and its last chunk end beyond.
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
      const bool is_full = full<B> || (!streamed<B> && (i + 1) * of_all <= B::width);
      f(PackAt<B>{i, column, inside(is_full ? 0 : column, end)});
    }
  }
};

// Which of a group's rows a team takes: blocks sweep through memory together. A block of one team
// takes rows that there are; of several teams, the last may find none left.
template <class B>
struct Row;
template <class B>
struct Walk {
  Team<B>& team;
  BlockShare share;
  index_t rows;  // of the group
  int thread;    // of the team

  __device__ Walk(Team<B>& team, const BlockShare& share, index_t rows, index_t)
      : team(team), share(share), rows(rows), thread(team.thread()) {}

  // A row of the team's: it may be beyond the last.
  __device__ Row<B> row(index_t number) const {
    const index_t row = first_row(number) + (Team<B>::per_block == 1 ? 0 : team.index());
    return {*this, number, share.row_index(row), inside(row, rows)};
  }

  // All columns, as of some row.
  __device__ Row<B> whole_row() const { return {*this, 0, 0, true}; }

  template <class Use>
  __device__ void for_each_row(Use use) const {
    for (index_t number = 0; first_row(number) < rows; ++number) {
      Row<B> row = this->row(number);
      if constexpr (Team<B>::per_block == 1) row.exists = true;
      use(row);
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
  __device__ Chunk<B> first_chunk() const { return chunk(0); }
  // The columns of the first chunk, over all threads.
  static __device__ index_t first_width() {
    return B::width < chunk_width<B> ? B::width : chunk_width<B>;
  }

  template <class F>
  __device__ void with_first_chunk(F f) const {
    f(first_chunk());
  }
  template <class F>
  __device__ void for_each_next_chunk(F f) const {
    if constexpr (streamed<B>)
      for (index_t begin = chunk_width<B>; begin < B::width; begin += chunk_width<B>)
        f(chunk(begin));
  }
  template <class F>
  __device__ void for_each_chunk(F f) const {
    f(first_chunk());
    for_each_next_chunk(f);
  }
  // The second pass.
  template <class F>
  __device__ void for_each_chunk_again(F f) const {
    if constexpr (streamed<B>)
      for (index_t begin = (B::width - 1) / chunk_width<B> * chunk_width<B>; begin > 0;
           begin -= chunk_width<B>)
        f(chunk(begin));
    f(first_chunk());
  }
};

// store(find(row), row) for the rows of a team.
template <class B, class Find, class Store>
__device__ inline void for_each_row(const Walk<B>& walk, Find find, Store store) {
  walk.for_each_row([&](const auto& row) {
    auto found = find(row);
    store(found, row);
  });
}

// An operand's packs of a row, as a thread holds them: as they were stored. `once`: the kernel
// loads no pack of it a second time, even of a streamed row.
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
  __device__ LoadedPack<B, T> operator[](const PackAt<B>& at) const { return packs[at.index]; }
  // In the second pass.
  __device__ LoadedPack<B, T> again(const PackAt<B>& at) const { return packs[at.index]; }
};

// A parameter's, which all rows have.
template <class B, class T>
using ParameterPacks = RowPacks<B, T>;

// What a thread computes of a row in the first pass and holds for the second. Without `hold`, and
// where the row is streamed, it computes that again.
template <class B, class V, bool hold = true>
struct HeldPacks {
  V packs[B::packs];

  __device__ explicit HeldPacks(const Row<B>&) {}

  __device__ void put(const PackAt<B>& at, const V& pack) { packs[at.index] = pack; }
  __device__ V operator[](const PackAt<B>& at) const { return packs[at.index]; }
  template <class Compute>
  __device__ V again(const PackAt<B>& at, Compute compute) const {
    if constexpr (streamed<B> || !hold)
      return compute();
    else
      return packs[at.index];
  }
};

// A pack of a row to be written, as OutputPack.
template <class B, class T, bool read_again = false>
struct RowOutput : OutputPack<B, T, read_again> {
  __device__ explicit RowOutput(T* row) : OutputPack<B, T, read_again>(row, 0) {}

  __device__ LoadedPack<B, T> store(const PackAt<B>& at) const {
    if constexpr (present<T>) store_where<B>(at.live, this->row + at.column, this->value);
    return this->value;
  }
};

// An operand's packs of rows to come, on their way to shared memory.
template <class B, class T>
struct StagedPacks {
  SharedPacks<B, T> shared;

  __device__ explicit StagedPacks(SharedMemory& memory)
      : shared(memory, present<T> ? B::stages * B::packs : 0) {}

  // Starts the copies of the thread's packs.
  template <class Packs>
  __device__ void copy(const Packs& packs, const Row<B>& row, int stage) const {
    if constexpr (present<T>)
      row.first_chunk().for_each_pack([&](auto at) {
        if (at.live) shared.copy(stage * B::packs + at.index, packs.row + at.column);
      });
  }
  template <class Packs>
  __device__ void take(Packs& packs, const Row<B>& row, int stage) const {
    if constexpr (present<T>)
      row.first_chunk().for_each_pack([&](auto at) {
        packs.packs[at.index] = shared.load_where(at.live, stage * B::packs + at.index);
      });
  }
};
