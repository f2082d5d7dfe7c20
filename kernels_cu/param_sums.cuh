// SPDX-License-Identifier: MIT
// Sums over the rows that a block walks, for the gradients of the parameters: one sum per column.
//
// Rows are added up sixteen at a time (the recent sums), and those sums added to the block's row of
// partial sums in memory, so that no chain of additions is long. Recent sums are kept in registers
// where the row is, else in memory: in a row that follows the block's partial sums, or, of a block
// with sixteen rows at most, in place of those. Blocks of different groups of columns write the
// same rows of sums, each its own columns.
#pragma once
#include "row.cuh"

// A pack of sums, open for adding to.
template <class Sums>
struct Adder {
  Sums sums;

  template <class At, class V>
  __device__ void add(At at, V v) {
    sums.item[at.index] += v;
  }
  template <class At, class V>
  __device__ void add_product(At at, V a, V b) {
    sums.item[at.index] = fma(a, b, sums.item[at.index]);
  }
};

// A pack of sums in memory.
template <class B, class Column>
struct OpenSums : Adder<Items<B>> {
  using C = typename B::compute_t;
  C* row;
  Column column;
  index_t width;

  // Without `begun`, the row holds no sums yet.
  __device__ OpenSums(C* row, Column column, index_t width, bool begun)
      : Adder<Items<B>>{}, row(row), column(column), width(width) {
    if (begun) this->sums = load_items<B>(row, column, width);
  }
  __device__ void store() const { store_items<B>(row, column, width, this->sums); }
};

// A pack of sums in registers.
template <class B>
struct OpenRegisters : Adder<Pack<typename B::compute_t, B::pack>&> {
  __device__ void store() const {}
};

// For a gradient that was not asked for.
struct NoSums {
  template <class At, class V>
  __device__ void add(At, V) {}
  template <class At, class V>
  __device__ void add_product(At, V, V) {}
  __device__ void store() const {}
};

// Sums for one parameter; `wanted` is false where the caller asked for none.
template <class B, bool wanted>
struct ColumnSums {
  using C = typename B::compute_t;
  static constexpr bool in_registers = B::packs > 0;
  static constexpr int teams = Team<B>::per_block;
  static constexpr int padded_width =
      wanted && teams > 1 ? B::packs * Team<B>::threads * B::pack : 1;
  struct Scratch {
    C sums[padded_width];
  };

  C* sums;
  C* recent_row;
  index_t width;
  Pack<C, B::pack> recent[wanted && in_registers ? B::packs : 1] = {};
  bool begun = false, recent_begun = false;

  __device__ ColumnSums(C* all_sums, const BlockShare& share, index_t width, bool few_rows)
      : sums(all_sums + share.block * (in_registers ? 1 : 2) * sum_pitch(width * share.groups) +
             share.group * width),
        recent_row(few_rows ? sums : sums + sum_pitch(width * share.groups)),
        width(width) {}

  template <class Column>
  __device__ auto open(int pack, Column column) {
    if constexpr (!wanted)
      return NoSums{};
    else if constexpr (in_registers)
      return OpenRegisters<B>{{recent[pack]}};
    else
      return OpenSums<B, Column>(recent_row, column, width, recent_begun);
  }

  // After the columns of some rows.
  __device__ void end_rows() { recent_begun = true; }

  // Moves the recent sums to the block's row.
  __device__ void flush(const Team<B>& team, Scratch& scratch) {
    if constexpr (teams > 1) add_teams(team, scratch);
    if constexpr (in_registers) {
#pragma unroll
      for (int i = 0; i < B::packs; ++i) {
        if (team.index() == 0) add_to_sums(team.column(i), recent[i]);
        recent[i] = {};
      }
    } else if (recent_row != sums) {
      for_each_column<B>(
          team.column(0), Team<B>::threads * B::pack, width,
          [&](auto column) { add_to_sums(column, load_pack<B>(recent_row, column, width)); },
          NoEndRun{});
    }
    begun = true;
    recent_begun = false;
  }

 private:
  template <class Column, class P>
  __device__ void add_to_sums(Column column, const P& v) {
    if (begun) {
      OpenSums<B, Column> open(sums, column, width, begun);
      for_each_item<B>(column, width, [&](auto at) { open.add(at, read<B>(v, at)); });
      open.store();
    } else {
      OutputPack<B, C, true> output(sums, width);
      for_each_item<B>(column, width, [&](auto at) { write(output, at, read<B>(v, at)); });
      output.store(column);
    }
  }

  // The block's teams add their recent sums one after the other; the first team gets the result.
  __device__ void add_teams(const Team<B>& team, Scratch& scratch) {
    for (int turn = 0; turn < teams; ++turn) {
      if (team.index() == turn) {
#pragma unroll
        for (int i = 0; i < B::packs; ++i) {
#pragma unroll
          for (int j = 0; j < B::pack; ++j) {
            C& total = scratch.sums[team.column(i) + j];
            total = turn == 0 ? recent[i].item[j] : total + recent[i].item[j];
          }
        }
      }
      __syncthreads();
    }
    if (team.index() > 0) return;
#pragma unroll
    for (int i = 0; i < B::packs; ++i) {
#pragma unroll
      for (int j = 0; j < B::pack; ++j) recent[i].item[j] = scratch.sums[team.column(i) + j];
    }
  }
};

template <class B>
struct ParamSums {
  using C = typename B::compute_t;
  using Weight = ColumnSums<B, B::dweight>;
  using Bias = ColumnSums<B, B::dbias>;
  struct Scratch {
    typename Weight::Scratch dweight;
    typename Bias::Scratch dbias;
  };

  static constexpr int most_recent = 16;

  Weight dweight;
  Bias dbias;
  Scratch& scratch;
  int recent_rows = 0;

  __device__ ParamSums(const BlockShare& share, C* dweight_sums, C* dbias_sums, index_t rows,
                       index_t width, Scratch& scratch)
      : dweight(dweight_sums, share, width, few(share, rows)),
        dbias(dbias_sums, share, width, few(share, rows)),
        scratch(scratch) {}

  // After `count` rows.
  __device__ void end_rows(const Team<B>& team, int count) {
    static_assert(most_recent % max_rows_at_once == 0, "rows that are taken at once are recent");
    dweight.end_rows();
    dbias.end_rows();
    recent_rows += count;
    if (recent_rows == most_recent) flush(team);
  }

  __device__ void finish(const Team<B>& team) {
    if (recent_rows > 0) flush(team);
  }

 private:
  // Whether all rows that a block walks are recent.
  static __device__ bool few(const BlockShare& share, index_t rows) {
    return rows <= share.blocks * Team<B>::per_block * most_recent;
  }

  __device__ void flush(const Team<B>& team) {
    if constexpr (B::dweight) dweight.flush(team, scratch.dweight);
    if constexpr (B::dbias) dbias.flush(team, scratch.dbias);
    recent_rows = 0;
  }
};
