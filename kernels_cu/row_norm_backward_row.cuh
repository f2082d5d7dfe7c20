// SPDX-License-Identifier: MIT
// Row norms, backward: a row. It has the row's operands and factors, adds packs to the row's sums,
// and writes the gradients of packs.
#pragma once
#include "math.cuh"
#include "param_sums.cuh"
#include "parameters.cuh"

template <class B>
struct Arguments;

enum RowSums { SumP, SumDr, SumPDr };  // sums of p - mean, dr / k, their product

// The activated gate and its derivative at each item of a pack.
template <class B>
using GatePack = Pack<Activated<Item<B>>, items_per_pack<B>>;

template <class B, class G, class At>
__device__ inline Activated<Item<B>> gate_at(const G& gate, At item) {
  Activated<Item<B>> activated = {};
  if constexpr (present<typename B::gate_t>) activated = B::activation::at(read<B>(gate, item));
  return activated;
}

// The operands that have one element for each row. load() loads only those that are needed.
template <class B>
struct RowScalars {
  PerRow<B> rstd = 0, mean = 0, correction = 0, sum_dr = 0, sum_r_dr = 0;

  static __device__ RowScalars load(const Arguments<B>& arguments, const Row<B>& row) {
    const auto& scalars = arguments.scalars;
    RowScalars found;
    if (!row.exists) return found;
    if constexpr (present<typename B::x_t>) found.rstd = load_per_row<B>(scalars.rstd, row.index);
    if constexpr (B::center) found.mean = load_per_row<B>(scalars.mean, row.index);
    if constexpr (B::center && B::given_correction)
      if (scalars.correction != nullptr) found.correction = scalars.correction[row.index];
    if constexpr (B::given_sums && B::dp) {
      found.sum_r_dr = scalars.sum_r_dr[row.index];
      if constexpr (B::center) found.sum_dr = scalars.sum_dr[row.index];
    }
    return found;
  }
};

// An item of the inputs, with the gate applied to x (pre-gate) or to dy (post-gate).
template <class B>
struct GatedItem {
  Item<B> dy, dn, x = {}, p = {};

  template <class Dy, class X, class At>
  __device__ GatedItem(const Dy& dy_pack, const X& x_pack, const Activated<Item<B>>& gate, At item)
      : dy(read<B>(dy_pack, item)), dn(dy) {
    if constexpr (present<typename B::x_t>) p = x = read<B>(x_pack, item);
    if constexpr (B::pre_gate) p *= gate.value;
    if constexpr (B::post_gate) dn *= gate.value;
  }
};

// A pack of the gradient of a parameter of which each row has its own.
template <class B, class T>
struct OwnGradient {
  using C = typename B::compute_t;
  static constexpr bool adds = present<T> && B::accumulate;
  using Held = either<adds && sizeof(T) < sizeof(C), C, T>;
  T* row;
  RowOutput<B, Held, true> output;

  __device__ explicit OwnGradient(T* row)
      : row(row), output(RowPointer<Held>{reinterpret_cast<Held*>(row)}) {}
  template <class At>
  __device__ void set(At item, Item<B> v) {
    if constexpr (present<T>) write(output, item, v);
  }
  template <class At>
  __device__ void store(At at) {
    if constexpr (adds)
      add_to_stored<B>(row, output, at);
    else if constexpr (present<T>)
      output.store(at);
  }
};

// The packs of the branch, if it is needed.
template <class B, class T = typename B::branch_t>
struct BranchPacks : RowPacks<B, T, true> {
  __device__ BranchPacks(const Arguments<B>& arguments, const Row<B>& row)
      : RowPacks<B, T, true>(row.of(arguments.branch)) {}
};
template <class B>
struct BranchPacks<B, absent> {
  __device__ BranchPacks(const Arguments<B>&, const Row<B>&) {}
  template <class Chunk>
  __device__ void load(const Chunk&) const {}
  template <class At>
  __device__ absent operator[](At) const {
    return {};
  }
};

