// SPDX-License-Identifier: MIT
// Rows that several blocks share, each with a part of the columns: those of a CPU, where rows are
// few and long. A launch makes one pass over all parts, and finds what the one before has left:
//
//   add_residual      s, where there is a residual: the others read that
//   find_sums         each part's sums
//   find_sums_again   about a better shift, of rows whose beginning is unlike the rest; if centered
//   write_y
//
// A part is as long as what LaneSum adds up before it moves on, and parts are added in its order:
// no result depends on whether rows are shared.
#pragma once
#include "moments.cuh"

enum Pass : index_t { add_residual, find_sums, find_sums_again, write_y };

template <class B>
struct RowPart {
  index_t parts, number;
  int first;    // pack
  index_t end;  // the column after the last

  __device__ explicit RowPart(index_t width)
      : parts((width - first_pack(1) * B::pack + packs * B::pack - 1) / (packs * B::pack) + 1),
        number(blockIdx.x % parts),
        first(first_pack(number)),
        end(number + 1 < parts ? index_t(first_pack(number + 1)) * B::pack : width) {}

 private:
  static constexpr int packs = LaneSum<B>::recent_packs;

  // The first of a row's runs is of one pack, the one that is loaded before the others.
  static __device__ int first_pack(index_t part) {
    return part == 0 ? 0 : static_cast<int>(part) * packs - 15;
  }
};

// A part's sums: of squares or, about the shift, of t and t * t.
template <class C>
struct PartSums {
  C shift;
  Pack<C, 2> sums;
};

// The sums of a row's parts, of each time that they are found.
template <class B>
struct SharedSums {
  using C = typename B::compute_t;
  PartSums<C>* row;
  index_t parts;

  __device__ void store(Pass pass, index_t part, const PartSums<C>& sums) const {
    global_store(place(pass, part), sums);
  }

  __device__ Moments<B> moments(Pass pass, index_t width) const {
    Pack<C, 2> total = {};
    for (index_t part = 0; part < parts; ++part) {
      const auto sums = global_load(place(pass, part)).sums;
      for (int i = 0; i < 2; ++i) total.item[i] += sums.item[i];
    }
    if constexpr (B::center)
      return moments_of<B>(global_load(place(pass, 0)).shift, total, width);
    else
      return moments_of<B>(total.item[0], width);
  }

 private:
  __device__ PartSums<C>* place(Pass pass, index_t part) const {
    return row + (pass == find_sums ? 0 : parts) + part;
  }
};
