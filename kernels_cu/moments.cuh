// SPDX-License-Identifier: MIT
// The mean of a row and the mean square about it.
//
// One rounded mean is not enough: for a row of mean 1e4 and deviation 1 it is off by thousands of
// ulps of the result. So the row is shifted by about its mean, and what is left is corrected by the
// mean of the shifted row:
//   t = p - shift,   correction = mean(t),   q = t - correction,   variance = mean(q * q)
// Any shift within half a deviation of the mean serves: mean(q * q) = mean(t * t) - correction^2 is
// then a difference of 5 to 1 at most, and keeps its accuracy. (2 to 1 cost the bound of y.)
//
// `end` is the row's width, or 0 for a team that has no row; load(column) gives a pack on the first
// pass over the row, reload(column) on later ones.
#pragma once
#include "row.cuh"

template <class B>
struct Moments {
  typename B::compute_t shift, correction, variance;

  template <class V>
  __device__ V centered(V p) const {
    if constexpr (B::center)
      return (p - shift) - correction;
    else
      return p;
  }
};

// The mean square about zero.
template <class B, class Kept, class Load>
__device__ inline Moments<B> raw_moments(Team<B>& team, const RowPacks<B, Kept>& row, index_t end,
                                         index_t width, Load load) {
  using C = typename B::compute_t;
  LaneSum<B> sum;
  row.first_pass(
      team, end, load,
      [&](auto column, const Kept& kept) {
        for_each_item<B>(column, end, [&](auto at) {
          const auto p = read<B>(kept, at);
          sum.add_product(at, p, p);
        });
      },
      [&] { sum.end_run(); });
  return {C(0), C(0), team.all_reduce(sum.value()) / C(width)};
}

// pass(use, end_run) goes over the row.
template <class B, class Kept, class Pass>
__device__ inline Moments<B> moments_about(typename B::compute_t shift, Team<B>& team, index_t end,
                                           index_t width, Pass pass) {
  using C = typename B::compute_t;
  LaneSum<B> sum_t, sum_tt;
  pass(
      [&](auto column, const Kept& kept) {
        for_each_item<B>(column, end, [&](auto at) {
          const auto t = clear_outside<B>(read<B>(kept, at) - shift, at);
          sum_t.add(at, t);
          sum_tt.add_product(at, t, t);
        });
      },
      [&] {
        sum_t.end_run();
        sum_tt.end_run();
      });
  const auto sums = team.all_reduce(Pack<C, 2>{{sum_t.value(), sum_tt.value()}});
  const C correction = sums.item[0] / C(width);
  const C variance = fma(-correction, correction, sums.item[1] / C(width));
  return {shift, correction, variance < C(0) ? C(0) : variance};
}

// The shift is the mean of what the row's team has loaded so far: of the row where it is kept in
// registers. The beginning of a streamed row may be unlike the rest; then a second pass has a shift
// that is right.
template <class B, class Kept, class Load, class Reload>
__device__ inline Moments<B> central_moments(Team<B>& team, const RowPacks<B, Kept>& row,
                                             index_t end, index_t width, Load load, Reload reload) {
  using C = typename B::compute_t;
  constexpr index_t kept_width = RowPacks<B, Kept>::kept_packs * Team<B>::threads * B::pack;
  LaneSum<B> sum;
  row.for_each_kept(
      team,
      [&](auto column, const Kept& kept) {
        for_each_item<B>(column, end, [&](auto at) { sum.add(at, read<B>(kept, at)); });
      },
      [&] { sum.end_run(); });
  const C shift = team.all_reduce(sum.value()) / C(width < kept_width ? width : kept_width);

  auto moments = moments_about<B, Kept>(shift, team, end, width, [&](auto use, auto end_run) {
    row.first_pass(team, end, load, use, end_run);
  });
  if constexpr (B::packs == 0) {
    if (C(4) * moments.correction * moments.correction > moments.variance)
      moments = moments_about<B, Kept>(
          shift + moments.correction, team, end, width,
          [&](auto use, auto end_run) { row.next_pass(team, end, reload, use, end_run); });
  }
  return moments;
}

template <class B, class Kept, class Load, class Reload>
__device__ inline Moments<B> row_moments(Team<B>& team, const RowPacks<B, Kept>& row, index_t end,
                                         index_t width, Load load, Reload reload) {
  if constexpr (B::center)
    return central_moments(team, row, end, width, load, reload);
  else
    return raw_moments(team, row, end, width, load);
}
