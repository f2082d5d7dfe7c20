// SPDX-License-Identifier: MIT
// Sums over the rows that a block walks, for the gradients of the parameters: one sum per column.
//
// Up to 32 rows are added to recent sums, and the recent sums are then added to totals, so that no
// chain of additions is long. A thread has the sums of its own columns:
//
//   rows are    recent sums are in    totals are in
//   held        registers             shared memory
//   streamed    shared memory         the block's row of partial sums
//
// If shared memory has no room, global memory takes its place. Blocks with different groups of
// columns share the rows of partial sums: each writes its own columns. The CPU build replaces this
// file.
#pragma once
#include "streamed.cuh"

inline constexpr int max_recent_rows = 32;

// Adds to a pack of the row of partial sums. If `begun` is false, the row holds no sums yet.
template <class B, class C>
__device__ inline void add_to_row(C* row, const PackAt<B>& at, Pack<C, B::pack> sums, bool begun) {
  const auto before = load_where<B>(at.live && begun, row + at.column);
  unrolled<B::pack>([&](int i) { sums.item[i] += before.item[i]; });
  store_where<B>(at.live, row + at.column, sums);
}

// Sums over held rows. At the end, the totals of a block's teams are added up.
template <class B>
struct HeldSums {
  using C = typename B::compute_t;
  static constexpr int values = B::packs * B::pack, team_threads = Team<B>::threads;
  static constexpr bool several = Team<B>::per_block > 1;
  static_assert(B::sums_in_shared || !several, "several teams need totals in shared memory");

  C* totals;  // value v of thread t is at v * threads + t
  C* row;     // the block's row of partial sums
  ItemSums<B> recent[B::packs];
  bool begun = false;

  __device__ HeldSums(C* sums, const BlockShare& share, SharedMemory& memory)
      : totals(memory.take<C>(B::sums_in_shared ? values * B::threads : 0)),
        row(sums + share.part() * sum_pitch(B::width * share.groups) + share.group * B::width) {}

  __device__ ItemSums<B>& open(const PackAt<B>& at) { return recent[at.index]; }
  __device__ void close(const PackAt<B>&, const ItemSums<B>&) const {}
  __device__ void end_row() {}

  __device__ void flush(const Walk<B>& walk) {
    walk.whole_row().columns().for_each_pack([&](auto at) {
      if constexpr (B::sums_in_shared)
        unrolled<B::pack>([&](int i) {
          C& total = this->total(at.index * B::pack + i);
          total = begun ? total + recent[at.index].values.item[i] : recent[at.index].values.item[i];
        });
      else
        add_to_row(row, at, recent[at.index].values, begun);
      recent[at.index] = {};
    });
    begun = true;
  }

  // Writes the totals to the row of partial sums.
  __device__ void finish(const Walk<B>& walk) const {
    if constexpr (several)
      add_teams();
    else if constexpr (B::sums_in_shared)
      walk.whole_row().columns().for_each_pack([&](auto at) {
        Items<B> sums;
        unrolled<B::pack>([&](int i) { sums.item[i] = total(at.index * B::pack + i); });
        store_where<B>(at.live, row + at.column, sums);
      });
  }

 private:
  __device__ C& total(int value) const { return totals[value * B::threads + threadIdx.x]; }

  __device__ void add_teams() const {
    __syncthreads();
    for (int i = threadIdx.x; i < values * team_threads; i += B::threads) {
      const int value = i / team_threads, thread = i % team_threads;
      C sum = 0;
      for (int team = 0; team < Team<B>::per_block; ++team)
        sum += totals[value * B::threads + team * team_threads + thread];
      const int column = (value / B::pack * team_threads + thread) * B::pack + value % B::pack;
      if (inside(column, B::width)) row[column] = sum;
    }
  }
};

// Sums over strided rows. The threads of a run of lanes have the same columns of different rows,
// and add up their recent sums. The first of them has the totals of these columns.
template <class B>
struct StridedSums {
  using C = typename B::compute_t;
  static constexpr int lanes = Team<B>::per_block;
  static_assert(!streamed<B> && lanes <= 32, "a run of lanes has the same columns");

  // A column's sum over the rows of a thread. Only rows that exist count.
  struct Adder {
    C sum = 0;

    __device__ void add(ItemAt at, Item<B> v) {
      if (!at.live) return;
      if constexpr (paired<B>)
        sum = sum + v.low + v.high;
      else
        sum += v;
    }
    __device__ void add_product(ItemAt at, Item<B> a, Item<B> b) {
      if (!at.live) return;
      if constexpr (paired<B>)
        sum = fma(a.high, b.high, fma(a.low, b.low, sum));
      else
        sum = fma(a, b, sum);
    }
  };
  C* row;  // the block's row of partial sums
  Adder recent[B::packs];
  bool begun = false;

  __device__ StridedSums(C* sums, const BlockShare& share, SharedMemory&)
      : row(sums + share.part() * sum_pitch(B::width * share.groups) + share.group * B::width) {}

  __device__ Adder& open(const PackAt<B>& at) { return recent[at.index]; }
  __device__ void close(const PackAt<B>&, const Adder&) const {}
  __device__ void end_row() {}

  __device__ void flush(const Walk<B>& walk) {
    walk.whole_row().columns().for_each_pack([&](const auto& at) {
      const auto sum = warp_all_reduce<lanes>(Pack<C, 1>{recent[at.index].sum});
      if (at.live && threadIdx.x % lanes == 0)
        row[at.column] = begun ? row[at.column] + sum.item[0] : sum.item[0];
      recent[at.index] = {};
    });
    begun = true;
  }
  __device__ void finish(const Walk<B>&) const {}
};

