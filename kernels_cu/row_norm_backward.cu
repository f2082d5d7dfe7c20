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
// The saved mean is rounded, so its error is measured and taken out again (see the forward):
//   correction  = mean(p - mean)
//   sum(r * dr) = rstd * (sum((p - mean) * dr) - correction * sum(dr))
//
// Each block adds up dweight and dbias over the rows it walks and writes one row of partial sums
// (param_sums.cuh); param_grad.cu adds those in a fixed order. Operands that the wanted gradients
// do not need are absent.
#include "param_sums.cuh"

struct Build : RowBuild {
  using dy_t = DY_T;
  using d_residual_t = D_RESIDUAL_T;
  using dx_t = DX_T;
  using dresidual_t = DRESIDUAL_T;
  using dgate_t = DGATE_T;
  static constexpr bool dweight = DWEIGHT;
  static constexpr bool dbias = DBIAS;
  // Whether the gradient of p is needed.
  static constexpr bool dp =
      present<dx_t> || present<dresidual_t> || (present<dgate_t> && pre_gate);
  // Whether a row is reduced: if not, the first pass over it computes nothing.
  static constexpr bool reduces = center || dp;
  static constexpr int stages = STAGES;                   // rows on their way to shared memory
  static constexpr bool sums_in_shared = SUMS_IN_SHARED;  // where that has room
};

template <class B>
struct Arguments {
  using C = typename B::compute_t;
  Rows<const typename B::dy_t> dy;
  Rows<const typename B::x_t> x;
  Rows<const typename B::d_residual_t> d_residual;
  Rows<const typename B::gate_t> gate;
  Rows<typename B::dx_t> dx;
  Rows<typename B::dresidual_t> dresidual;
  Rows<typename B::dgate_t> dgate;
  const typename B::weight_t* weight;
  const typename B::bias_t* bias;
  const C* mean;
  const C* rstd;
  C* dweight_sums;
  C* dbias_sums;
  index_t rows, groups, width;  // rows of each group
  Number<C> k, weight_offset;
};

// What a gate does at each item of a pack.
template <class B>
using GatePack = Pack<Activated<Item<B>>, items_per_pack<B>>;

template <class B, class G, class At>
__device__ inline Activated<Item<B>> gate_at(const G& gate, At item) {
  Activated<Item<B>> activated = {};
  if constexpr (present<typename B::gate_t>) activated = B::activation::at(read<B>(gate, item));
  return activated;
}

// An item of the inputs, with the gate applied on the side where it stands.
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

// A row: its operands, and what the first pass over it finds for the second.
//   k * r = ((p - mean) - correction) * k_rstd
//   dp    = dn * factor * k_rstd + k * r * r_factor + offset
template <class B>
struct BackwardRow {
  using C = typename B::compute_t;
  RowPacks<B, typename B::dy_t> dy;
  RowPacks<B, typename B::x_t> x;
  RowPacks<B, typename B::gate_t> gate;
  RowPacks<B, typename B::d_residual_t, true> d_residual;
  typename B::dx_t* dx;
  typename B::dresidual_t* dresidual;
  typename B::dgate_t* dgate;
  HeldPacks<B, GatePack<B>, false> gates;
  C rstd = 0, mean = 0, correction = 0, k_rstd = 0, r_factor = 0, offset = 0;

  __device__ BackwardRow(const Arguments<B>& arguments, const Row<B>& row)
      : dy(row.of(arguments.dy)),
        x(row.of(arguments.x)),
        gate(row.of(arguments.gate)),
        d_residual(row.of(arguments.d_residual)),
        dx(row.of(arguments.dx)),
        dresidual(row.of(arguments.dresidual)),
        dgate(row.of(arguments.dgate)),
        gates(row) {}

  template <class V>
  __device__ V shifted(V p) const {
    if constexpr (B::center) p -= mean;
    return p;
  }
};

// Inputs of rows to come, on their way to shared memory. Results may lie over inputs even so: only
// the thread that copies a pack writes there, after it has taken it. No barrier is needed, as a
// thread takes what it copied itself, and copies to the same place only after that.
template <class B>
struct StagedRows {
  StagedPacks<B, typename B::dy_t> dy;
  StagedPacks<B, typename B::x_t> x;
  StagedPacks<B, typename B::gate_t> gate;
  StagedPacks<B, typename B::d_residual_t> d_residual;
  int stage = 0;

