// SPDX-License-Identifier: MIT
// Row norms, forward: RMSNorm, LayerNorm, L2 norm and the generic normalize, with the residual
// stream and a gate.
//
//   s    = x + residual                 rounded to new_residual's type; the norm reads that
//   p    = s * g(gate)    if pre-gate, else s
//   q    = p - mean(p)    if center, else p
//   rstd = 1 / sqrt(mean(q * q) + eps)
//   n    = k * (q * rstd) * (weight + weight_offset) + bias
//   y    = n * g(gate)    if post-gate, else n
//
// A team of threads takes a row (row.cuh), finds its moments (moments.cuh) and writes y in a last
// pass over the row.
#include "activations.cuh"
#include "affine.cuh"
#include "math.cuh"
#include "moments.cuh"

// clang-format off
struct Build {
  using compute_t = COMPUTE_T;
  using x_t = X_T;
  using residual_t = RESIDUAL_T;
  using new_residual_t = NEW_RESIDUAL_T;
  using gate_t = GATE_T;
  using weight_t = WEIGHT_T;
  using bias_t = BIAS_T;
  using y_t = Y_T;
  using activation = activations::GATE_ACTIVATION;
  using rounded_t = ROUNDED_T;                          // of k * r before weight
  static constexpr bool pre_gate = PRE_GATE;
  static constexpr bool post_gate = present<gate_t> && !pre_gate;
  static constexpr bool center = CENTER;
  static constexpr bool weight_offset = WEIGHT_OFFSET;
  static constexpr index_t width = WIDTH;               // 0: known only at run time
  static constexpr index_t groups = GROUPS;             // the same
  static constexpr int threads = THREADS;               // of a block
  static constexpr int threads_per_row = THREADS_PER_ROW;  // more: a cluster's
  static constexpr int pack = PACK;                     // elements a thread handles at a time
  static constexpr int packs = PACKS;                   // packs that a thread keeps; 0: streamed
  static constexpr int access = ACCESS;                 // elements in one access, by alignment
};
// clang-format on

template <class B>
struct Arguments {
  Rows<const typename B::x_t> x;
  Rows<const typename B::residual_t> residual;
  Rows<const typename B::gate_t> gate;
  Rows<typename B::y_t> y;
  Rows<typename B::new_residual_t> new_residual;
  const typename B::weight_t* weight;
  const typename B::bias_t* bias;
  typename B::compute_t* mean;  // null: not wanted
  typename B::compute_t* rstd;  // null: not wanted
  index_t rows, groups, width;  // rows of each group
  double k, eps, weight_offset;
};

// A row, and what the first pass over it finds for the second.
template <class B>
struct ForwardRow {
  using C = typename B::compute_t;
  using stream_t = first_present<typename B::new_residual_t, typename B::x_t>;
  using StreamPack = LoadedPack<B, stream_t>;
  // What is kept of p: s as it is stored or, gated, what was computed.
  using Kept = either<B::pre_gate, Items<B>, StreamPack>;
  index_t end;  // the width, or 0 for a team that has no row
  const typename B::x_t* x;
  const typename B::x_t* later_x;  // of a row to come, to be prefetched
  const typename B::residual_t* residual;
  const typename B::residual_t* later_residual;
  const typename B::gate_t* gate;
  const typename B::gate_t* later_gate;
  typename B::new_residual_t* new_residual;
  typename B::y_t* y;
  RowPacks<B, Kept> packs;
  Moments<B> moments;
  C rstd, k_rstd;

  // The pack of p; this writes the residual stream.
  template <class Column>
  __device__ Kept load(Column column) const {
    return gated(column, load_stream(column));
  }

  template <class Column>
  __device__ Kept reload(Column column) const {
    if constexpr (present<typename B::new_residual_t>)
      return gated(column, load_pack<B, stream_t>(new_residual, column, end));
    else
      return load(column);
  }

 private:
  template <class Column>
  __device__ StreamPack load_stream(Column column) const {
    const auto x_pack = load_pack<B>(x, column, end);
    if constexpr (!present<typename B::new_residual_t>) {
      return x_pack;
    } else {
      const auto residual_pack = load_pack<B>(residual, column, end);
      OutputPack<B, stream_t, true> stream(new_residual, end);
      for_each_item<B>(column, end, [&](auto at) {
        auto s = read<B>(x_pack, at);
        if constexpr (present<typename B::residual_t>) s += read<B>(residual_pack, at);
        write(stream, at, s);
      });
      return stream.store(column);
    }
  }