// Sums over streamed rows. Recent sums are in shared memory, in the order of HeldSums' totals, or
// in a second row of global memory.
template <class B>
struct StreamedSums {
  using C = typename B::compute_t;
  static constexpr index_t chunks = (B::width + chunk_width<B> - 1) / chunk_width<B>;
  static_assert(Team<B>::per_block == 1, "a block's threads have columns of their own");

  C* recent;
  C* row;  // the block's row of partial sums
  bool begun = false, recent_begun = false;

  __device__ StreamedSums(C* sums, const BlockShare& share, SharedMemory& memory) {
    const index_t pitch = sum_pitch(B::width * share.groups);
    row = sums + share.part() * pitch * (B::sums_in_shared ? 1 : 2) + share.group * B::width;
    recent = B::sums_in_shared ? memory.take<C>(int(chunks) * B::packs * B::pack * B::threads)
                               : row + pitch;
  }

  __device__ ItemSums<B> open(const PackAt<B>& at) const {
    ItemSums<B> open;
    if (recent_begun && has_slot(at))
      unrolled<B::pack>([&](int i) { open.values.item[i] = recent[slot_of(at, i)]; });
    return open;
  }
  __device__ void close(const PackAt<B>& at, const ItemSums<B>& open) const {
    if (has_slot(at))
      unrolled<B::pack>([&](int i) { recent[slot_of(at, i)] = open.values.item[i]; });
  }
  __device__ void end_row() { recent_begun = true; }

  __device__ void flush(const Walk<B>& walk) {
    StreamedRow<B>(walk.whole_row()).for_each_chunk([&](const auto& chunk) {
      chunk.for_each_pack([&](auto at) { add_to_row(row, at, open(at).values, begun); });
    });
    begun = true;
    recent_begun = false;
  }
  __device__ void finish(const Walk<B>&) const {}

 private:
  static __device__ bool has_slot(const PackAt<B>& at) { return B::sums_in_shared || at.live; }
  static __device__ index_t slot_of(const PackAt<B>& at, int i) {
    if constexpr (!B::sums_in_shared) return at.column + i;
    return (at.column / (Team<B>::threads * B::pack) * B::pack + i) * B::threads + threadIdx.x;
  }
};

// Takes the place of sums for a gradient that is not wanted.
template <class B>
struct NoSums {
  using C = typename B::compute_t;
  __device__ NoSums(C*, const BlockShare&, SharedMemory&) {}
  __device__ NoSums& open(const PackAt<B>&) { return *this; }
  __device__ void add(ItemAt, Item<B>) const {}
  __device__ void add_product(ItemAt, Item<B>, Item<B>) const {}
  __device__ void close(const PackAt<B>&, const NoSums&) const {}
  __device__ void end_row() {}
  __device__ void flush(const Walk<B>&) {}
  __device__ void finish(const Walk<B>&) const {}
};

template <class B, bool wanted>
using ColumnSums =
    either<!wanted, NoSums<B>,
           either<strided_rows, StridedSums<B>, either<streamed<B>, StreamedSums<B>, HeldSums<B>>>>;

template <class B>
struct ParamSums {
  ColumnSums<B, B::dweight> dweight;
  ColumnSums<B, B::dbias> dbias;
  ColumnSums<B, B::dgate_sums> dgate;
  int rows = 0;  // rows in the recent sums

  template <class Arguments>
  __device__ ParamSums(const Arguments& arguments, const Walk<B>& walk, SharedMemory& memory)
      : dweight(arguments.dweight_sums, walk.share, memory),
        dbias(arguments.dbias_sums, walk.share, memory),
        dgate(dgate_sums_of<B>(arguments), walk.share, memory) {}

  // Calls add(dweight, dbias, dgate) with the sums of a pack of columns.
  template <class Add>
  __device__ void add(const PackAt<B>& at, Add add) {
    auto&& to_dweight = dweight.open(at);
    auto&& to_dbias = dbias.open(at);
    auto&& to_dgate = dgate.open(at);
    add(to_dweight, to_dbias, to_dgate);
    dweight.close(at, to_dweight);
    dbias.close(at, to_dbias);
    dgate.close(at, to_dgate);
  }
  // Call this after each row.
  __device__ void end_row(const Walk<B>& walk) {
    dweight.end_row();
    dbias.end_row();
    dgate.end_row();
    if (++rows == max_recent_rows) flush(walk);
  }
  __device__ void finish(const Walk<B>& walk) {
    if (rows > 0) flush(walk);
    dweight.finish(walk);
    dbias.finish(walk);
    dgate.finish(walk);
  }

 private:
  __device__ void flush(const Walk<B>& walk) {
    dweight.flush(walk);
    dbias.flush(walk);
    dgate.flush(walk);
    rows = 0;
  }
};

// For each streamed row, calls found = find(row). Then, for each chunk, it calls reload(found,
// chunk), and write(found, at, dweight, dbias, dgate) for each pack; write adds to the sums.
template <class B, class Find, class Reload, class Write>
__device__ inline void for_each_row(const Walk<B>& walk, ParamSums<B>& sums, Find find,
                                    Reload reload, Write write) {
  walk.for_each_row([&](const StreamedRow<B>& row) {
    auto found = find(row);
    row.for_each_chunk_in_second_pass([&](const auto& chunk) {
      reload(found, chunk);
      chunk.for_each_pack(
          [&](auto at) { sums.add(at, [&](auto&... to_sums) { write(found, at, to_sums...); }); });
    });
    sums.end_row(walk);
  });
  sums.finish(walk);
}
