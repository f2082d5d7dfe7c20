// SPDX-License-Identifier: MIT
// Rows that several blocks share, each with a part of the columns: those of a CPU, where rows are
// few and long. A launch makes one pass over all parts, and finds what the one before has left:
//
//   add_residual      s, where a forward has a residual: the others read that
//   find_sums         each part's sums
//   find_sums_again   about a better shift, where a row's beginning is unlike the rest: of a
//   forward
//                     that centers
//   write_results
//
// A part has the packs that LaneSum adds up before it moves on, and parts are added in its order:
// no result depends on whether rows are shared.
#pragma once
#include "row.cuh"

enum Pass : index_t { add_residual, find_sums, find_sums_again, write_results };

// The block's part of a row. Runs are of 16 packs, but the first, of `first_run`, the last, and
// after that the pack that the row's end cuts, which is one for itself.
template <class B, int first_run = 16>
struct RowPart {
  index_t parts, number;
  int first;    // pack
  index_t end;  // the column after the last

  __device__ explicit RowPart(index_t width)
      : parts(count(width)),
        number(blockIdx.x % parts),
        first(first_pack(number, width)),
        end(number + 1 < parts ? index_t(first_pack(number + 1, width)) * B::pack : width) {}

 private:
  static constexpr int run = 16, runs = LaneSum<B>::recent_packs / run;  // of a part

  static __device__ index_t count(index_t width) {
    const index_t whole = width / B::pack;
    const index_t of_row =
        (whole + run - first_run + run - 1) / run + (whole * B::pack < width ? 1 : 0);
    return (of_row + runs - 1) / runs;
  }
  static __device__ int first_pack(index_t part, index_t width) {
    const index_t pack = part == 0 ? 0 : part * runs * run - (run - first_run);
    const index_t whole = width / B::pack;
    return static_cast<int>(pack < whole ? pack : whole);
  }
};

// The sums of the parts of a row, for each time that a forward finds them.
template <class C>
struct SharedSums {
  using Sums = Pack<C, 3>;
  Sums* row;
  index_t parts;

  __device__ SharedSums(Sums* all_rows, index_t row_index, index_t parts)
      : row(all_rows + 2 * row_index * parts), parts(parts) {}

  __device__ void store(Pass pass, index_t part, const Sums& sums) const {
    global_store(place(pass, part), sums);
  }
  __device__ Sums load(Pass pass, index_t part) const { return global_load(place(pass, part)); }

  __device__ Sums total(Pass pass) const {
    Sums total = {};
    for (index_t part = 0; part < parts; ++part) {
      const Sums sums = load(pass, part);
      for (int i = 0; i < 3; ++i) total.item[i] += sums.item[i];
    }
    return total;
  }

 private:
  __device__ Sums* place(Pass pass, index_t part) const {
    return row + (pass == find_sums ? 0 : parts) + part;
  }
};