// A row: its operands, and its factors.
//   k * r = ((p - mean) - correction) * k_rstd
//   dp    = dn * (weight + weight_offset) * k_rstd + k * r * r_factor + offset
template <class B>
struct BackwardRow {
  using C = typename B::compute_t;
  RowPacks<B, typename B::dy_t, B::finds_sums> dy;
  RowPacks<B, typename B::x_t, B::finds_sums> x;
  GatePacks<B, typename B::gate_t, B::branch_gate> gate;
  RowPacks<B, typename B::dresidual_out_t, true> dresidual_out;
  BranchPacks<B> branch;
  RowPointer<typename B::dx_t> dx;
  RowPointer<typename B::dresidual_t> dresidual;
  RowPointer<typename B::dgate_t> dgate;
  typename B::own_dweight_t* own_dweight = nullptr;
  typename B::own_dbias_t* own_dbias = nullptr;
  RowScalars<B> scalars;
  PerRow<B> correction = 0, k_rstd = 0, r_factor = 0, offset = 0;

  __device__ BackwardRow(const Arguments<B>& arguments, const Row<B>& row)
      : dy(row.of(arguments.dy)),
        x(row.of(arguments.x)),
        gate(row.of(arguments.gate)),
        dresidual_out(row.of(arguments.dresidual_out)),
        branch(arguments, row),
        dx(row.of(arguments.dx)),
        dresidual(row.of(arguments.dresidual)),
        dgate(row.of(arguments.dgate)) {
    if constexpr (SEGMENT_AXES > 0) {
      own_dweight = arguments.own_dweight.at(row.index);
      own_dbias = arguments.own_dbias.at(row.index);
    }
  }

  // Loads the inputs that the first pass over a streamed row needs.
  template <class Chunk>
  __device__ void load(const Chunk& chunk) {
    dy.load(chunk);
    x.load(chunk);
    if constexpr (!B::branch_gate) gate.load(chunk);
  }
  // Loads the other inputs.
  template <class Chunk>
  __device__ void load_rest(const Chunk& chunk) {
    dresidual_out.load(chunk);
    if constexpr (B::branch_gate) gate.load(chunk);
    branch.load(chunk);
  }
  // p - mean
  template <class V>
  __device__ V shifted(V p) const {
    if constexpr (B::center) p -= scalars.mean;
    return p;
  }
  template <class At>
  __device__ GatePack<B> gates(At at) const {
    const auto pack = gate[at];
    GatePack<B> gates;
    for_each_item<B>(at, [&](auto item) { gates.item[item.index] = gate_at<B>(pack, item); });
    return gates;
  }

  // Adds a pack to the sums over the row. Returns the pack's gates, which a CPU may keep.
  template <class At>
  __device__ GatePack<B> add_to(ItemSums<B> (&sums)[3], At at,
                                const Parameters<B>& parameters) const {
    const auto dy_pack = dy[at];
    const auto x_pack = x[at];
    const auto gate_pack = pack_if<!B::branch_gate>(gate, at);
    GatePack<B> gates;
    for_each_item<B>(at, [&](auto item) {
      if constexpr (!B::branch_gate) gates.item[item.index] = gate_at<B>(gate_pack, item);
      const GatedItem<B> gated(dy_pack, x_pack, gates.item[item.index], item);
      auto p = shifted(gated.p);
      if constexpr (B::center && B::given_correction) p -= scalars.correction;
      p = clear_outside<B>(p, item);
      if constexpr (B::center && !B::given_correction) sums[SumP].add(item, p);
      if constexpr (B::dp) {
        auto dr = gated.dn;
        if constexpr (present<typename B::weight_t>) dr *= parameters.factor(at, item);
        if constexpr (B::center) sums[SumDr].add(item, dr);
        sums[SumPDr].add_product(item, p, dr);
      }
    });
    return gates;
  }

