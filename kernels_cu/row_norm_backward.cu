// SPDX-License-Identifier: MIT
// Row norms, backward: dx, the residual stream's gradient, and sums for dweight and dbias, in one
// kernel.
//
//   r       = (x - mean) * rstd             x is what was normalised; mean only if center
//   dr      = k * dy * weight
//   dx      = rstd * (dr - r * mean(r * dr) - mean(dr)) + d_residual     mean(dr) only if center
//   dweight = sum over rows of dy * k * r
//   dbias   = sum over rows of dy
//
// The saved mean is rounded, so its error is measured and taken out again (see moments.cuh):
//   correction  = mean(x - mean)
//   sum(r * dr) = rstd * (sum((x - mean) * dr) - correction * sum(dr))
//
// Each block adds up dweight and dbias over the rows it walks and writes one row of partial sums
// (param_sums.cuh); param_grad.cu adds those in a fixed order.
#include "param_sums.cuh"
#include "row.cuh"

// clang-format off
struct Build {
  using compute_t = COMPUTE_T;
  using dy_t = DY_T;
  using x_t = X_T;
  using d_residual_t = D_RESIDUAL_T;
  using dx_t = DX_T;
  using dresidual_t = DRESIDUAL_T;
  using weight_t = WEIGHT_T;
  static constexpr bool center = CENTER;
  static constexpr bool dweight = DWEIGHT;
  static constexpr bool dbias = DBIAS;
  static constexpr index_t width = WIDTH;               // 0: known only at run time
  static constexpr int threads = THREADS;               // of a block
  static constexpr int threads_per_row = THREADS_PER_ROW;
  static constexpr int pack = PACK;                     // elements a thread handles at a time
  static constexpr int packs = PACKS;                   // packs that a thread keeps; 0: streamed
  static constexpr int access = ACCESS;                 // elements in one access, by alignment
};
// clang-format on

template <class B>
struct Arguments {
  Rows<const typename B::dy_t> dy;
  Rows<const typename B::x_t> x;
  Rows<const typename B::d_residual_t> d_residual;
  Rows<typename B::dx_t> dx;
  Rows<typename B::dresidual_t> dresidual;
  const typename B::weight_t* weight;
  const typename B::compute_t* mean;
  const typename B::compute_t* rstd;
  typename B::compute_t* dweight_sums;
  typename B::compute_t* dbias_sums;
  index_t rows, width;
  double k;
};

// What a thread keeps of a row: its two inputs as they are stored.
template <class B>
struct RowInputs {
  LoadedPack<B, typename B::dy_t> dy;
  LoadedPack<B, typename B::x_t> x;
};

// A row, and what the first pass over it finds for the second:
//   k * r = ((x - mean) - correction) * k_rstd
//   dx    = dy * weight * k_rstd + k * r * r_factor + offset + d_residual
template <class B>
struct BackwardRow {
  using C = typename B::compute_t;
  index_t end;  // the width, or 0 for a team that has no row
  const typename B::dy_t* dy;
  const typename B::x_t* x;
  const typename B::dy_t* later_dy;  // of a row to come, to be prefetched
  const typename B::x_t* later_x;
  const typename B::d_residual_t* d_residual;
  typename B::dx_t* dx;
  typename B::dresidual_t* dresidual;
  RowPacks<B, RowInputs<B>> packs;
  C mean, rstd;
  C correction, k_rstd, r_factor, offset;

  __device__ RowInputs<B> load(index_t column) const {
    return {load_pack<B>(dy, column, end), load_pack<B>(x, column, end)};
  }
};

template <class B>
__device__ inline void open_row(const Arguments<B>& arguments, const Team<B>& team, index_t index,
                                index_t ahead, BackwardRow<B>& row) {
  using C = typename B::compute_t;
  const bool has_row = team.has_row(index, arguments.rows);
  row.end = has_row ? row_width(arguments) : 0;
  row.dy = arguments.dy.at(index);
  row.x = arguments.x.at(index);
  row.d_residual = arguments.d_residual.at(index);
  row.dx = arguments.dx.at(index);
  row.dresidual = arguments.dresidual.at(index);
  const index_t later = index + ahead < arguments.rows ? index + ahead : index;
  row.later_dy = arguments.dy.at(later);
  row.later_x = arguments.x.at(later);
  row.rstd = has_row ? global_load(arguments.rstd + index) : C(0);
  row.mean = 0;
  if constexpr (B::center) row.mean = has_row ? global_load(arguments.mean + index) : C(0);
}

