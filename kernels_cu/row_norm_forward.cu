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

template <class B>
__device__ inline void normalize_row(const Arguments<B>& arguments, Team<B>& team, index_t row) {
  using C = typename B::compute_t;
  using stream_t = first_present<typename B::new_residual_t, typename B::x_t>;
  using StreamPack = LoadedPack<B, stream_t>;
  const index_t width = B::width > 0 ? B::width : arguments.width;
  const bool has_row = team.has_row(row, arguments.rows);
  const index_t end = has_row ? width : 0;
  const auto* x_row = arguments.x.at(row);
  const auto* residual_row = arguments.residual.at(row);
  auto* new_residual_row = arguments.new_residual.at(row);
  auto* y_row = arguments.y.at(row);

  const auto load = [&](index_t column) -> StreamPack {
    const auto x = load_pack<B>(x_row, column, end);
    if constexpr (!present<typename B::new_residual_t>) {
      return x;
    } else {
      const auto residual = load_pack<B>(residual_row, column, end);
      OutputPack<B, stream_t, true> stream(new_residual_row, column, end);
      for_each_item<B>(column, end, [&](auto at) {
        auto s = read<B>(x, at);
        if constexpr (present<typename B::residual_t>) s += read<B>(residual, at);
        write(stream, at, s);
      });
      stream.store();
      return stream.loaded();
    }
  };
  const auto reload = [&](index_t column) -> StreamPack {
    if constexpr (present<typename B::new_residual_t>)
      return load_pack<B, stream_t>(new_residual_row, column, end);
    else
      return load_pack<B>(x_row, column, end);
  };

  RowPacks<B, StreamPack> packs;
  packs.start(team, load);
  const Moments<C> moments = row_moments(team, packs, end, width, load, reload);
  const C rstd = C(1) / sqrt(moments.variance + C(arguments.eps));
  const C k_rstd = C(arguments.k) * rstd;

  packs.next_pass(team, end, reload, [&](int, index_t column, const StreamPack& s) {
    const auto weight = load_pack<B>(arguments.weight, column, end);
    const auto bias = load_pack<B>(arguments.bias, column, end);
    OutputPack<B, typename B::y_t> y(y_row, column, end);
    for_each_item<B>(column, end, [&](auto at) {
      auto n = moments.centered(read<B>(s, at)) * k_rstd;
      if constexpr (present<typename B::weight_t> && present<typename B::bias_t>)
        n = fma(n, read<B>(weight, at), read<B>(bias, at));
      else if constexpr (present<typename B::weight_t>)
        n *= read<B>(weight, at);
      else if constexpr (present<typename B::bias_t>)
        n += read<B>(bias, at);
      write(y, at, n);
    });
    y.store();
  });

  if (team.thread() == 0 && has_row) {
    if (arguments.mean != nullptr)
      global_store(arguments.mean + row, moments.shift + moments.correction);
    if (arguments.rstd != nullptr) global_store(arguments.rstd + row, rstd);
  }
}

extern "C" __global__ void __launch_bounds__(Build::threads, 1)
    row_norm_forward(const Arguments<Build> arguments) {
  __shared__ Team<Build>::Scratch scratch;
  Team<Build> team(scratch);
  const RowGroups groups = row_groups_of_block<Build>(arguments.rows);
  for (index_t group = groups.first; group < groups.last; group += groups.step)
    normalize_row<Build>(arguments, team, group * Team<Build>::per_block + team.index());
}
