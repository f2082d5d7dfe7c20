// SPDX-License-Identifier: MIT
// A row of the backward, and the two passes over it: the first finds its sums, the second writes
// its gradients. row_norm_backward.cu has the formulas.
#pragma once
#include "activations.cuh"
#include "affine.cuh"
#include "row.cuh"
#include "staged_rows.cuh"

template <class B>
struct Arguments {
  Rows<const typename B::dy_t> dy;
  Rows<const typename B::x_t> x;
  Rows<const typename B::d_residual_t> d_residual;
  Rows<const typename B::gate_t> gate;
  Rows<typename B::dx_t> dx;
  Rows<typename B::dresidual_t> dresidual;
  Rows<typename B::dgate_t> dgate;
  const typename B::weight_t* weight;
  const typename B::bias_t* bias;
  const typename B::compute_t* mean;
  const typename B::compute_t* rstd;
  typename B::compute_t* dweight_sums;
  typename B::compute_t* dbias_sums;
  Pack<typename B::compute_t, 3>* part_sums;  // of shared rows
  index_t rows, groups, width;                // rows of each group
  index_t pass;                               // over shared rows
  double k, weight_offset;
};

// What a thread keeps of a row: its inputs as they are stored.
template <class B>
struct RowInputs {
  LoadedPack<B, typename B::dy_t> dy;
  LoadedPack<B, typename B::x_t> x;
  LoadedPack<B, typename B::gate_t> gate;
};

template <class B>
__device__ inline RowInputs<B> as_loaded(const RowInputs<B>& kept) {
  return {as_loaded(kept.dy), as_loaded(kept.x), as_loaded(kept.gate)};
}

// What a gate does at each item of a pack.
template <class B>
using GatePack = Pack<Activated<Item<B>>, items_per_pack<B>>;

// A row, and what the first pass over it finds for the second:
//   k * r = ((p - mean) - correction) * k_rstd
//   dp    = dn * factor * k_rstd + k * r * r_factor + offset
template <class B>
struct BackwardRow {
  using C = typename B::compute_t;
  index_t end;  // the width, or 0 for a team that has no row
  const typename B::dy_t* dy;
  const typename B::x_t* x;
  const typename B::gate_t* gate;
  const typename B::dy_t* later_dy;  // of a row to come, to be prefetched
  const typename B::x_t* later_x;
  const typename B::gate_t* later_gate;
  const typename B::d_residual_t* d_residual;
  typename B::dx_t* dx;
  typename B::dresidual_t* dresidual;
  typename B::dgate_t* dgate;
  RowPacks<B, RowInputs<B>> packs;
  GatePack<B>* kept_gate;
  C mean, rstd;
  C correction, k_rstd, r_factor, offset;

  __device__ RowInputs<B> load(index_t column) const {
    return {load_pack<B>(dy, column, end), load_pack<B>(x, column, end),
            load_pack<B>(gate, column, end)};
  }

  template <class V>
  __device__ V shifted(V p) const {
    if constexpr (B::center)
      return p - mean;
    else
      return p;
  }
  template <class V>
  __device__ V centered(V p) const {
    if constexpr (B::center)
      return shifted(p) - correction;
    else
      return p;
  }
};

template <class B, class At>
__device__ inline Activated<Item<B>> gate_at(const RowInputs<B>& inputs, At at) {
  Activated<Item<B>> gate = {};
  if constexpr (present<typename B::gate_t>) gate = B::activation::at(read<B>(inputs.gate, at));
  return gate;
}

// An item of the inputs, with the gate applied on the side where it stands.
template <class B>
struct GatedItem {
  Activated<Item<B>> gate;
  Item<B> dy, dn, x = {}, p = {};

  template <class At>
  __device__ GatedItem(const RowInputs<B>& inputs, const Activated<Item<B>>& gate, At at)
      : gate(gate), dy(read<B>(inputs.dy, at)), dn(dy) {
    if constexpr (present<typename B::x_t>) p = x = read<B>(inputs.x, at);
    if constexpr (B::pre_gate) p *= gate.value;
    if constexpr (B::post_gate) dn *= gate.value;
  }
};

