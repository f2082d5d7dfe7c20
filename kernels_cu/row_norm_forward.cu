// SPDX-License-Identifier: MIT
// Row norms, forward: RMSNorm, LayerNorm, L2 norm and the generic normalize, with the residual
// stream and a gate.
//
//   s    = x + residual                 or x * g(gate) + residual, if the branch is gated; rounded
//                                       to residual_out's type before the norm reads it
//   p    = s * g(gate)    if pre-gate, else s
//   q    = p - mean(p)    if center, else p
//   rstd = 1 / sqrt(mean(q * q) + eps)
//   r    = q * rstd     k = c / sqrt(width): 1 for RMSNorm and LayerNorm, 1 / sqrt(width) for L2
//   n    = k * r * (weight + weight_offset) + bias         k * r is computed as q * (k * rstd)
//   y    = n * g(gate)    if post-gate, else n
//
// The result may be quantised (quantization.cuh): y is rounded, and divided by a scale.
//
// For rows that are split over devices, one build finds the moments of p in place of y: the mean,
// in two parts, and m2 = sum(q * q). Another build is given the statistics of whole rows.
//
// One rounded mean is not enough: for a row of mean 1e4 and standard deviation 1, the rounding
// error of the mean is thousands of ulps of y. So the row is shifted by about its mean, and the
// mean of the shifted row is subtracted as a correction:
//   t = p - shift,   correction = mean(t),   q = t - correction
//   mean(q * q) = mean(t * t) - correction^2
// If the shift is within half a standard deviation of the mean, mean(t * t) is at least
// 5 * correction^2, so the difference is accurate. The shift of a held row is its rounded mean.
#include "math.cuh"
#include "parameters.cuh"
#include "quantized.cuh"

#ifndef FINDS_MOMENTS
#define FINDS_MOMENTS false
#define GIVEN_STATISTICS false
#endif

struct Build : RowBuild, Quantization {
  using residual_t = RESIDUAL_T;
  using residual_out_t = RESIDUAL_OUT_T;
  using y_t = Y_T;
  using stream_t = either<present<residual_out_t>, residual_out_t, x_t>;  // the type of s
  static constexpr bool writes_stream = present<residual_out_t>;
  static constexpr bool finds_moments = FINDS_MOMENTS;        // the results are moments, not y
  static constexpr bool given_statistics = GIVEN_STATISTICS;  // they are inputs
  static constexpr bool reduces = !given_statistics;          // whether it reduces over a row
  static constexpr bool can_pair = same_type<compute_t, float> && pack % 2 == 0 && !present<gate_t>;
};

// The statistics of rows, as results or as inputs; the mean of p is mean + correction. Where rows'
// own statistics are found, the rounded mean is a result. Of moments, rstd has m2.
template <class T, bool has_correction>
struct Statistics {
  T *mean, *rstd;
};
template <class T>
struct Statistics<T, true> : Statistics<T, false> {
  T* correction;
};

template <class B>
struct Arguments : either<B::quantizes, QuantizedArguments<B>, absent> {
  using C = typename B::compute_t;
  RowsLikeX<const typename B::x_t> x;
  GateRows<const typename B::gate_t> gate;
  RowsLikeX<const typename B::residual_t> residual;
  RowsLikeX<typename B::y_t> y;
  RowsLikeX<typename B::residual_out_t> residual_out;
  Parameter<const typename B::weight_t> weight;
  Parameter<const typename B::bias_t> bias;
  // Null if not wanted, as they are for a quantised result.
  Statistics<either<B::given_statistics, const C, C>, B::finds_moments || B::given_statistics>
      statistics;
  index_t rows, groups, width;  // rows of each group
  Number<C> k, eps, weight_offset;
};

// A pack of p: a pack of the stored s, or computed items if a gate multiplies s.
template <class B>
using PackOfP = either<B::pre_gate, Items<B>, LoadedPack<B, typename B::stream_t>>;

// A row: its operands, its moments, and its factor.
template <class B>
struct ForwardRow {
  using C = typename B::compute_t;
  using stream_t = typename B::stream_t;
  RowPointer<typename B::residual_out_t> residual_out;
  RowPointer<typename B::y_t> y;
  RowPacks<B, typename B::x_t, B::writes_stream> x;
  RowPacks<B, typename B::residual_t, true> residual;
  GatePacks<B, typename B::gate_t, B::branch_gate> gate;
  Parameters<B> parameters;
  PerRow<B> shift = 0, correction = 0, variance = 0, k_rstd = 0;

