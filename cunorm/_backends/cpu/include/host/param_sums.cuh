// SPDX-License-Identifier: MIT
// The CPU's param_sums.cuh: sums over the rows that a block walks, in memory.
//
// Up to eight rows are added to recent sums, which are then added to the block's row of partial
// sums. The rounding errors of that addition are the next recent sums' first summands. Recent sums
// are in memory after the row of partial sums or, if each block has at most eight rows, in that row
// itself. Several rows are taken at once, because they share loads and stores of sums.
#pragma once
#include "row.cuh"

// A loaded pack of sums, to which values are added.
template <class B>
struct Adder {
  Items<B> sums;

  template <class At>
  void add(At at, Item<B> v) {
    sums.item[at.index] += v;
  }
  template <class At>
  void add_product(At at, Item<B> a, Item<B> b) {
    sums.item[at.index] = fma(a, b, sums.item[at.index]);
  }
};

// Takes the place of Adder for a gradient that is not wanted.
struct NoAdder {
  template <class At, class V>
  void add(At, V) {}
  template <class At, class V>
  void add_product(At, V, V) {}
};

// Sums for one parameter. `wanted` says whether the caller asked for its gradient.
template <class B, bool wanted>
struct ColumnSums {
  using C = typename B::compute_t;
  C *sums, *recent;
  bool begun = false, recent_begun = false;

  ColumnSums(C* all_sums, const Walk<B>& walk, bool few_rows) {
    const index_t pitch = sum_pitch(walk.width * walk.share.groups);
    sums = all_sums + walk.share.part() * 2 * pitch + walk.share.group * walk.width;
    recent = few_rows ? sums : sums + pitch;
  }

  template <class At>
  auto open(At at) const {
    if constexpr (wanted)
      return Adder<B>{recent_begun ? items(recent, at) : Items<B>{}};
    else
      return NoAdder{};
  }
  template <class At, class A>
  void close(At at, const A& adder) const {
    if constexpr (wanted) store(recent, at, adder.sums);
  }

  // Adds the recent sums to the block's row of partial sums, and keeps the rounding errors.
  void end_run(const Walk<B>& walk) {
    if constexpr (!wanted) return;
    if (recent != sums)
      walk.row(0).for_each_chunk([&](const auto& chunk) {
        chunk.for_each_pack([&](auto at) {
          Items<B> v = items(recent, at);
          if (begun) {
            const Items<B> before = items(sums, at);
            Items<B> rest = {};
            for_each_item<B>(at, [&](auto item) {
              Accumulator<Sum, Item<B>> sum{before.item[item.index]};
              sum.add(v.item[item.index]);
              v.item[item.index] = sum.value;
              rest.item[item.index] = -sum.compensation;
            });
            store(recent, at, rest);
          }
          store(sums, at, v);
        });
      });
    recent_begun = begun;
    begun = true;
  }

 private:
  template <class At>
  static Items<B> items(const C* row, At at) {
    Items<B> out = {};
    const LoadedPack<B, C> pack{row + at.column};
    for_each_item<B>(at, [&](auto item) { out.item[item.index] = read<B>(pack, item); });
    return out;
  }
  template <class At>
  static void store(C* row, At at, const Items<B>& v) {
    OutputPack<B, C, true> output(row, at.end);
    for_each_item<B>(at, [&](auto item) { write(output, item, v.item[item.index]); });
    output.store(at.place);
  }
};

template <class B>
struct ParamSums {
  static constexpr int run_rows = 8;
  static_assert(run_rows % max_rows_at_once == 0, "rows taken at once are in one run");

  ColumnSums<B, B::dweight> dweight;
  ColumnSums<B, B::dbias> dbias;
  ColumnSums<B, B::dgate_sums> dgate;
  int rows = 0;

  template <class Arguments>
  ParamSums(const Arguments& arguments, const Walk<B>& walk, SharedMemory&)
      : dweight(arguments.dweight_sums, walk, few(walk)),
        dbias(arguments.dbias_sums, walk, few(walk)),
        dgate(dgate_sums_of<B>(arguments), walk, few(walk)) {}

  void end_rows(const Walk<B>& walk, int count) {
    dweight.recent_begun = dbias.recent_begun = dgate.recent_begun = true;
    rows += count;
    if (rows == run_rows) finish(walk);
  }
  void finish(const Walk<B>& walk) {
    if (rows == 0) return;
    dweight.end_run(walk);
    dbias.end_run(walk);
    dgate.end_run(walk);
    rows = 0;
  }

 private:
  // Whether every block has at most run_rows rows.
  static bool few(const Walk<B>& walk) { return walk.rows <= walk.share.blocks * run_rows; }
};

template <class B, class Find, class Reload, class Write>
inline void for_each_row(const Walk<B>& walk, ParamSums<B>& sums, const Find& find, const Reload&,
                         const Write& write) {
  const auto write_rows = [&](auto* found, index_t first, int count) {
    walk.row(first).for_each_chunk_in_second_pass([&](const auto& chunk) {
      chunk.for_each_pack([&](auto at) {
        auto dweight = sums.dweight.open(at);
        auto dbias = sums.dbias.open(at);
        auto dgate = sums.dgate.open(at);
        for (int i = 0; i < count; ++i) write(found[i], at, dweight, dbias, dgate);
        sums.dweight.close(at, dweight);
        sums.dbias.close(at, dbias);
        sums.dgate.close(at, dgate);
      });
    });
    sums.end_rows(walk, count);
  };
  walk.for_each_rows(rows_at_once(walk.row_bytes), find, write_rows);
  sums.finish(walk);
}
