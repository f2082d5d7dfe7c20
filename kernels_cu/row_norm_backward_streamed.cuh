// SPDX-License-Identifier: MIT
// Row norms, backward, for streamed rows: on a GPU rows too long for the team's registers, on a CPU
// all rows. The first pass finds the factors, chunk by chunk. The second pass reads the row again,
// on a GPU backwards, and writes the gradients.
#pragma once
#include "streamed.cuh"

template <class B>
struct StreamedBackwardRow : BackwardRow<B>, RowParameters<B> {
  HeldPacks<B, GatePack<B>, false> gates_held;  // a CPU may keep the gates

  __device__ StreamedBackwardRow(const Arguments<B>& arguments, const StreamedRow<B>& row)
      : BackwardRow<B>(arguments, row), RowParameters<B>(arguments, row), gates_held(row) {}
};

template <class B>
__device__ inline void differentiate_streamed(const Arguments<B>& arguments, Team<B>& team,
                                              const Walk<B>& walk) {
  SharedMemory memory;
  ParamSums<B> sums(arguments, walk, memory);
  Parameters<B> shared(arguments, walk.share, walk.share.row_index(0));

  const auto find = [&](const StreamedRow<B>& place) {
    StreamedBackwardRow<B> row(arguments, place);
    row.scalars = RowScalars<B>::load(arguments, place);
    RowSum<B> row_sums[3];
    if constexpr (B::reduces)
      place.for_each_chunk([&](const auto& chunk) {
        row.load(chunk);
        row.parameters(shared).load(chunk);
        ItemSums<B> chunk_sums[3];
        chunk.for_each_pack([&](auto at) {
          row.gates_held.put(at, row.add_to(chunk_sums, at, row.parameters(shared)));
        });
        unrolled<3>([&](int i) { row_sums[i].add(chunk_sums[i]); });
      });
    row.find_factors(arguments, place, team, row_sums);
    return row;
  };
  const auto reload = [&](auto& row, const auto& chunk) {
    row.load(chunk);
    row.load_rest(chunk);
    row.parameters(shared).load(chunk);
  };
  const auto write = [&](auto& row, auto at, auto&... to_sums) {
    row.write(at, row.gates_held.held_or(at, [&] { return row.gates(at); }), row.parameters(shared),
              to_sums...);
  };
  if constexpr (B::finds_sums)
    for_each_row(walk, find, [](const auto&, const auto&) {});
  else
    for_each_row(walk, sums, find, reload, write);
}
