// SPDX-License-Identifier: MIT
// Row norms, backward: dx, the residual stream's gradient, dgate, and sums for dweight and dbias,
// in one kernel. x is what was normalised, so what the forward calls s.
//
//   p       = x * g(gate)    if pre-gate, else x
//   r       = (p - mean) * rstd                                            mean only if center
//   n       = k * r * (weight + weight_offset) + bias
//   dn      = dy * g(gate)   if post-gate, else dy
//   dr      = k * dn * (weight + weight_offset)
//   dp      = rstd * (dr - r * mean(r * dr) - mean(dr))                    mean(dr) only if center
//   dx      = (dp * g(gate)  if pre-gate, else dp) + d_residual
//   dgate   = g'(gate) * dp * x    if pre-gate;    g'(gate) * dy * n    if post-gate
//   dweight = sum over rows of dn * k * r
//   dbias   = sum over rows of dn
//
// The saved mean is rounded, so its error is measured and taken out again (see moments.cuh):
//   correction  = mean(p - mean)
//   sum(r * dr) = rstd * (sum((p - mean) * dr) - correction * sum(dr))
//
// Each block adds up dweight and dbias over the rows it walks and writes one row of partial sums
// (param_sums.cuh); param_grad.cu adds those in a fixed order. Operands that the wanted gradients
// do not need are absent.
#include "backward_row.cuh"
#include "param_sums.cuh"
#include "row_parts.cuh"

#ifndef ASYNC_COPIES
#define ASYNC_COPIES false
#endif
#ifndef KEPT_PACKS
#define KEPT_PACKS 0
#endif

// clang-format off
struct Build {
  using compute_t = COMPUTE_T;
  using dy_t = DY_T;
  using x_t = X_T;
  using d_residual_t = D_RESIDUAL_T;
  using gate_t = GATE_T;
  using dx_t = DX_T;
  using dresidual_t = DRESIDUAL_T;
  using dgate_t = DGATE_T;
  using weight_t = WEIGHT_T;
  using bias_t = BIAS_T;
  using activation = activations::GATE_ACTIVATION;
  using rounded_t = ROUNDED_T;                          // of k * r before weight
  static constexpr bool pre_gate = PRE_GATE;
  static constexpr bool post_gate = present<gate_t> && !pre_gate;
  static constexpr bool center = CENTER;
  static constexpr bool weight_offset = WEIGHT_OFFSET;
  static constexpr bool dweight = DWEIGHT;
  static constexpr bool dbias = DBIAS;
  // Whether the gradient of p is needed.
  static constexpr bool dp =
      present<dx_t> || present<dresidual_t> || (present<dgate_t> && pre_gate);
  static constexpr index_t width = WIDTH;               // 0: known only at run time
  static constexpr index_t groups = GROUPS;             // the same
  static constexpr int threads = THREADS;               // of a block
  static constexpr int threads_per_row = THREADS_PER_ROW;  // more: a cluster's
  static constexpr int pack = PACK;                     // elements a thread handles at a time
  static constexpr int packs = PACKS;                   // packs that a thread keeps; 0: streamed
  static constexpr int access = ACCESS;                 // elements in one access, by alignment
  static constexpr bool async_copies = ASYNC_COPIES;    // of each team's next row
  // Of the gates of the rows taken at once, which a CPU's thread keeps where it has a first pass.
  static constexpr int kept_packs = center || dp ? KEPT_PACKS : 0;
};
// clang-format on

// The second pass over some rows at once, from a pack of theirs on.
template <class B>
__device__ inline void write_rows(const Team<B>& team, const Affine<B>& parameters,
                                  const BackwardRow<B>* rows, int count, ParamSums<B>& param_sums,
                                  int first = 0) {
  const index_t end = rows[0].end;
  for_each_pack(
      team, end,
      [&](int pack, auto column) {
        const auto factors = parameters.load_factors(column, end);
        const auto bias = parameters.load_bias(column, end);
        auto dweight = param_sums.dweight.open(pack, column);
        auto dbias = param_sums.dbias.open(pack, column);
        for (int i = 0; i < count; ++i)
          write_gradients(rows[i], pack, column, factors, bias, dweight, dbias);
        dweight.store();
        dbias.store();
      },
      NoEndRun{}, first);
}