// The first pass: the row's sums, and from them the factors of dx.
template <class B>
__device__ inline void find_factors(const Arguments<B>& arguments, Team<B>& team,
                                    BackwardRow<B>& row) {
  using C = typename B::compute_t;
  const index_t end = row.end;
  const auto load = [&](index_t column) { return row.load(column); };
  if constexpr (B::packs > 0) row.packs.start(team, load);
  LaneSum<B> sum_x, sum_dr, sum_x_dr;  // of x - mean and of dr / k
  const auto add = [&](auto column, const RowInputs<B>& kept) {
    const auto weight = load_pack<B>(arguments.weight, column, end);
    if constexpr (long_passes) prefetch_pack<B>(row.later_x, column);
    prefetch_output<B>(row.dx, column);
    prefetch_output<B>(row.dresidual, column);
    for_each_item<B>(column, end, [&](auto at) {
      const auto x = clear_outside<B>(read<B>(kept.x, at) - row.mean, at);
      auto dr = read<B>(kept.dy, at);
      if constexpr (present<typename B::weight_t>) dr *= read<B>(weight, at);
      if constexpr (B::center) {
        sum_x.add(at, x);
        sum_dr.add(at, dr);
      }
      sum_x_dr.add_product(at, x, dr);
    });
  };
  row.packs.next_pass(team, end, load, add, [&] {
    sum_x.end_run();
    sum_dr.end_run();
    sum_x_dr.end_run();
  });

  const C width = C(row_width(arguments)), k = C(arguments.k), rstd = row.rstd;
  row.k_rstd = k * rstd;
  C sum_q_dr;
  if constexpr (B::center) {
    const auto sums =
        team.all_reduce(Pack<C, 3>{{sum_x.value(), sum_dr.value(), sum_x_dr.value()}});
    const C mean_dr = k * sums.item[1] / width;
    row.correction = sums.item[0] / width;
    sum_q_dr = fma(-row.correction, sums.item[1], sums.item[2]);
    row.offset = -rstd * mean_dr;
  } else {
    sum_q_dr = team.all_reduce(sum_x_dr.value());
    row.correction = row.offset = 0;
  }
  row.r_factor = -rstd * (rstd * sum_q_dr) / width;
}

// The second pass, for one pack: dx, and what the row adds to the sums.
template <class B, class Column, class Weight, class WeightSums, class BiasSums>
__device__ inline void write_dx(const BackwardRow<B>& row, int pack, Column column,
                                const Weight& weight, WeightSums& dweight, BiasSums& dbias) {
  const index_t end = row.end;
  const auto kept = row.packs.pack(pack, column, [&](index_t column) { return row.load(column); });
  const auto d_residual = load_pack<B>(row.d_residual, column, end);
  prefetch_pack<B>(row.later_dy, column);
  if constexpr (!long_passes) prefetch_pack<B>(row.later_x, column);
  const auto k_rstd = spread<B>(row.k_rstd);
  const auto r_factor = spread<B>(row.r_factor), offset = spread<B>(row.offset);
  OutputPack<B, typename B::dx_t> dx(row.dx, column, end);
  OutputPack<B, typename B::dresidual_t> dresidual(row.dresidual, column, end);
  for_each_item<B>(column, end, [&](auto at) {
    const auto dy = read<B>(kept.dy, at);
    const auto k_r = ((read<B>(kept.x, at) - row.mean) - row.correction) * k_rstd;
    dweight.add_product(at, dy, k_r);
    dbias.add(at, dy);
    auto ds = dy;
    if constexpr (present<typename B::weight_t>) ds *= weight.item[at.index];
    ds = fma(ds, k_rstd, fma(k_r, r_factor, offset));
    if constexpr (present<typename B::d_residual_t>) ds += read<B>(d_residual, at);
    if constexpr (present<typename B::dx_t>) write(dx, at, ds);
    if constexpr (present<typename B::dresidual_t>) write(dresidual, at, ds);
  });
  dx.store();
  dresidual.store();
}

template <class B>
__device__ inline void differentiate_rows(const Arguments<B>& arguments, Team<B>& team,
                                          index_t first, int count, index_t ahead,
                                          ParamSums<B>& param_sums) {
  BackwardRow<B> rows[max_rows_at_once];
  for (int i = 0; i < count; ++i) {
    open_row(arguments, team, first + i, ahead, rows[i]);
    find_factors(arguments, team, rows[i]);
  }

  const index_t end = rows[0].end;
  for_each_pack(team, end, [&](int pack, auto column) {
    const auto weight = load_items<B>(arguments.weight, column, end);
    auto dweight = param_sums.dweight.open(pack, column);
    auto dbias = param_sums.dbias.open(pack, column);
    for (int i = 0; i < count; ++i) write_dx(rows[i], pack, column, weight, dweight, dbias);
    dweight.store();
    dbias.store();
  });
}

extern "C" __global__ void __launch_bounds__(Build::threads, 1)
    row_norm_backward(const Arguments<Build> arguments) {
  __shared__ Team<Build>::Scratch scratch;
  __shared__ ParamSums<Build>::Scratch param_scratch;
  Team<Build> team(scratch);
  const index_t width = row_width(arguments);
  ParamSums<Build> param_sums(team, arguments.dweight_sums, arguments.dbias_sums, width,
                              param_scratch);
  const int at_once = rows_at_once<Build::x_t>(width);
  const index_t ahead = rows_ahead<Build::x_t>(width);
  for_each_rows(team, arguments.rows, at_once, [&](index_t first, int count) {
    differentiate_rows(arguments, team, first, count, ahead, param_sums);
    param_sums.end_rows(team, count);
  });
  param_sums.finish(team);
}
