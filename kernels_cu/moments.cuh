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

// A thread's sum of squares; pass(use, end_run) goes over its part of the row.
template <class B, class Kept, class Pass>
__device__ inline typename B::compute_t square_sum(index_t end, Pass pass) {
  LaneSum<B> sum;
  pass(
      [&](auto column, const Kept& kept) {
        for_each_item<B>(column, end, [&](auto at) {
          const auto p = read<B>(kept, at);
          sum.add_product(at, p, p);
        });
      },
      [&] { sum.end_run(); });
  return sum.value();
}

// A thread's sums of t and of t * t.
template <class B, class Kept, class Pass>
__device__ inline Pack<typename B::compute_t, 2> shifted_sums(typename B::compute_t shift,
                                                              index_t end, Pass pass) {
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
  return {{sum_t.value(), sum_tt.value()}};
}

// What a row's moments are found from, of a thread's part of it: without center, the sum of
// squares.
template <class B, class Kept, class Pass>
__device__ inline Pack<typename B::compute_t, 2> part_sums(typename B::compute_t shift, index_t end,
                                                           Pass pass) {
  if constexpr (B::center)
    return shifted_sums<B, Kept>(shift, end, pass);
  else
    return {{square_sum<B, Kept>(end, pass)}};
}

// The mean square about zero, of a row's sum of squares.
template <class B>
__device__ inline Moments<B> moments_of(typename B::compute_t square_sum, index_t width) {
  using C = typename B::compute_t;
  return {C(0), C(0), square_sum / C(width)};
}

// Of a row's sums of t and of t * t.
template <class B>
__device__ inline Moments<B> moments_of(typename B::compute_t shift,
                                        const Pack<typename B::compute_t, 2>& sums, index_t width) {
  using C = typename B::compute_t;
  const C correction = sums.item[0] / C(width);
  const C variance = fma(-correction, correction, sums.item[1] / C(width));
  return {shift, correction, variance < C(0) ? C(0) : variance};
}

// Whether the shift is more than half a deviation from the mean.
template <class B>
__device__ inline bool is_far(const Moments<B>& moments) {
  return typename B::compute_t(4) * moments.correction * moments.correction > moments.variance;
}

// The mean of what a row's team has loaded of it at first.
template <class B, class Kept>
__device__ inline typename B::compute_t first_mean(Team<B>& team, const RowPacks<B, Kept>& row,
                                                   index_t end, index_t width) {
  using C = typename B::compute_t;
  constexpr index_t kept_width = RowPacks<B, Kept>::kept_packs * Team<B>::threads * B::pack;
  LaneSum<B> sum;
  row.for_each_kept(
      team,
      [&](auto column, const Kept& kept) {
        for_each_item<B>(column, end, [&](auto at) { sum.add(at, read<B>(kept, at)); });
      },
      [&] { sum.end_run(); });
  return team.all_reduce(sum.value()) / C(width < kept_width ? width : kept_width);
}

// The shift is the first mean: that of the row where it is kept in registers. The beginning of a
// streamed row may be unlike the rest; then a second pass has a shift that is right.
template <class B, class Kept, class Load, class Reload>
__device__ inline Moments<B> central_moments(Team<B>& team, const RowPacks<B, Kept>& row,
                                             index_t end, index_t width, Load load, Reload reload) {
  using C = typename B::compute_t;
  const auto about = [&](C shift, auto pass) {
    return moments_of<B>(shift, team.all_reduce(shifted_sums<B, Kept>(shift, end, pass)), width);
  };
  auto moments = about(first_mean(team, row, end, width), [&](auto use, auto end_run) {
    row.first_pass(team, end, load, use, end_run);
  });
  if constexpr (B::packs == 0) {
    if (is_far(moments))
      moments = about(moments.shift + moments.correction, [&](auto use, auto end_run) {
        row.first_pass(team, end, reload, use, end_run);
      });
  }
  return moments;
}

template <class B, class Kept, class Load, class Reload>
__device__ inline Moments<B> row_moments(Team<B>& team, const RowPacks<B, Kept>& row, index_t end,
                                         index_t width, Load load, Reload reload) {
  if constexpr (B::center) {
    return central_moments(team, row, end, width, load, reload);
  } else {
    const auto sum = square_sum<B, Kept>(
        end, [&](auto use, auto end_run) { row.first_pass(team, end, load, use, end_run); });
    return moments_of<B>(team.all_reduce(sum), width);
  }
}