template <class B>
__device__ inline void open_row(const Arguments<B>& arguments, const Team<B>& team,
                                const BlockShare& share, index_t row_of_group, index_t ahead,
                                BackwardRow<B>& row) {
  using C = typename B::compute_t;
  const index_t rows = arguments.rows, index = share.row_index(row_of_group);
  const bool has_row = team.has_row(row_of_group, rows);
  row.end = has_row ? row_width(arguments) : 0;
  row.dy = arguments.dy.at(index);
  row.x = arguments.x.at(index);
  row.gate = arguments.gate.at(index);
  row.d_residual = arguments.d_residual.at(index);
  row.dx = arguments.dx.at(index);
  row.dresidual = arguments.dresidual.at(index);
  row.dgate = arguments.dgate.at(index);
  const index_t later = row_of_group + ahead < rows ? share.row_index(row_of_group + ahead) : index;
  row.later_dy = arguments.dy.at(later);
  row.later_x = arguments.x.at(later);
  row.later_gate = arguments.gate.at(later);
  row.rstd = row.mean = 0;
  if constexpr (present<typename B::x_t>)
    row.rstd = has_row ? global_load(arguments.rstd + index) : C(0);
  if constexpr (B::center) row.mean = has_row ? global_load(arguments.mean + index) : C(0);
  row.k_rstd = C(arguments.k) * row.rstd;
  row.correction = row.r_factor = row.offset = 0;
}

// Starts the copies of a row to come, if there is one. Results may lie over inputs even so: only
// the team that copies a row writes it, after it has taken it.
template <class B>
__device__ inline void copy_row(const Arguments<B>& arguments, const Team<B>& team,
                                const BlockShare& share, index_t row_of_group,
                                StagedRows<B>& staged) {
  if constexpr (B::async_copies) {
    const index_t index = share.row_index(row_of_group);
    const index_t end = inside(row_of_group, arguments.rows) ? row_width(arguments) : 0;
    staged.copy(team, end, arguments.dy.at(index), arguments.x.at(index), arguments.gate.at(index));
  }
}

// A thread's sums of p - mean, of dr / k and of their product, where they are needed; pass(use,
// end_run) goes over its part of the row.
template <class B, class ForEachPack>
__device__ inline Pack<typename B::compute_t, 3> find_sums_of(const Affine<B>& parameters,
                                                              const BackwardRow<B>& row,
                                                              ForEachPack for_each) {
  const index_t end = row.end;
  LaneSum<B> sum_p, sum_dr, sum_p_dr;
  const auto add = [&](auto column, const RowInputs<B>& kept) {
    const auto weight = load_pack<B>(only_if<B::dp>(parameters.weight), column, end);
    if constexpr (long_passes) prefetch_later<B>(row.later_x, column);
    prefetch_output<B>(row.dx, column);
    prefetch_output<B>(row.dresidual, column);
    prefetch_output<B>(row.dgate, column);
    GatePack<B> gates;
    for_each_item<B>(column, end, [&](auto at) {
      const auto gate = gates.item[at.index] = gate_at<B>(kept, at);
      const GatedItem<B> item(kept, gate, at);
      const auto p = clear_outside<B>(row.shifted(item.p), at);
      if constexpr (B::center) sum_p.add(at, p);
      if constexpr (B::dp) {
        auto dr = item.dn;
        if constexpr (present<typename B::weight_t>) dr *= parameters.factor(weight, at);
        if constexpr (B::center) sum_dr.add(at, dr);
        sum_p_dr.add_product(at, p, dr);
      }
    });
    if constexpr (B::kept_packs > 0) row.kept_gate[column / B::pack] = gates;
  };
  for_each(add, [&] {
    sum_p.end_run();
    sum_dr.end_run();
    sum_p_dr.end_run();
  });
  return {{sum_p.value(), sum_dr.value(), sum_p_dr.value()}};
}