  // Finds the factors, or stores the sums.
  template <class Sums>
  __device__ void find_factors(const Arguments<B>& arguments, const Row<B>& row, Team<B>& team,
                               Sums (&sums)[3]) {
    if constexpr (B::finds_sums)
      store_sums(arguments, row, team.all_reduce(sums[SumDr], sums[SumPDr]), team.thread() == 0);
    else if constexpr (B::given_sums)
      take_factors(arguments);
    else
      find_own_factors(arguments, team, sums);
  }
  __device__ void store_sums(const Arguments<B>& arguments, const Row<B>& row, Pack<C, 2> found,
                             bool is_first) const {
    if (!row.exists || !is_first) return;
    if constexpr (B::center) arguments.scalars.sum_dr[row.index] = found.item[0];
    arguments.scalars.sum_r_dr[row.index] = scalars.rstd * found.item[1];
  }
  __device__ void take_factors(const Arguments<B>& arguments) {
    const C k = arguments.k, count = arguments.count;
    correction = scalars.correction;
    k_rstd = k * scalars.rstd;
    offset = -scalars.rstd * math::divided(k * scalars.sum_dr, count);
    r_factor = math::divided(-scalars.rstd * scalars.sum_r_dr, count);
  }
  template <class Sums>
  __device__ void find_own_factors(const Arguments<B>& arguments, Team<B>& team, Sums (&sums)[3]) {
    const C width = C(row_width(arguments)), k = arguments.k;
    PerRow<B> sum_q_dr = 0;
    if constexpr (B::center && !B::dp) {
      correction = math::divided(team.all_reduce(sums[SumP]).item[0], width);
    } else if constexpr (B::center) {
      const auto found = team.all_reduce(sums[SumP], sums[SumDr], sums[SumPDr]);
      correction = math::divided(found.item[SumP], width);
      offset = -scalars.rstd * math::divided(k * found.item[SumDr], width);
      sum_q_dr = fma(-correction, found.item[SumDr], found.item[SumPDr]);
    } else if constexpr (B::dp) {
      sum_q_dr = team.all_reduce(sums[SumPDr]).item[0];
    }
    k_rstd = k * scalars.rstd;
    r_factor = math::divided(-scalars.rstd * (scalars.rstd * sum_q_dr), width);
  }

  // Writes the gradients of a pack, and adds to those that are sums.
  template <class At, class Gates, class Dweight, class Dbias, class Dgate>
  __device__ void write(At at, const Gates& gates, const Parameters<B>& parameters,
                        Dweight& dweight, Dbias& dbias, Dgate& dgate_sums) const {
    const auto dy_pack = dy[at];
    const auto x_pack = x[at];
    const auto dresidual_out_pack = dresidual_out[at];
    const auto branch_pack = branch[at];
    const auto k_rstd = broadcast<B>(this->k_rstd);
    const auto r_factor = broadcast<B>(this->r_factor), offset = broadcast<B>(this->offset);
    RowOutput<B, typename B::dx_t> dx(this->dx);
    RowOutput<B, typename B::dresidual_t> dresidual(this->dresidual);
    RowOutput<B, typename B::dgate_t> dgate(this->dgate);
    OwnGradient<B, typename B::own_dweight_t> own_dweight(this->own_dweight);
    OwnGradient<B, typename B::own_dbias_t> own_dbias(this->own_dbias);
    for_each_item<B>(at, [&](auto item) {
      const auto& activated = gates.item[item.index];
      const GatedItem<B> gated(dy_pack, x_pack, activated, item);
      auto q = shifted(gated.p);
      if constexpr (B::center) q -= correction;
      const auto k_r = q * k_rstd, rounded = as_rounded<B>(k_r);
      dweight.add_product(item, gated.dn, rounded);
      dbias.add(item, gated.dn);
      own_dweight.set(item, gated.dn * rounded);
      own_dbias.set(item, gated.dn);
      auto dp = gated.dn;
      if constexpr (present<typename B::weight_t>) dp *= parameters.factor(at, item);
      dp = fma(dp, k_rstd, fma(k_r, r_factor, offset));
      auto ds = dp;
      if constexpr (B::pre_gate) ds *= activated.value;
      if constexpr (present<typename B::dresidual_out_t>) ds += read<B>(dresidual_out_pack, item);
      if constexpr (present<typename B::dx_t>)
        ::write(dx, item, B::branch_gate ? ds * activated.value : ds);
      if constexpr (present<typename B::dresidual_t>) ::write(dresidual, item, ds);
      if constexpr (present<typename B::branch_t>) {
        const auto slope = activated.derivative * ds, v = read<B>(branch_pack, item);
        dgate_sums.add_product(item, slope, v);
        if constexpr (present<typename B::dgate_t>) ::write(dgate, item, slope * v);
      }
      if constexpr (present<typename B::dgate_t> && B::pre_gate)
        ::write(dgate, item, activated.derivative * (dp * gated.x));
      if constexpr (present<typename B::dgate_t> && B::post_gate)
        ::write(dgate, item,
                activated.derivative * (gated.dy * parameters.affine(rounded, at, item)));
    });
    dx.store(at);
    dresidual.store(at);
    dgate.store(at);
    own_dweight.store(at);
    own_dbias.store(at);
  }
};