template <class B>
__device__ inline ParamSums<B> open_sums(const Arguments<B>& arguments, const BlockShare& share,
                                         typename ParamSums<B>::Scratch& scratch) {
  return {share,          arguments.dweight_sums, arguments.dbias_sums,
          arguments.rows, row_width(arguments),   scratch};
}

template <class B>
__device__ inline void differentiate_rows(const Arguments<B>& arguments, Team<B>& team,
                                          const BlockShare& share, index_t first, int count,
                                          index_t ahead, StagedRows<B>& staged,
                                          ParamSums<B>& param_sums) {
  BackwardRow<B> rows[max_rows_at_once];
  const Affine<B> parameters(arguments, share);
  const index_t row_packs = (row_width(arguments) + B::pack - 1) / B::pack;
  for (int i = 0; i < count; ++i) {
    copy_row(arguments, team, share, first + i + share.blocks * Team<B>::per_block, staged);
    open_row(arguments, team, share, first + i, ahead, rows[i]);
    rows[i].kept_gate = kept_packs<GatePack<B>, B::kept_packs>() + i * row_packs;
    find_factors(arguments, team, parameters, staged, rows[i]);
  }

  write_rows(team, parameters, rows, count, param_sums);
}

// One pass over the block's part of a row that several blocks share; the row has partial sums of
// its own.
template <class B>
__device__ inline void pass_over_part(const Arguments<B>& arguments, const Team<B>& team,
                                      typename ParamSums<B>::Scratch& scratch) {
  using C = typename B::compute_t;
  const RowPart<B> part(row_width(arguments));
  const BlockShare share(row_groups(arguments), static_cast<int>(part.parts));
  const SharedSums<C> sums(arguments.part_sums, share.row_index(share.block), part.parts);
  const Affine<B> parameters(arguments, share);
  BackwardRow<B> row;
  open_row(arguments, team, share, share.block, 0, row);
  row.end = part.end;
  if (arguments.pass == find_sums) {
    const auto over_part = [&](auto use, auto end_run) {
      for_each_pack(
          team, part.end, [&](int, auto column) { use(column, row.load(column)); }, end_run,
          part.first);
    };
    sums.store(find_sums, part.number, find_sums_of(parameters, row, over_part));
  } else {
    if constexpr (B::center || B::dp) set_factors(arguments, sums.total(find_sums), row);
    auto param_sums = open_sums(arguments, share, scratch);
    write_rows(team, parameters, &row, 1, param_sums, part.first);
  }
}

template <class B>
__device__ inline void differentiate(const Arguments<B>& arguments, Team<B>& team,
                                     StagedRows<B>& staged,
                                     typename ParamSums<B>::Scratch& scratch) {
  if constexpr (shared_rows) {
    pass_over_part(arguments, team, scratch);
  } else {
    const BlockShare share(row_groups(arguments), Team<B>::blocks);
    auto param_sums = open_sums(arguments, share, scratch);
    copy_row(arguments, team, share, share.block * Team<B>::per_block + team.index(), staged);
    using Row = first_present<typename B::x_t, typename B::dy_t>;
    const int at_once = rows_at_once<Row>(row_width(arguments));
    const index_t ahead = rows_ahead<Row>(row_width(arguments));
    for_each_rows(team, share, arguments.rows, at_once, [&](index_t first, int count) {
      differentiate_rows(arguments, team, share, first, count, ahead, staged, param_sums);
      param_sums.end_rows(team, count);
    });
    param_sums.finish(team);
    team.end();
  }
}

extern "C" __global__ void __launch_bounds__(Build::threads, 1) CLUSTER_LAUNCH
    row_norm_backward(const Arguments<Build> arguments) {
  __shared__ Team<Build>::Scratch scratch;
  __shared__ ParamSums<Build>::Scratch param_scratch;
  __shared__ StagedRows<Build>::Storage staged_storage;
  Team<Build> team(scratch);
  StagedRows<Build> staged(staged_storage);
  differentiate(arguments, team, staged, param_scratch);
}
