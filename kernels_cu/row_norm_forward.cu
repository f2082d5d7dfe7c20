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
#include "row_parts.cuh"

#ifndef KEPT_PACKS
#define KEPT_PACKS 0
#endif

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
  static constexpr int kept_packs = KEPT_PACKS;         // of p, which a CPU's thread keeps
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
  typename B::compute_t* mean;                // null: not wanted
  typename B::compute_t* rstd;                // null: not wanted
  Pack<typename B::compute_t, 3>* part_sums;  // of shared rows
  index_t rows, groups, width;                // rows of each group
  index_t pass;                               // over shared rows
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
  Kept* kept_p;
  Moments<B> moments;
  C rstd, k_rstd;

  // The pack of p; this writes the residual stream.
  template <class Column>
  __device__ Kept load(Column column) const {
    const Kept p = gated(column, load_stream(column));
    if constexpr (B::kept_packs > 0) kept_p[column / B::pack] = p;
    return p;
  }

  template <class Column>
  __device__ Kept reload(Column column) const {
    if constexpr (B::kept_packs > 0)
      return kept_p[column / B::pack];
    else if constexpr (present<typename B::new_residual_t>)
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

template <class B>
__device__ inline void open_row(const Arguments<B>& arguments, const Team<B>& team,
                                const BlockShare& share, index_t row_of_group, index_t ahead,
                                ForwardRow<B>& row) {
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
  row.kept_p = kept_packs<typename ForwardRow<B>::Kept, B::kept_packs>();
}

// What multiplies the row.
template <class B>
__device__ inline void find_factors(const Arguments<B>& arguments, ForwardRow<B>& row) {
  using C = typename B::compute_t;
  const C square = row.moments.variance + C(arguments.eps);
  row.rstd = math::over_root(1.0, square);
  if constexpr (present<typename B::rounded_t>)
    row.k_rstd = C(arguments.k) * row.rstd;  // as the backward does, which rounds k * r again
  else
    row.k_rstd = math::over_root(arguments.k, square);
}

// The first pass: the row's moments.
template <class B>
__device__ inline void find_moments(const Arguments<B>& arguments, Team<B>& team,
                                    ForwardRow<B>& row) {
  const auto load = [&](auto column) {
    prefetch_output<B>(row.y, column);
    return row.load(column);
  };
  const auto reload = [&](auto column) { return row.reload(column); };
  row.packs.start(team, load);
  row.moments = row_moments(team, row.packs, row.end, row_width(arguments), load, reload);
  find_factors(arguments, row);
}

// The second pass, for one pack.
template <class B, class Column, class Factors, class Bias>
__device__ inline void write_pack(const ForwardRow<B>& row, int pack, Column column,
                                  const Factors& factors, const Bias& bias) {
  const auto p = row.packs.pack(pack, column, [&](auto column) { return row.reload(column); });
  prefetch_later<B>(row.later_x, column);
  prefetch_later<B>(row.later_residual, column);
  prefetch_later<B>(row.later_gate, column);
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

// The second pass over the row, from a pack of it on.
template <class B>
__device__ inline void write_row(const Arguments<B>& arguments, const Team<B>& team,
                                 const BlockShare& share, const ForwardRow<B>& row, int first = 0) {
  const Affine<B> parameters(arguments, share);
  for_each_pack(
      team, row.end,
      [&](int pack, auto column) {
        const auto factors = parameters.load_factors(column, row.end);
        write_pack(row, pack, column, factors, parameters.load_bias(column, row.end));
      },
      NoEndRun{}, first);
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
  open_row(arguments, team, share, row_of_group, ahead, row);
  find_moments(arguments, team, row);
  write_row(arguments, team, share, row);
  save_statistics(arguments, team, share.row_index(row_of_group), row);
}

// One pass over the block's part of a row that several blocks share.
template <class B>
__device__ inline void pass_over_part(const Arguments<B>& arguments, Team<B>& team) {
  using C = typename B::compute_t;
  using Kept = typename ForwardRow<B>::Kept;
  const index_t width = row_width(arguments);
  const RowPart<B, 1> part(width);  // the first pack is loaded before the others
  const BlockShare share(row_groups(arguments), static_cast<int>(part.parts));
  const index_t index = share.row_index(share.block);
  const SharedSums<C> sums(arguments.part_sums, index, part.parts);
  ForwardRow<B> row;
  open_row(arguments, team, share, share.block, 0, row);
  row.end = part.end;
  const auto reload = [&](auto column) { return row.reload(column); };
  const auto find = [&](Pass pass, C shift) {
    const auto over_part = [&](auto use, auto end_run) {
      if (part.number == 0)
        row.packs.first_pass(team, part.end, reload, use, end_run);
      else
        for_each_pack(
            team, part.end, [&](int, auto column) { use(column, reload(column)); }, end_run,
            part.first);
    };
    const auto found = part_sums<B, Kept>(shift, part.end, over_part);
    sums.store(pass, part.number, {{found.item[0], found.item[1], shift}});
  };
  const auto moments = [&](Pass pass) {
    const auto total = sums.total(pass);
    if constexpr (B::center)
      return moments_of<B>(sums.load(pass, 0).item[2], {{total.item[0], total.item[1]}}, width);
    else
      return moments_of<B>(total.item[0], width);
  };

  if (arguments.pass == add_residual) {
    for_each_pack(
        team, part.end, [&](int, auto column) { row.load(column); }, NoEndRun{}, part.first);
  } else if (arguments.pass == find_sums) {
    row.packs.start(team, reload);
    find(find_sums, first_mean(team, row.packs, width, width));
  } else {
    row.moments = moments(find_sums);
    const bool again = B::center && is_far(row.moments);
    if (again && arguments.pass == find_sums_again) {
      row.packs.start(team, reload);
      find(find_sums_again, row.moments.shift + row.moments.correction);
    }
    if (arguments.pass != write_results) return;
    if (again) row.moments = moments(find_sums_again);
    find_factors(arguments, row);
    write_row(arguments, team, share, row, part.first);
    if (part.number == 0) save_statistics(arguments, team, index, row);
  }
}

template <class B>
__device__ inline void normalize(const Arguments<B>& arguments, Team<B>& team) {
  if constexpr (shared_rows) {
    pass_over_part(arguments, team);
  } else {
    const BlockShare share(row_groups(arguments), Team<B>::blocks);
    const index_t ahead = rows_ahead<typename B::x_t>(row_width(arguments));
    for_each_rows(team, share, arguments.rows, 1, [&](index_t row_of_group, int) {
      normalize_row(arguments, team, share, row_of_group, ahead);
    });
    team.end();
  }
}

extern "C" __global__ void __launch_bounds__(Build::threads, 1) CLUSTER_LAUNCH
    row_norm_forward(const Arguments<Build> arguments) {
  __shared__ Team<Build>::Scratch scratch;
  Team<Build> team(scratch);
  normalize(arguments, team);
}