  __device__ ForwardRow(const Arguments<B>& arguments, const Row<B>& row)
      : residual_out(row.of(arguments.residual_out)),
        y([&]() -> RowPointer<typename B::y_t> {
          if constexpr (B::writes_y) return row.of(arguments.y);
          return {};
        }()),
        x(row.of(arguments.x)),
        residual(row.of(arguments.residual)),
        gate(row.of(arguments.gate)),
        parameters(arguments, row.walk.share, row.index) {}

  // Returns s, rounded to the type in which it is stored. Stores s if it is a result.
  template <class At>
  __device__ auto make_stream(At at) const {
    if constexpr (!B::writes_stream) {
      return x[at];
    } else {
      constexpr bool read_again = true;
      RowOutput<B, stream_t, read_again> s(residual_out);
      const auto gate_pack = pack_if<B::branch_gate>(gate, at);
      for_each_item<B>(at, [&](auto item) {
        auto v = read<B>(x[at], item);
        if constexpr (B::branch_gate) {
          const auto g = B::activation::at(read<B>(gate_pack, item)).value;
          if constexpr (present<typename B::residual_t>)
            v = fma(v, g, read<B>(residual[at], item));
          else
            v *= g;
        } else if constexpr (present<typename B::residual_t>) {
          v += read<B>(residual[at], item);
        }
        write(s, item, v);
      });
      return s.store(at);
    }
  }
  template <class At, class S>
  __device__ PackOfP<B> make_p(At at, const S& s) const {
    if constexpr (!B::pre_gate) {
      return s;
    } else {
      const auto gate_pack = gate[at];
      Items<B> p;
      for_each_item<B>(at, [&](auto item) {
        p.item[item.index] = read<B>(s, item) * B::activation::at(read<B>(gate_pack, item)).value;
      });
      return p;
    }
  }

  // Finds correction and variance from the sums of t and of t * t.
  __device__ void find_moments(const Pack<PerRow<B>, 2>& sums, C width) {
    correction = math::divided(sums.item[0], width);
    variance = fma(-correction, correction, math::divided(sums.item[1], width));
    variance = math::not_negative(variance);
  }
  // Finds the factor, and stores the statistics; or stores the moments.
  __device__ void find_factors(const Arguments<B>& arguments, const Row<B>& row, bool is_first) {
    const auto& statistics = arguments.statistics;
    const auto mean = shift + correction;
    if constexpr (B::finds_moments) {
      if (!row.exists || !is_first) return;
      statistics.rstd[row.index] = variance * C(row_width(arguments));
      if constexpr (B::center) {
        statistics.mean[row.index] = mean;
        statistics.correction[row.index] = (shift - mean) + correction;
      }
    } else {
      const auto rstd = math::reciprocal_root(variance + C(arguments.eps));
      k_rstd = C(arguments.k) * rstd;
      if (B::quantizes || !row.exists || !is_first) return;
      if (statistics.mean != nullptr) store_per_row<B>(statistics.mean, row.index, mean);
      if (statistics.rstd != nullptr) store_per_row<B>(statistics.rstd, row.index, rstd);
    }
  }
  // Takes the given statistics.
  __device__ void take_factors(const Arguments<B>& arguments, const Row<B>& row) {
    const auto& statistics = arguments.statistics;
    if (!row.exists) return;
    k_rstd = C(arguments.k) * statistics.rstd[row.index];
    if constexpr (B::center) {
      shift = statistics.mean[row.index];
      if (statistics.correction != nullptr) correction = statistics.correction[row.index];
    }
  }

  // Returns y, which store() stores.
  template <class At, class P>
  __device__ RowOutput<B, typename B::y_t> make_y(At at, const P& p) const {
    const auto gate_pack = pack_if<!B::branch_gate>(gate, at);
    const auto factor = broadcast<B>(k_rstd);
    RowOutput<B, typename B::y_t> output(y);
    for_each_item<B>(at, [&](auto item) {
      auto q = read<B>(p, item);
      if constexpr (B::center) q = (q - shift) - correction;  // shift + correction would be rounded
      auto n = parameters.affine(as_rounded<B>(q * factor), at, item);
      if constexpr (B::post_gate) n *= B::activation::at(read<B>(gate_pack, item)).value;
      write(output, item, n);
    });
    return output;
  }
};

