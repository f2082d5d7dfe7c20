// SPDX-License-Identifier: MIT
// The mean of a row and the mean square about it.
//
// One rounded mean is not enough: for a row of mean 1e4 and deviation 1 it is off by thousands of ulps of the result.
// So the row is shifted by about its mean, and what is left is corrected by the mean of the shifted row:
//   t = p - shift,   correction = mean(t),   q = t - correction,   variance = mean(q * q)
//
// `end` is the row's width, or 0 for a team that has no row; load(column) gives a pack on the first pass over the row,
// reload(column) on later ones.
#pragma once
#include "row.cuh"

template <class C>
struct Moments {
  C shift, correction, variance;

  template <class V>
  __device__ V centered(V p) const {
    return (p - shift) - correction;
  }
};

// The mean square about zero.
template <class B, class Kept, class Load>
__device__ inline Moments<typename B::compute_t> raw_moments(Team<B>& team, RowPacks<B, Kept>& row, index_t end,
                                                             index_t width, Load load) {
  using C = typename B::compute_t;
  LaneSum<B> sum;
  row.first_pass(team, end, load, [&](int, index_t column, const Kept& kept) {
    for_each_item<B>(column, end, [&](auto at) {
      const auto p = read<B>(kept, at);
      sum.add_product(at, p, p);
    });
    sum.end_pack();
  });
  return {C(0), C(0), team.all_reduce(sum.value()) / C(width)};
}

// For rows that cost nothing to go over again: in registers, or in a CPU's cache.
template <class B, class Kept, class Load, class Reload>
__device__ inline Moments<typename B::compute_t> two_pass_moments(Team<B>& team, RowPacks<B, Kept>& row, index_t end,
                                                                  index_t width, Load load, Reload reload) {
  using C = typename B::compute_t;
  LaneSum<B> sum;
  row.first_pass(team, end, load, [&](int, index_t column, const Kept& kept) {
    for_each_item<B>(column, end, [&](auto at) { sum.add(at, read<B>(kept, at)); });
    sum.end_pack();
  });
  const C shift = team.all_reduce(sum.value()) / C(width);

  LaneSum<B> sum_t, sum_tt;
  row.next_pass(team, end, reload, [&](int, index_t column, const Kept& kept) {
    for_each_item<B>(column, end, [&](auto at) {
      const auto t = clear_outside<B>(read<B>(kept, at) - shift, at);
      sum_t.add(at, t);
      sum_tt.add_product(at, t, t);
    });
    sum_t.end_pack();
    sum_tt.end_pack();
  });
  const auto sums = team.all_reduce(Pack<C, 2>{{sum_t.value(), sum_tt.value()}});
  const C correction = sums.item[0] / C(width);
  const C variance = fma(-correction, correction, sums.item[1] / C(width));
  return {shift, correction, variance < C(0) ? C(0) : variance};
}

// For rows that must be read from memory once: the shift is the mean of the row's first chunk, and each thread adds
// its chunks, and the team its threads, by Chan's formula.
template <class B, class Kept, class Load>
__device__ inline Moments<typename B::compute_t> one_pass_moments(Team<B>& team, index_t end, index_t width,
                                                                  Load load) {
  using C = typename B::compute_t;
  constexpr int chunk = 4;
  constexpr index_t chunk_width = index_t(chunk) * Team<B>::threads * B::pack;
  Kept kept[chunk];
  const auto load_chunk = [&](index_t first_pack) {
#pragma unroll
    for (int i = 0; i < chunk; ++i) kept[i] = load(team.column(first_pack + i));
  };
  const auto sum_chunk = [&](index_t first_pack, auto f) {
    LaneSum<B> sum;
#pragma unroll
    for (int i = 0; i < chunk; ++i)
      for_each_item<B>(team.column(first_pack + i), end,
                       [&](auto at) { sum.add(at, clear_outside<B>(f(read<B>(kept[i], at)), at)); });
    return sum.value();
  };

  load_chunk(0);
  const C shift = team.all_reduce(sum_chunk(0, [](C p) { return p; })) / C(width < chunk_width ? width : chunk_width);

  C count = 0, mean = 0, squares = 0;  // of t, over this thread's share of the row
  for (index_t first_pack = 0; team.column(first_pack) < end; first_pack += chunk) {
    if (first_pack > 0) load_chunk(first_pack);
    const C chunk_count = sum_chunk(first_pack, [](C) { return C(1); });
    const C chunk_mean = sum_chunk(first_pack, [&](C p) { return p - shift; }) / chunk_count;
    const C chunk_squares = sum_chunk(first_pack, [&](C p) {
      const C q = (p - shift) - chunk_mean;
      return q * q;
    });
    const C share = chunk_count / (count + chunk_count);
    const C step = chunk_mean - mean;
    squares += fma(step * step, count * share, chunk_squares);
    mean = fma(step, share, mean);
    count += chunk_count;
  }
  const C correction = team.all_reduce(count * mean) / C(width);
  const C off = mean - correction;
  return {shift, correction, team.all_reduce(fma(off * off, count, squares)) / C(width)};
}

template <class B, class Kept, class Load, class Reload>
__device__ inline Moments<typename B::compute_t> row_moments(Team<B>& team, RowPacks<B, Kept>& row, index_t end,
                                                             index_t width, Load load, Reload reload) {
  if constexpr (!B::center)
    return raw_moments(team, row, end, width, load);
  else if constexpr (B::packs > 0 || B::threads == 1)
    return two_pass_moments(team, row, end, width, load, reload);
  else
    return one_pass_moments<B, Kept>(team, end, width, load);
}
