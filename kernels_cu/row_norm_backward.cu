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

template <class B>
__device__ inline void differentiate_row(const Arguments<B>& arguments, Team<B>& team, index_t row,
                                         ParamSums<B>& param_sums) {
  using C = typename B::compute_t;
  using dx_t = typename B::dx_t;
  using dresidual_t = typename B::dresidual_t;
  const index_t width = B::width > 0 ? B::width : arguments.width;
  const bool has_row = team.has_row(row, arguments.rows);
  const index_t end = has_row ? width : 0;
  const auto* dy_row = arguments.dy.at(row);
  const auto* x_row = arguments.x.at(row);
  const index_t next_row = row + 1 < arguments.rows ? row + 1 : row;
  const auto* next_dy_row = arguments.dy.at(next_row);
  const auto* next_x_row = arguments.x.at(next_row);
  const auto* d_residual_row = arguments.d_residual.at(row);
  auto* dx_row = arguments.dx.at(row);
  auto* dresidual_row = arguments.dresidual.at(row);
  const C k = C(arguments.k);
  const C rstd = has_row ? global_load(arguments.rstd + row) : C(0);
  C mean = 0;
  if constexpr (B::center) mean = has_row ? global_load(arguments.mean + row) : C(0);

  const auto load = [&](index_t column) -> RowInputs<B> {
    return {load_pack<B>(dy_row, column, end), load_pack<B>(x_row, column, end)};
  };
  const auto times_weight = [&](auto v, const auto& weight, auto at) {
    if constexpr (present<typename B::weight_t>)
      return v * read<B>(weight, at);
    else
      return v;
  };

  RowPacks<B, RowInputs<B>> packs;
  if constexpr (B::packs > 0) packs.start(team, load);
  LaneSum<B> sum_x, sum_dr, sum_x_dr;  // of x - mean and of dr / k
  packs.next_pass(team, end, load, [&](int, index_t column, const RowInputs<B>& kept) {
    const auto weight = load_pack<B>(arguments.weight, column, end);
    for_each_item<B>(column, end, [&](auto at) {
      const auto x = clear_outside<B>(read<B>(kept.x, at) - mean, at);
      const auto dr = times_weight(read<B>(kept.dy, at), weight, at);
      if constexpr (B::center) {
        sum_x.add(at, x);
        sum_dr.add(at, dr);
      }
      sum_x_dr.add_product(at, x, dr);
    });
    sum_x.end_pack();
    sum_dr.end_pack();
    sum_x_dr.end_pack();
  });
  C correction = 0, mean_dr = 0, sum_q_dr;
  if constexpr (B::center) {
    const auto sums =
        team.all_reduce(Pack<C, 3>{{sum_x.value(), sum_dr.value(), sum_x_dr.value()}});
    correction = sums.item[0] / C(width);
    mean_dr = k * sums.item[1] / C(width);
    sum_q_dr = fma(-correction, sums.item[1], sums.item[2]);
  } else {
    sum_q_dr = team.all_reduce(sum_x_dr.value());
  }
  const C k_rstd = k * rstd;
  const Item<B> weight_factor = Item<B>{} + k_rstd;
  const Item<B> r_factor = Item<B>{} - rstd * (rstd * sum_q_dr) / C(width);  // of k * r
  const Item<B> offset = Item<B>{} - rstd * mean_dr;

  packs.next_pass(team, end, load, [&](int pack, index_t column, const RowInputs<B>& kept) {
    const auto weight = load_pack<B>(arguments.weight, column, end);
    const auto d_residual = load_pack<B>(d_residual_row, column, end);
    prefetch_pack<B>(next_x_row, column, end);
    prefetch_pack<B>(next_dy_row, column, end);
    auto dweight = param_sums.dweight.open(pack, column);
    auto dbias = param_sums.dbias.open(pack, column);
    OutputPack<B, dx_t> dx(dx_row, column, end);
    OutputPack<B, dresidual_t> dresidual(dresidual_row, column, end);
    for_each_item<B>(column, end, [&](auto at) {
      const auto k_r = ((read<B>(kept.x, at) - mean) - correction) * k_rstd;
      const auto dy = read<B>(kept.dy, at);
      dweight.add_product(at, dy, k_r);
      dbias.add(at, dy);
      auto ds = fma(times_weight(dy, weight, at), weight_factor, fma(k_r, r_factor, offset));
      if constexpr (present<typename B::d_residual_t>) ds += read<B>(d_residual, at);
      if constexpr (present<dx_t>) write(dx, at, ds);
      if constexpr (present<dresidual_t>) write(dresidual, at, ds);
    });
    dweight.store();
    dbias.store();
    dx.store();
    dresidual.store();
  });
}

extern "C" __global__ void __launch_bounds__(Build::threads, 1)
    row_norm_backward(const Arguments<Build> arguments) {
  __shared__ Team<Build>::Scratch scratch;
  __shared__ ParamSums<Build>::Scratch param_scratch;
  Team<Build> team(scratch);
  const index_t width = Build::width > 0 ? Build::width : arguments.width;
  ParamSums<Build> param_sums(team, arguments.dweight_sums, arguments.dbias_sums, width,
                              param_scratch);
  const RowGroups groups = row_groups_of_block<Build>(arguments.rows);
  for (index_t group = groups.first; group < groups.last; group += groups.step) {
    differentiate_row<Build>(arguments, team, group * Team<Build>::per_block + team.index(),
                             param_sums);
    param_sums.end_row(team);
  }
  param_sums.finish(team);
}