// Processes a held row. `place` says where it lies, and which columns are the thread's. A thread
// holds its packs of all operands in registers. It waits for the other threads in `all_reduce`: at
// a reduction of a warp, at a barrier of a block, or for the values that a cluster's blocks send.
template <class B>
__device__ inline void normalize_held(const Arguments<B>& arguments, Team<B>& team,
                                      const Row<B>& place) {
  const auto width = typename B::compute_t(row_width(arguments));
  const auto columns = place.columns();
  ForwardRow<B> row(arguments, place);
  RowScale<B> scale(arguments, place);

  // Load. Compilers move a load, but not a prefetch, down to where its value is needed. In a short
  // grid, operands that are needed late are prefetched, so that all loads begin here.
  if (place.walk.is_short()) {
    row.parameters.weight.prefetch(columns);
    row.parameters.bias.prefetch(columns);
    if constexpr (B::post_gate) row.gate.prefetch(columns);
  }
  row.x.load(columns);
  row.residual.load(columns);
  row.gate.load(columns);
  row.parameters.load(columns);

  // The residual stream, and p.
  PackOfP<B> p[B::packs];
  columns.for_each_pack([&](auto at) { p[at.index] = row.make_p(at, row.make_stream(at)); });
  const auto for_each_p = [&](auto visit) {
    columns.for_each_pack([&](auto at) {
      for_each_item<B>(at, [&](auto item) { visit(item, read<B>(p[at.index], item)); });
    });
  };

  // Reduce: the mean square, about the mean if rows are centered.
  ItemSums<B> p_sums, t_sums, square_sums;
  if constexpr (B::given_statistics) {
    row.take_factors(arguments, place);
  } else if constexpr (!B::center) {
    for_each_p([&](auto item, auto v) { square_sums.add_product(item, v, v); });
    row.variance = math::divided(team.all_reduce(square_sums).item[0], width);
  } else {
    for_each_p([&](auto item, auto v) { p_sums.add(item, v); });
    row.shift = math::divided(team.all_reduce(p_sums).item[0], width);
    for_each_p([&](auto item, auto v) {
      const auto t = clear_outside<B>(v - row.shift, item);  // v - shift is not 0 outside the row
      t_sums.add(item, t);
      square_sums.add_product(item, t, t);
    });
    row.find_moments(team.all_reduce(t_sums, square_sums), width);
  }

  // Factors, and the statistics.
  if constexpr (B::reduces) row.find_factors(arguments, place, team.thread() == 0);

  // Store.
  if constexpr (!B::finds_moments) {
    Magnitudes<B> largest;
    ChunkResults<B> results(arguments, place, scale);
    columns.for_each_pack([&](auto at) {
      auto y = row.make_y(at, p[at.index]);
      if constexpr (B::scales_rows) largest.add(at, y);
      results.put(at, y);
    });
    if constexpr (B::scales_rows)
      results.scale.find(team.all_reduce(largest).item[0], place.exists && team.thread() == 0);
    results.store(columns);
  }
}

#include "row_norm_forward_streamed.cuh"

template <class B>
__device__ inline void normalize(const Arguments<B>& arguments, Team<B>& team) {
  const BlockShare share(row_groups(arguments), Team<B>::blocks);
  const Walk<B> walk(team, share, arguments.rows, row_width(arguments));
  if constexpr (streamed<B>)
    normalize_streamed(arguments, team, walk);
  else
    walk.for_each_row([&](const auto& row) { normalize_held(arguments, team, row); });
}

extern "C" __global__ void __launch_bounds__(Build::threads, Build::blocks_per_sm) CLUSTER_LAUNCH
    row_norm_forward(const Arguments<Build> arguments) {
  __shared__ Team<Build>::Scratch scratch;
  Team<Build> team(scratch);  // a cluster's blocks wait for each other at their first sum
  normalize(arguments, team);
}
