// SPDX-License-Identifier: MIT
// What a kernel computes on at once is an item: a number on a GPU, a SIMD vector on a CPU. Here are
// the names that kernels need for a CPU's sake, and that say nothing on a GPU.
//
// Kernels are written in the names below. A CPU's header of the same file name, in
// cunorm/_backends/cpu/include/host, provides each of them in its own way; items.cuh's names are in
// its memory.cuh.
//
//   items.cuh       Item Items items_per_pack spread
//   memory.cuh      inside LoadedPack load_pack OutputPack for_each_part for_each_item read write
//                   rounded_to clear_outside
//   reduce.cuh      ItemSums RowSum Team warp_all_reduce
//   ptx.cuh         SharedMemory CLUSTER_LAUNCH async_commit async_wait launch_dependents
//                   wait_for_prerequisites
//   row.cuh         streamed PackAt Chunk Walk Row RowPacks ParameterPacks RowOutput StagedPacks
//   streamed.cuh    StreamedRow HeldPacks for_each_row
//   param_sums.cuh  ParamSums for_each_row
//   group_tile.cuh  Tile TilePacks TileOutput TileItems GroupTeam Group for_each_group
//   math.cuh        exp erfc fabs tanh constant select at_least at_most logistic reciprocal
//                   reciprocal_root divided approximate
#pragma once
#include "types.cuh"

template <class B>
using Item = typename B::compute_t;
template <class B>
inline constexpr int items_per_pack = B::pack;
template <class B>
using Items = Pack<Item<B>, items_per_pack<B>>;

// An item that is everywhere v.
template <class B>
__device__ inline Item<B> spread(typename B::compute_t v) {
  return v;
}
