// SPDX-License-Identifier: MIT
// Row norms, backward, of rows that are streamed: too long for the team's registers on a GPU, and
// all of them on a CPU. A pass finds the factors, chunk by chunk; a second one reads the row again,
// from its end backwards, and writes the gradients.
#pragma once
#include "streamed.cuh"

template <class B>
struct StreamedBackwardRow : BackwardRow<B> {
  HeldPacks<B, GatePack<B>, false> gates_held;

  __device__ StreamedBackwardRow(const Arguments<B>& arguments, const StreamedRow<B>& row)
      : BackwardRow<B>(arguments, row), gates_held(row) {}
};

template <class B>
__device__ inline void differentiate_streamed(const Arguments<B>& arguments, Team<B>& team,
                                              const Walk<B>& walk) {
  SharedMemory memory;
  ParamSums<B> sums(arguments, walk, memory);
  Parameters<B> parameters(arguments, walk.share);

  const auto find = [&](const StreamedRow<B>& place) {
    StreamedBackwardRow<B> row(arguments, place);
    row.saved = load_statistics<B>(arguments, place);
    RowSum<B> sum_p, sum_dr, sum_p_dr;
    if constexpr (B::reduces)
      place.for_each_chunk([&](const auto& chunk) {
        row.load(chunk);
        parameters.load(chunk);
        ItemSums<B> p_sums, dr_sums, p_dr_sums;
        chunk.for_each_pack([&](auto at) {
          row.gates_held.put(at, row.add_to(p_sums, dr_sums, p_dr_sums, at, parameters));
        });
        sum_p.add(p_sums);
        sum_dr.add(dr_sums);
        sum_p_dr.add(p_dr_sums);
      });
    row.find_factors(arguments, team, sum_p, sum_dr, sum_p_dr);
    return row;
  };
  const auto reload = [&](auto& row, const auto& chunk) {
    row.load(chunk);
    row.d_residual.load(chunk);
    parameters.load(chunk);
  };
  const auto write = [&](auto& row, auto at, auto& dweight, auto& dbias) {
    row.write(at, row.gates_held.held_or(at, [&] { return row.gates(at); }), parameters, dweight,
              dbias);
  };
  for_each_row(walk, sums, find, reload, write);
}
