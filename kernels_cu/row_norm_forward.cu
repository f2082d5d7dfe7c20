// SPDX-License-Identifier: MIT
// Row norms, forward: RMSNorm, LayerNorm, L2 norm and the generic normalize, with the residual
// stream.
//
//   s    = x + residual                 rounded to new_residual's type; the norm reads that
//   q    = s - mean(s)    if center, else s
//   rstd = 1 / sqrt(mean(q * q) + eps)
//   y    = k * (q * rstd) * weight + bias
//
// A team of threads takes a row (row.cuh), finds its moments (moments.cuh) and writes y in a last
// pass over the row.
#include "moments.cuh"

// clang-format off
struct Build {
  using compute_t = COMPUTE_T;
  using x_t = X_T;
  using residual_t = RESIDUAL_T;
  using new_residual_t = NEW_RESIDUAL_T;
  using weight_t = WEIGHT_T;
  using bias_t = BIAS_T;
  using y_t = Y_T;
  static constexpr bool center = CENTER;
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
  Rows<const typename B::x_t> x;
  Rows<const typename B::residual_t> residual;
  Rows<typename B::y_t> y;
  Rows<typename B::new_residual_t> new_residual;
  const typename B::weight_t* weight;
  const typename B::bias_t* bias;
  typename B::compute_t* mean;  // null: not wanted
  typename B::compute_t* rstd;  // null: not wanted
  index_t rows, width;
  double k, eps;
};

// A row, and what the first pass over it finds for the second.
template <class B>
struct ForwardRow {
  using C = typename B::compute_t;
  using stream_t = first_present<typename B::new_residual_t, typename B::x_t>;
  using StreamPack = LoadedPack<B, stream_t>;
  index_t end;  // the width, or 0 for a team that has no row
  const typename B::x_t* x;
  const typename B::x_t* later_x;  // of a row to come, to be prefetched
  const typename B::residual_t* residual;
  const typename B::residual_t* later_residual;
  typename B::new_residual_t* new_residual;
  typename B::y_t* y;
  RowPacks<B, StreamPack> packs;
  Moments<C> moments;
  C rstd, k_rstd;

  // The pack that is normalised: of x, or of the residual stream, which this writes.
  template <class Column>
  __device__ StreamPack load(Column column) const {
    const auto x_pack = load_pack<B>(x, column, end);
    if constexpr (!present<typename B::new_residual_t>) {
      return x_pack;
    } else {
      const auto residual_pack = load_pack<B>(residual, column, end);
      OutputPack<B, stream_t, true> stream(new_residual, column, end);
      for_each_item<B>(column, end, [&](auto at) {
        auto s = read<B>(x_pack, at);
        if constexpr (present<typename B::residual_t>) s += read<B>(residual_pack, at);
        write(stream, at, s);
      });
      stream.store();
      return stream.loaded();
    }
  }

  __device__ StreamPack reload(index_t column) const {
    if constexpr (present<typename B::new_residual_t>)
      return load_pack<B, stream_t>(new_residual, column, end);
    else
      return load_pack<B>(x, column, end);
  }
};

// The first pass: the row's moments.
template <class B>
__device__ inline void find_moments(const Arguments<B>& arguments, Team<B>& team, index_t index,
                                    index_t ahead, ForwardRow<B>& row) {
  using C = typename B::compute_t;
  const index_t width = row_width(arguments);
  const bool has_row = team.has_row(index, arguments.rows);
  const index_t later = index + ahead < arguments.rows ? index + ahead : index;
  row.end = has_row ? width : 0;
  row.x = arguments.x.at(index);
  row.later_x = arguments.x.at(later);
  row.residual = arguments.residual.at(index);
  row.later_residual = arguments.residual.at(later);
  row.new_residual = arguments.new_residual.at(index);
  row.y = arguments.y.at(index);

  const auto load = [&](auto column) {
    prefetch_output<B>(row.y, column);
    return row.load(column);
  };
  const auto reload = [&](index_t column) { return row.reload(column); };
  row.packs.start(team, load);
  row.moments = row_moments(team, row.packs, row.end, width, load, reload);
  row.rstd = C(1) / sqrt(row.moments.variance + C(arguments.eps));
  row.k_rstd = C(arguments.k) * row.rstd;
}

// The second pass, for one pack.
template <class B, class Column, class Weight, class Bias>
__device__ inline void write_y(const ForwardRow<B>& row, int pack, Column column,
                               const Weight& weight, const Bias& bias) {
  const auto s = row.packs.pack(pack, column, [&](index_t column) { return row.reload(column); });
  prefetch_pack<B>(row.later_x, column);
  prefetch_pack<B>(row.later_residual, column);
  OutputPack<B, typename B::y_t> y(row.y, column, row.end);
  const auto k_rstd = spread<B>(row.k_rstd);
  for_each_item<B>(column, row.end, [&](auto at) {
    auto n = row.moments.centered(read<B>(s, at)) * k_rstd;
    if constexpr (present<typename B::weight_t> && present<typename B::bias_t>)
      n = fma(n, weight.item[at.index], bias.item[at.index]);
    else if constexpr (present<typename B::weight_t>)
      n *= weight.item[at.index];
    else if constexpr (present<typename B::bias_t>)
      n += bias.item[at.index];
    write(y, at, n);
  });
  y.store();
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
__device__ inline void normalize_rows(const Arguments<B>& arguments, Team<B>& team, index_t first,
                                      int count, index_t ahead) {
  ForwardRow<B> rows[max_rows_at_once];
  for (int i = 0; i < count; ++i) find_moments(arguments, team, first + i, ahead, rows[i]);

  const index_t end = rows[0].end;
  for_each_pack(team, end, [&](int pack, auto column) {
    const auto weight = load_items<B>(arguments.weight, column, end);
    const auto bias = load_items<B>(arguments.bias, column, end);
    for (int i = 0; i < count; ++i) write_y(rows[i], pack, column, weight, bias);
  });
  for (int i = 0; i < count; ++i) save_statistics(arguments, team, first + i, rows[i]);
}

extern "C" __global__ void __launch_bounds__(Build::threads, 1)
    row_norm_forward(const Arguments<Build> arguments) {
  __shared__ Team<Build>::Scratch scratch;
  Team<Build> team(scratch);
  const int at_once = rows_at_once<Build::x_t>(row_width(arguments));
  const index_t ahead = rows_ahead<Build::x_t>(row_width(arguments));
  for_each_rows(team, arguments.rows, at_once, [&](index_t first, int count) {
    normalize_rows(arguments, team, first, count, ahead);
  });
}