  template <class Column>
  __device__ Kept gated(Column column, const StreamPack& s) const {
    if constexpr (!B::pre_gate) {
      return s;
    } else {
      const auto gate_pack = load_pack<B>(gate, column, end);
      Kept p = {};
      for_each_item<B>(column, end, [&](auto at) {
        p.item[at.index] = read<B>(s, at) * B::activation::at(read<B>(gate_pack, at)).value;
      });
      return p;
    }
  }
};

// The first pass: the row's moments.
template <class B>
__device__ inline void find_moments(const Arguments<B>& arguments, Team<B>& team,
                                    const BlockShare& share, index_t row_of_group, index_t ahead,
                                    ForwardRow<B>& row) {
  using C = typename B::compute_t;
  const index_t width = row_width(arguments), rows = arguments.rows;
  const index_t index = share.row_index(row_of_group);
  const index_t later = row_of_group + ahead < rows ? share.row_index(row_of_group + ahead) : index;
  row.end = team.has_row(row_of_group, rows) ? width : 0;
  row.x = arguments.x.at(index);
  row.later_x = arguments.x.at(later);
  row.residual = arguments.residual.at(index);
  row.later_residual = arguments.residual.at(later);
  row.gate = arguments.gate.at(index);
  row.later_gate = arguments.gate.at(later);
  row.new_residual = arguments.new_residual.at(index);
  row.y = arguments.y.at(index);

  const auto load = [&](auto column) {
    prefetch_output<B>(row.y, column);
    return row.load(column);
  };
  const auto reload = [&](auto column) { return row.reload(column); };
  row.packs.start(team, load);
  row.moments = row_moments(team, row.packs, row.end, width, load, reload);
  const C square = row.moments.variance + C(arguments.eps);
  row.rstd = math::over_root(1.0, square);
  if constexpr (present<typename B::rounded_t>)
    row.k_rstd = C(arguments.k) * row.rstd;  // as the backward does, which rounds k * r again
  else
    row.k_rstd = math::over_root(arguments.k, square);
}

// The second pass, for one pack.
template <class B, class Column, class Factors, class Bias>
__device__ inline void write_y(const ForwardRow<B>& row, int pack, Column column,
                               const Factors& factors, const Bias& bias) {
  const auto p = row.packs.pack(pack, column, [&](auto column) { return row.reload(column); });
  prefetch_pack<B>(row.later_x, column);
  prefetch_pack<B>(row.later_residual, column);
  prefetch_pack<B>(row.later_gate, column);
  const auto gate = load_pack<B>(only_if<B::post_gate>(row.gate), column, row.end);
  const auto k_rstd = spread<B>(row.k_rstd);
  OutputPack<B, typename B::y_t> y(row.y, row.end);
  for_each_item<B>(column, row.end, [&](auto at) {
    const auto k_r = as_rounded<B>(row.moments.centered(read<B>(p, at)) * k_rstd);
    auto n = affine<B>(k_r, factors, bias, at);
    if constexpr (B::post_gate) n *= B::activation::at(read<B>(gate, at)).value;
    write(y, at, n);
  });
  y.store(column);
}

template <class B>
__device__ inline void save_statistics(const Arguments<B>& arguments, const Team<B>& team,
                                       index_t index, const ForwardRow<B>& row) {
  if (team.thread() > 0 || row.end == 0) return;
  if (arguments.mean != nullptr)
    global_store(arguments.mean + index, row.moments.shift + row.moments.correction);
  if (arguments.rstd != nullptr) global_store(arguments.rstd + index, row.rstd);
}

template <class B>
__device__ inline void normalize_row(const Arguments<B>& arguments, Team<B>& team,
                                     const BlockShare& share, index_t row_of_group, index_t ahead) {
  ForwardRow<B> row;
  find_moments(arguments, team, share, row_of_group, ahead, row);
  const Affine<B> parameters(arguments, share);
  for_each_pack(team, row.end, [&](int pack, auto column) {
    const auto factors = parameters.load_factors(column, row.end);
    write_y(row, pack, column, factors, parameters.load_bias(column, row.end));
  });
  save_statistics(arguments, team, share.row_index(row_of_group), row);
}

extern "C" __global__ void __launch_bounds__(Build::threads, 1) CLUSTER_LAUNCH
    row_norm_forward(const Arguments<Build> arguments) {
  __shared__ Team<Build>::Scratch scratch;
  Team<Build> team(scratch);
  const BlockShare share(row_groups(arguments), Team<Build>::blocks);
  const index_t ahead = rows_ahead<Build::x_t>(row_width(arguments));
  for_each_rows(team, share, arguments.rows, 1, [&](index_t row_of_group, int) {
    normalize_row(arguments, team, share, row_of_group, ahead);
  });
  team.end();
}
