// SPDX-License-Identifier: MIT
// Row norms, forward mode: the tangent of y. Another build finds the tangent of a backward's dx.
//
// p, r, k and n are those of row_norm_backward.cu, x' is the tangent of x:
//   p' = x' * g(gate) + x * g'(gate) * gate'                   if pre-gate, else x'
//   r' = rstd * (p' - r * mean(r * p') - mean(p'))             mean(p') only if center
//   n' = k * r' * (weight + weight_offset) + k * r * weight' + bias'
//   y' = n' * g(gate) + n * g'(gate) * gate'                   if post-gate, else n'
//
// The other build is given dy, and has no gate. Only x has a tangent:
//   dr  = k * dy * (weight + weight_offset)
//   dx' = -rstd^2 * (mean(r * dr) * (x' - mean(x')) + mean(r * x') * (dr - mean(dr)) + r * s)
//   s   = mean(dr * x') - mean(dr) * mean(x') - 3 * mean(r * dr) * mean(r * x')
//                                                              mean(x'), mean(dr) only if center
// dx' is symmetric in dr and x', because r is the gradient of a function of p.
//
// As in the backward, the rounding error of the saved mean is measured and removed.
#include "math.cuh"
#include "parameters.cuh"
#include "streamed.cuh"

struct Build : RowBuild {
  using x_tangent_t = X_TANGENT_T;
  using gate_tangent_t = GATE_TANGENT_T;
  using dy_t = DY_T;
  using weight_tangent_t = WEIGHT_TANGENT_T;
  using bias_tangent_t = BIAS_TANGENT_T;
  using y_tangent_t = Y_TANGENT_T;  // of y or of dx
  static constexpr bool of_backward = present<dy_t>;
  static constexpr bool has_p_tangent =
      present<x_tangent_t> || (pre_gate && present<gate_tangent_t>);
  static constexpr bool reduces = center || has_p_tangent;  // whether it reduces over a row
};

template <class B>
struct Arguments {
  RowsLikeX<const typename B::x_t> x;
  GateRows<const typename B::gate_t> gate;
  RowsLikeX<const typename B::x_tangent_t> x_tangent;
  RowsLikeX<const typename B::gate_tangent_t> gate_tangent;
  RowsLikeX<const typename B::dy_t> dy;
  RowsLikeX<typename B::y_tangent_t> y_tangent;
  Parameter<const typename B::weight_t> weight;
  Parameter<const typename B::bias_t> bias;
  Parameter<const typename B::weight_tangent_t> weight_tangent;
  Parameter<const typename B::bias_tangent_t> bias_tangent;
  const typename B::compute_t *mean, *rstd;
  index_t rows, groups, width;  // rows of each group
  Number<typename B::compute_t> k, weight_offset;
};

// Sums over a row of p - mean, v = p' and their product; of a = dr / k and its products with both.
enum RowSums { SumP, SumV, SumPV, SumA, SumPA, SumAV, sum_count };

// A row: its operands, and its factors.
//   k * r = ((p - mean) - correction) * k_rstd
//   k * r', or dx' = v * of_v + a * of_a + k * r * of_r + offset
template <class B>
struct TangentRow {
  using C = typename B::compute_t;
  RowPacks<B, typename B::x_t> x;
  RowPacks<B, typename B::x_tangent_t> x_tangent;
  RowPacks<B, typename B::dy_t> dy;
  GatePacks<B, typename B::gate_t, !B::pre_gate> gate;
  RowPacks<B, typename B::gate_tangent_t, !B::pre_gate> gate_tangent;
  Parameters<B> parameters;
  ParameterPacks<B, typename B::weight_tangent_t> weight_tangent;
  ParameterPacks<B, typename B::bias_tangent_t> bias_tangent;
  RowPointer<typename B::y_tangent_t> y_tangent;
  PerRow<B> mean = 0, rstd = 0, correction = 0;
  PerRow<B> k_rstd = 0, of_v = 0, of_a = 0, of_r = 0, offset = 0;

  __device__ TangentRow(const Arguments<B>& arguments, const Row<B>& row)
      : x(row.of(arguments.x)),
        x_tangent(row.of(arguments.x_tangent)),
        dy(row.of(arguments.dy)),
        gate(row.of(arguments.gate)),
        gate_tangent(row.of(arguments.gate_tangent)),
        parameters(arguments, row.walk.share, row.index),
        weight_tangent(
            parameter_of(arguments.weight_tangent, first_column(arguments, row), row.index)),
        bias_tangent(parameter_of(arguments.bias_tangent, first_column(arguments, row), row.index)),
        y_tangent(row.of(arguments.y_tangent)) {
    if (!row.exists) return;
    rstd = load_per_row<B>(arguments.rstd, row.index);
    if constexpr (B::center) mean = load_per_row<B>(arguments.mean, row.index);
  }
  static __device__ index_t first_column(const Arguments<B>& arguments, const Row<B>& row) {
    return row.walk.share.group * row_width(arguments);
  }