  __device__ explicit StagedRows(SharedMemory& memory)
      : dy(memory), x(memory), gate(memory), d_residual(memory) {}

  __device__ void copy(const Arguments<B>& arguments, const Row<B>& row) {
    const BackwardRow<B> inputs(arguments, row);
    dy.copy(inputs.dy, row, stage);
    x.copy(inputs.x, row, stage);
    gate.copy(inputs.gate, row, stage);
    d_residual.copy(inputs.d_residual, row, stage);
    async_commit();
    if (++stage == B::stages) stage = 0;
  }

  // The row that was copied first.
  __device__ void take(BackwardRow<B>& inputs, const Row<B>& row) const {
    async_wait<B::stages - 1>();
    dy.take(inputs.dy, row, stage);
    x.take(inputs.x, row, stage);
    gate.take(inputs.gate, row, stage);
    d_residual.take(inputs.d_residual, row, stage);
  }
};

template <class B>
__device__ inline void differentiate(const Arguments<B>& arguments, Team<B>& team) {
  using C = typename B::compute_t;
  const BlockShare share(row_groups(arguments), Team<B>::blocks);
  const Walk<B> walk(team, share, arguments.rows, row_width(arguments));
  const C width = C(row_width(arguments)), k = arguments.k, weight_offset = arguments.weight_offset;
  const index_t first_parameter = share.group * row_width(arguments);
  ParameterPacks<B, typename B::weight_t> weight(arguments.weight + first_parameter);
  ParameterPacks<B, typename B::bias_t> bias(arguments.bias + first_parameter);
  SharedMemory memory;
  StagedRows<B> staged(memory);
  ParamSums<B> sums(arguments, walk, memory);

  // Load: the parameters once, where rows are held; a row's inputs all at once, or, where there are
  // stages, while so many rows before it are computed.
  const auto load_parameters = [&](const auto& chunk) {
    weight.load(chunk);
    bias.load(chunk);
  };
  if constexpr (!streamed<B>) load_parameters(walk.whole_row().first_chunk());
  if constexpr (B::stages > 0)
    for (int i = 0; i < B::stages; ++i) staged.copy(arguments, walk.row(i));
  const auto load = [&](auto& row, const auto& chunk) {
    row.dy.load(chunk);
    row.x.load(chunk);
    row.gate.load(chunk);
    if constexpr (!streamed<B>) row.d_residual.load(chunk);
  };
  const auto load_statistics = [&](const auto& place) {
    Pack<C, 2> found = {};
    if (present<typename B::x_t> && place.exists) found.item[0] = arguments.rstd[place.index];
    if (B::center && place.exists) found.item[1] = arguments.mean[place.index];
    return found;
  };
  Pack<C, 2> next_statistics = {};
  if constexpr (B::stages > 0) next_statistics = load_statistics(walk.row(0));

  // Reduce, and find the factors.
  const auto find = [&](const auto& place) {
    BackwardRow<B> row(arguments, place);
    if constexpr (B::stages > 0) {
      staged.take(row, place);
      staged.copy(arguments, place.after(B::stages));
    }
    const auto statistics = B::stages > 0 ? next_statistics : load_statistics(place);
    row.rstd = statistics.item[0];
    row.mean = statistics.item[1];
    row.k_rstd = k * row.rstd;
    if constexpr (B::stages > 0) next_statistics = load_statistics(place.after(1));

    RowSum<B> sum_p, sum_dr, sum_p_dr;
    place.for_each_chunk([&](const auto& chunk) {
      if constexpr (B::stages == 0) load(row, chunk);
      if constexpr (streamed<B>) load_parameters(chunk);
      if constexpr (B::reduces) {
        ItemSums<B> p_sums, dr_sums, p_dr_sums;
        chunk.for_each_pack([&](auto at) {
          const auto dy = row.dy[at];
          const auto x = row.x[at];
          const auto gate = row.gate[at];
          GatePack<B> gates;
          for_each_item<B>(at, [&](auto item) {
            gates.item[item.index] = gate_at<B>(gate, item);
            const GatedItem<B> gated(dy, x, gates.item[item.index], item);
            const auto p = clear_outside<B>(row.shifted(gated.p), item);
            if constexpr (B::center) p_sums.add(item, p);
            if constexpr (B::dp) {
              auto dr = gated.dn;
              if constexpr (present<typename B::weight_t>)
                dr *= factor<B>(weight[at], weight_offset, item);
              if constexpr (B::center) dr_sums.add(item, dr);
              p_dr_sums.add_product(item, p, dr);
            }
          });
          row.gates.put(at, gates);
        });
        sum_p.add(p_sums);
        sum_dr.add(dr_sums);
        sum_p_dr.add(p_dr_sums);
      }
    });

    C sum_q_dr = 0;
    if constexpr (B::center) {
      const auto found = team.totals(sum_p, sum_dr, sum_p_dr);
      row.correction = math::divided(found.item[0], width);
      row.offset = -row.rstd * math::divided(k * found.item[1], width);
      sum_q_dr = fma(-row.correction, found.item[1], found.item[2]);
    } else if constexpr (B::dp) {
      sum_q_dr = team.totals(sum_p_dr).item[0];
    }
    row.r_factor = math::divided(-row.rstd * (row.rstd * sum_q_dr), width);
    return row;
  };

  // Store: the gradients with rows, and what the row adds to the sums over rows.
  const auto load_again = [&](auto& row, const auto& chunk) {
    load(row, chunk);
    row.d_residual.load(chunk);
    load_parameters(chunk);
  };
  const auto write_pack = [&](auto& row, auto at, auto& dweight, auto& dbias) {
    const auto dy = row.dy.again(at);
    const auto x = row.x.again(at);
    const auto gate = row.gate.again(at);
    const auto& gates = row.gates.again(at, [&] {
      GatePack<B> pack;
      for_each_item<B>(at, [&](auto item) { pack.item[item.index] = gate_at<B>(gate, item); });
      return pack;
    });
    const auto d_residual = row.d_residual[at];
    const auto k_rstd = spread<B>(row.k_rstd);
    const auto r_factor = spread<B>(row.r_factor), offset = spread<B>(row.offset);
    RowOutput<B, typename B::dx_t> dx(row.dx);
    RowOutput<B, typename B::dresidual_t> dresidual(row.dresidual);
    RowOutput<B, typename B::dgate_t> dgate(row.dgate);
    for_each_item<B>(at, [&](auto item) {
      const auto& activated = gates.item[item.index];
      const GatedItem<B> gated(dy, x, activated, item);
      auto q = row.shifted(gated.p);
      if constexpr (B::center) q -= row.correction;
      const auto k_r = q * k_rstd, rounded = as_rounded<B>(k_r);
      dweight.add_product(item, gated.dn, rounded);
      dbias.add(item, gated.dn);
      auto dp = gated.dn;
      if constexpr (present<typename B::weight_t>) dp *= factor<B>(weight[at], weight_offset, item);
      dp = fma(dp, k_rstd, fma(k_r, r_factor, offset));
      auto ds = dp;
      if constexpr (B::pre_gate) ds *= activated.value;
      if constexpr (present<typename B::d_residual_t>) ds += read<B>(d_residual, item);
      if constexpr (present<typename B::dx_t>) write(dx, item, ds);
      if constexpr (present<typename B::dresidual_t>) write(dresidual, item, ds);
      if constexpr (present<typename B::dgate_t> && B::pre_gate)
        write(dgate, item, activated.derivative * (dp * gated.x));
      if constexpr (present<typename B::dgate_t> && B::post_gate)
        write(dgate, item,
              activated.derivative *
                  (gated.dy * affine<B>(rounded, weight[at], weight_offset, bias[at], item)));
    });
    dx.store(at);
    dresidual.store(at);
    dgate.store(at);
  };
  for_each_row(walk, sums, find, load_again, write_pack);
}

extern "C" __global__ void __launch_bounds__(Build::threads, Build::blocks_per_sm) CLUSTER_LAUNCH
    row_norm_backward(const Arguments<Build> arguments) {
  __shared__ Team<Build>::Scratch scratch;
  Team<Build> team(scratch);
  differentiate(arguments, team);
}