// The correction and the factors of dp, from the row's sums.
template <class B>
__device__ inline void set_factors(const Arguments<B>& arguments,
                                   const Pack<typename B::compute_t, 3>& sums,
                                   BackwardRow<B>& row) {
  using C = typename B::compute_t;
  const C width = C(row_width(arguments)), rstd = row.rstd;
  C sum_q_dr = sums.item[2];
  if constexpr (B::center) {
    const C mean_dr = C(arguments.k) * sums.item[1] / width;
    row.correction = sums.item[0] / width;
    sum_q_dr = fma(-row.correction, sums.item[1], sums.item[2]);
    row.offset = -rstd * mean_dr;
  }
  row.r_factor = -rstd * (rstd * sum_q_dr) / width;
}

// The first pass over a row.
template <class B>
__device__ inline void find_factors(const Arguments<B>& arguments, Team<B>& team,
                                    const Affine<B>& parameters, const StagedRows<B>& staged,
                                    BackwardRow<B>& row) {
  const index_t end = row.end;
  const auto load = [&](index_t column) { return row.load(column); };
  if constexpr (B::async_copies)
    staged.take(team, end, row.packs);
  else if constexpr (B::packs > 0)
    row.packs.start(team, load);
  if constexpr (B::center || B::dp) {
    auto sums = find_sums_of(parameters, row, [&](auto use, auto end_run) {
      row.packs.next_pass(team, end, load, use, end_run);
    });
    if constexpr (B::center)
      sums = team.all_reduce(sums);
    else
      sums.item[2] = team.all_reduce(sums.item[2]);
    set_factors(arguments, sums, row);
  }
}

// The second pass, for one pack: the gradients with rows, and what the row adds to the sums.
template <class B, class Column, class Factors, class Bias, class WeightSums, class BiasSums>
__device__ inline void write_gradients(const BackwardRow<B>& row, int pack, Column column,
                                       const Factors& factors, const Bias& bias,
                                       WeightSums& dweight, BiasSums& dbias) {
  const index_t end = row.end;
  const auto kept = row.packs.pack(pack, column, [&](index_t column) { return row.load(column); });
  const auto d_residual = load_pack<B>(row.d_residual, column, end);
  prefetch_later<B>(row.later_dy, column);
  if constexpr (!long_passes) prefetch_later<B>(row.later_x, column);
  prefetch_later<B>(row.later_gate, column);
  const auto k_rstd = spread<B>(row.k_rstd);
  const auto r_factor = spread<B>(row.r_factor), offset = spread<B>(row.offset);
  OutputPack<B, typename B::dx_t> dx(row.dx, end);
  OutputPack<B, typename B::dresidual_t> dresidual(row.dresidual, end);
  OutputPack<B, typename B::dgate_t> dgate(row.dgate, end);
  const auto gate = [&](auto at) {
    if constexpr (B::kept_packs > 0)
      return row.kept_gate[column / B::pack].item[at.index];
    else
      return gate_at<B>(kept, at);
  };
  for_each_item<B>(column, end, [&](auto at) {
    const GatedItem<B> item(kept, gate(at), at);
    const auto k_r = row.centered(item.p) * k_rstd;
    const auto rounded = as_rounded<B>(k_r);
    dweight.add_product(at, item.dn, rounded);
    dbias.add(at, item.dn);
    auto dp = item.dn;
    if constexpr (present<typename B::weight_t>) dp *= factors.item[at.index];
    dp = fma(dp, k_rstd, fma(k_r, r_factor, offset));
    auto ds = dp;
    if constexpr (B::pre_gate) ds *= item.gate.value;
    if constexpr (present<typename B::d_residual_t>) ds += read<B>(d_residual, at);
    if constexpr (present<typename B::dx_t>) write(dx, at, ds);
    if constexpr (present<typename B::dresidual_t>) write(dresidual, at, ds);
    if constexpr (present<typename B::dgate_t>) {
      if constexpr (B::pre_gate)
        write(dgate, at, item.gate.derivative * (dp * item.x));
      else
        write(dgate, at, item.gate.derivative * (item.dy * affine<B>(rounded, factors, bias, at)));
    }
  });
  dx.store(column);
  dresidual.store(column);
  dgate.store(column);
}