  // Loads the inputs that the first pass over a streamed row needs.
  template <class Chunk>
  __device__ void load(const Chunk& chunk) {
    x.load(chunk);
    x_tangent.load(chunk);
    dy.load(chunk);
    if constexpr (B::pre_gate) gate.load(chunk);
    if constexpr (B::pre_gate) gate_tangent.load(chunk);
    if constexpr (B::of_backward) parameters.load(chunk);
  }
  // Loads the other inputs.
  template <class Chunk>
  __device__ void load_rest(const Chunk& chunk) {
    if constexpr (!B::pre_gate) gate.load(chunk);
    if constexpr (!B::pre_gate) gate_tangent.load(chunk);
    if constexpr (!B::of_backward) parameters.load(chunk);
    weight_tangent.load(chunk);
    bias_tangent.load(chunk);
  }

  // The items of a pack: p - mean, v and a, and the gate.
  struct Operands {
    Item<B> p, v, a;
    Activated<Item<B>> gate;
    Item<B> gate_tangent;
  };
  // Calls visit(item, operands) for the items of a pack.
  template <class At, class Visit>
  __device__ void for_each_of_pack(At at, Visit visit) const {
    const auto x_pack = x[at];
    const auto x_tangent_pack = x_tangent[at];
    const auto dy_pack = dy[at];
    const auto gate_pack = gate[at];
    const auto gate_tangent_pack = gate_tangent[at];
    for_each_item<B>(at, [&](auto item) {
      Operands of = {};
      of.p = read<B>(x_pack, item);
      if constexpr (present<typename B::x_tangent_t>) of.v = read<B>(x_tangent_pack, item);
      if constexpr (present<typename B::gate_t>)
        of.gate = B::activation::at(read<B>(gate_pack, item));
      if constexpr (present<typename B::gate_tangent_t>)
        of.gate_tangent = of.gate.derivative * read<B>(gate_tangent_pack, item);
      if constexpr (B::pre_gate) of.v = fma(of.v, of.gate.value, of.p * of.gate_tangent);
      if constexpr (B::pre_gate) of.p *= of.gate.value;
      if constexpr (B::center) of.p -= mean;
      if constexpr (B::of_backward) of.a = read<B>(dy_pack, item);
      if constexpr (B::of_backward && present<typename B::weight_t>)
        of.a *= parameters.factor(at, item);
      visit(item, of);
    });
  }

  // Adds a pack to the sums over the row.
  template <class At>
  __device__ void add_to(ItemSums<B> (&sums)[sum_count], At at) const {
    for_each_of_pack(at, [&](auto item, const Operands& of) {
      const auto p = clear_outside<B>(of.p, item);
      if constexpr (B::center) sums[SumP].add(item, p);
      if constexpr (B::center && B::has_p_tangent) sums[SumV].add(item, of.v);
      if constexpr (B::has_p_tangent) sums[SumPV].add_product(item, p, of.v);
      if constexpr (B::center && B::of_backward) sums[SumA].add(item, of.a);
      if constexpr (B::of_backward) sums[SumPA].add_product(item, p, of.a);
      if constexpr (B::of_backward) sums[SumAV].add_product(item, of.a, of.v);
    });
  }

  template <class Sums>
  __device__ void find_factors(const Arguments<B>& arguments, Team<B>& team,
                               Sums (&sums)[sum_count]) {
    const C width = C(row_width(arguments)), k = arguments.k;
    PerRow<B> mean_v = 0, mean_a = 0, mean_rv = 0, mean_ra = 0, mean_av = 0;
    const auto mean_of = [&](PerRow<B> sum) { return math::divided(sum, width); };
    if constexpr (B::center && B::has_p_tangent) {
      const auto found = team.all_reduce(sums[SumP], sums[SumV], sums[SumPV]);
      correction = mean_of(found.item[0]);
      mean_v = mean_of(found.item[1]);
      mean_rv = rstd * mean_of(fma(-correction, found.item[1], found.item[2]));
    } else if constexpr (B::center) {
      correction = mean_of(team.all_reduce(sums[SumP]).item[0]);
    } else if constexpr (B::has_p_tangent) {
      mean_rv = rstd * mean_of(team.all_reduce(sums[SumPV]).item[0]);
    }
    if constexpr (B::center && B::of_backward) {
      const auto found = team.all_reduce(sums[SumA], sums[SumPA], sums[SumAV]);
      mean_a = mean_of(found.item[0]);
      mean_ra = rstd * mean_of(fma(-correction, found.item[0], found.item[1]));
      mean_av = fma(-mean_a, mean_v, mean_of(found.item[2]));
    } else if constexpr (B::of_backward) {
      const auto found = team.all_reduce(sums[SumPA], sums[SumAV]);
      mean_ra = rstd * mean_of(found.item[0]);
      mean_av = mean_of(found.item[1]);
    }
    k_rstd = k * rstd;
    if constexpr (B::of_backward) {
      const auto factor = -rstd * k_rstd;
      of_v = factor * mean_ra;
      of_a = factor * mean_rv;
      of_r = -rstd * rstd * fma(-3 * mean_ra, mean_rv, mean_av);
      offset = -factor * fma(mean_rv, mean_a, mean_ra * mean_v);
    } else {
      of_v = k_rstd;
      of_r = -rstd * mean_rv;
      offset = -k_rstd * mean_v;
    }
  }

