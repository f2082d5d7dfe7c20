// SPDX-License-Identifier: MIT
// Kernels compute on items: on a GPU a number or a pair of floats, on a CPU a SIMD vector.
//
// Below are the names that kernels use, with the files that define them for a GPU. For a CPU, they
// are defined by files of the same names in cunorm/_backends/cpu/include/host (by memory.cuh for
// items.cuh), or by headers that these include. All others are shared, or private to a machine.
//
//   items.cuh       Item Items items_per_pack PerRow broadcast load_per_row store_per_row
//   memory.cuh      RowPointer LoadedPack load_pack OutputPack for_each_part for_each_item read
//                   write rounded_to clear_outside
//   reduce.cuh      ItemReduction ItemSums RowReduction RowSum Team warp_all_reduce
//   ptx.cuh         SharedMemory CLUSTER_LAUNCH async_commit async_wait launch_dependents
//                   wait_for_prerequisites
//   row.cuh         streamed Walk Row RowPacks ParameterPacks RowOutput StagedPacks
//                   GatePacks add_to_stored for_each_item
//   streamed.cuh    StreamedRow HeldPacks for_each_row
//   param_sums.cuh  ParamSums for_each_row
//   group_tile.cuh  Tile TilePacks TileOutput TileItems GroupTeam Group for_each_group
//   quantized.cuh   Magnitudes ChunkResults
//   math.cuh        exp erfc fabs tanh constant select at_least at_most logistic reciprocal
//                   reciprocal_root divided not_negative approximate Divisor
#pragma once
#include "pairs.cuh"
#include "types.cuh"

// Whether items are pairs: of two columns or, if rows are strided, of two rows.
template <class B>
inline constexpr bool paired = (has_pairs || strided_rows) && B::can_pair;

template <class B>
using Item = either<paired<B>, FloatPair, typename B::compute_t>;
template <class B>
inline constexpr int items_per_pack = paired<B> ? B::pack / 2 : B::pack;
template <class B>
using Items = Pack<Item<B>, items_per_pack<B>>;

// A number that a thread has for its row or, if items are pairs of two rows, for both.
template <class B>
using PerRow = either<strided_rows, Item<B>, typename B::compute_t>;

// Returns an item of elements of one row, or of two, with which each element meets its row's
// number.
template <class B>
__device__ inline Item<B> broadcast(PerRow<B> v) {
  return v;
}
template <class B, class C>
__device__ inline PerRow<B> load_per_row(const C* numbers, index_t row) {
  if constexpr (strided_rows && paired<B>)
    return {numbers[row], numbers[row + 1]};
  else
    return numbers[row];
}
template <class B, class C>
__device__ inline void store_per_row(C* numbers, index_t row, PerRow<B> v) {
  if constexpr (strided_rows && paired<B>) {
    numbers[row] = v.low;
    numbers[row + 1] = v.high;
  } else {
    numbers[row] = v;
  }
}