  // Writes a pack of the result.
  template <class At>
  __device__ void write(At at) const {
    const auto k_rstd = broadcast<B>(this->k_rstd), of_v = broadcast<B>(this->of_v);
    const auto of_a = broadcast<B>(this->of_a), of_r = broadcast<B>(this->of_r);
    const auto offset = broadcast<B>(this->offset);
    RowOutput<B, typename B::y_tangent_t> output(y_tangent);
    for_each_of_pack(at, [&](auto item, const Operands& of) {
      auto q = of.p;
      if constexpr (B::center) q -= correction;
      const auto k_r = q * k_rstd, rounded = as_rounded<B>(k_r);
      Item<B> found = {};
      if constexpr (B::has_p_tangent) found = fma(of.v, of_v, fma(k_r, of_r, offset));
      if constexpr (B::of_backward) {
        found = fma(of.a, of_a, found);
      } else {
        if constexpr (present<typename B::weight_t>) found *= parameters.factor(at, item);
        if constexpr (present<typename B::weight_tangent_t>)
          found = fma(rounded, read<B>(weight_tangent[at], item), found);
        if constexpr (present<typename B::bias_tangent_t>) found += read<B>(bias_tangent[at], item);
        if constexpr (B::post_gate) found *= of.gate.value;
        if constexpr (B::post_gate && present<typename B::gate_tangent_t>)
          found = fma(of.gate_tangent, parameters.affine(rounded, at, item), found);
      }
      ::write(output, item, found);
    });
    output.store(at);
  }
};

// Processes a held row: a thread holds its packs of all operands in registers.
template <class B>
__device__ inline void find_held(const Arguments<B>& arguments, Team<B>& team,
                                 const Row<B>& place) {
  const auto columns = place.columns();
  TangentRow<B> row(arguments, place);
  row.load(columns);
  row.load_rest(columns);
  ItemSums<B> sums[sum_count];
  if constexpr (B::reduces) columns.for_each_pack([&](auto at) { row.add_to(sums, at); });
  row.find_factors(arguments, team, sums);
  columns.for_each_pack([&](auto at) { row.write(at); });
}

// Processes streamed rows: on a GPU rows too long for the team's registers, on a CPU all rows.
template <class B>
__device__ inline void find_streamed(const Arguments<B>& arguments, Team<B>& team,
                                     const Walk<B>& walk) {
  for_each_row(
      walk,
      [&](const StreamedRow<B>& place) {
        TangentRow<B> row(arguments, place);
        RowSum<B> sums[sum_count];
        if constexpr (B::reduces)
          place.for_each_chunk([&](const auto& chunk) {
            row.load(chunk);
            ItemSums<B> chunk_sums[sum_count];
            chunk.for_each_pack([&](auto at) { row.add_to(chunk_sums, at); });
            unrolled<sum_count>([&](int i) { sums[i].add(chunk_sums[i]); });
          });
        row.find_factors(arguments, team, sums);
        return row;
      },
      [&](auto& row, const StreamedRow<B>& place) {
        place.for_each_chunk_in_second_pass([&](const auto& chunk) {
          row.load(chunk);
          row.load_rest(chunk);
          chunk.for_each_pack([&](auto at) { row.write(at); });
        });
      });
}

template <class B>
__device__ inline void find_tangents(const Arguments<B>& arguments, Team<B>& team) {
  const BlockShare share(row_groups(arguments), Team<B>::blocks);
  const Walk<B> walk(team, share, arguments.rows, row_width(arguments));
  if constexpr (streamed<B>)
    find_streamed(arguments, team, walk);
  else
    walk.for_each_row([&](const auto& row) { find_held(arguments, team, row); });
}

extern "C" __global__ void __launch_bounds__(Build::threads, Build::blocks_per_sm) CLUSTER_LAUNCH
    row_norm_jvp(const Arguments<Build> arguments) {
  __shared__ Team<Build>::Scratch scratch;
  Team<Build> team(scratch);
  find_tangents(arguments, team);
}
