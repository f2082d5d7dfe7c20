// SPDX-License-Identifier: MIT
// Row norms, forward: RMSNorm, LayerNorm, L2 norm and the generic normalize, with the residual
// stream and a gate.
//
//   s    = x + residual                 rounded to new_residual's type; the norm reads that
//   p    = s * g(gate)    if pre-gate, else s
//   q    = p - mean(p)    if center, else p
//   rstd = 1 / sqrt(mean(q * q) + eps)
//   r    = q * rstd
//   n    = k * r * (weight + weight_offset) + bias         k * rstd is one factor
//   y    = n * g(gate)    if post-gate, else n
//
// One rounded mean is not enough: for a row of mean 1e4 and deviation 1 it is off by thousands of
// ulps of the result. So the row is shifted by about its mean, and what is left is corrected:
//   t = p - shift,   correction = mean(t),   q = t - correction
//   mean(q * q) = mean(t * t) - correction^2
// With a shift within half a deviation of the mean, mean(t * t) is at least 5 * correction^2, and
// the difference keeps its accuracy. Of a row that is held the shift is the mean; of a streamed one
// it is that of its beginning, and where it is farther off, the row is read once more.
#include "math.cuh"
#include "row.cuh"

struct Build : RowBuild {
  using residual_t = RESIDUAL_T;
  using new_residual_t = NEW_RESIDUAL_T;
  using y_t = Y_T;
  using stream_t = either<present<new_residual_t>, new_residual_t, x_t>;  // of s
  static constexpr bool writes_stream = present<new_residual_t>;
  static constexpr bool reduces = true;  // each row, as the backward may not
};

template <class B>
struct Arguments {
  using C = typename B::compute_t;
  Rows<const typename B::x_t> x;
  Rows<const typename B::residual_t> residual;
  Rows<const typename B::gate_t> gate;
  Rows<typename B::y_t> y;
  Rows<typename B::new_residual_t> new_residual;
  const typename B::weight_t* weight;
  const typename B::bias_t* bias;
  C *mean, *rstd;               // null: not wanted
  index_t rows, groups, width;  // rows of each group
  Number<C> k, eps, weight_offset;
};

// A row: its operands, and what the first pass over it finds for the second.
template <class B>
struct ForwardRow {
  using C = typename B::compute_t;
  using stream_t = typename B::stream_t;
  using Held = either<B::pre_gate, Items<B>, LoadedPack<B, stream_t>>;
  typename B::new_residual_t* new_residual;
  typename B::y_t* y;
  RowPacks<B, typename B::x_t, B::writes_stream> x;
  RowPacks<B, typename B::residual_t, true> residual;
  RowPacks<B, typename B::gate_t> gate;
  RowPacks<B, stream_t> stream;
  ParameterPacks<B, typename B::weight_t> weight;
  ParameterPacks<B, typename B::bias_t> bias;
  HeldPacks<B, Held> p;
  C shift = 0, correction = 0, k_rstd = 0;

  __device__ ForwardRow(const Arguments<B>& arguments, const Row<B>& row)
      : new_residual(row.of(arguments.new_residual)),
        y(row.of(arguments.y)),
        x(row.of(arguments.x)),
        residual(row.of(arguments.residual)),
        gate(row.of(arguments.gate)),
        stream([&] {
          if constexpr (B::writes_stream)
            return new_residual;
          else
            return row.of(arguments.x);
        }()),
        weight(arguments.weight + row.walk.share.group * row_width(arguments)),
        bias(arguments.bias + row.walk.share.group * row_width(arguments)),
        p(row) {}

  // Of a row that is held this is all that is ever loaded, before any of it is stored.
  template <class Chunk>
  __device__ void load(const Chunk& chunk) {
    x.load(chunk);
    residual.load(chunk);
    if constexpr (B::pre_gate || !streamed<B>) gate.load(chunk);
    if constexpr (!streamed<B>) {
      weight.load(chunk);
      bias.load(chunk);
    }
  }
  template <class At>
  __device__ auto make_stream(At at) {
    if constexpr (!B::writes_stream) {
      return x[at];
    } else {
      constexpr bool read_again = true;
      RowOutput<B, stream_t, read_again> s(new_residual);
      for_each_item<B>(at, [&](auto item) {
        auto v = read<B>(x[at], item);
        if constexpr (present<typename B::residual_t>) v += read<B>(residual[at], item);
        write(s, item, v);
      });
      return s.store(at);
    }
  }
  template <class At, class S>
  __device__ Held gated(At at, const S& s) const {
    if constexpr (!B::pre_gate) {
      return s;
    } else {
      const auto gate_pack = gate[at];
      Items<B> pack;
      for_each_item<B>(at, [&](auto item) {
        pack.item[item.index] =
            read<B>(s, item) * B::activation::at(read<B>(gate_pack, item)).value;
      });
      return pack;
    }
  }
};

template <class B>
__device__ inline ForwardRow<B> find_factors(const Arguments<B>& arguments, Team<B>& team,
                                             const Row<B>& place) {
  using C = typename B::compute_t;
  ForwardRow<B> row(arguments, place);
  const C width = C(row_width(arguments));

  // Each item of p: of a chunk that is held, of one to be loaded, of a streamed one once more.
  const auto use_pack = [&](auto at, const auto& use) {
    const auto& pack = row.p[at];
    for_each_item<B>(at, [&](auto item) { use(item, read<B>(pack, item)); });
  };
  const auto use_held = [&](const auto& chunk, const auto& use) {
    chunk.for_each_pack([&](auto at) { use_pack(at, use); });
  };
  const auto load_and_use = [&](const auto& chunk, const auto& use) {
    row.load(chunk);
    chunk.for_each_pack([&](auto at) {
      row.p.put(at, row.gated(at, row.make_stream(at)));
      use_pack(at, use);
    });
  };
  const auto reload_and_use = [&](const auto& chunk, const auto& use) {
    row.stream.load(chunk);
    if constexpr (B::pre_gate) row.gate.load(chunk);
    chunk.for_each_pack([&](auto at) {
      row.p.put(at, row.gated(at, row.stream[at]));
      use_pack(at, use);
    });
  };

  // Reduce: the mean square, of a row that is centered about its mean.
  C shift = 0, correction = 0, variance = 0;
  if constexpr (!B::center) {
    RowSum<B> squares;
    place.for_each_chunk([&](const auto& chunk) {
      ItemSums<B> sums;
      load_and_use(chunk, [&](auto item, auto v) { sums.add_product(item, v, v); });
      squares.add(sums);
    });
    variance = math::divided(team.totals(squares).item[0], width);
  } else {
    RowSum<B> first_sum, sum_t, sum_tt;
    const auto add_chunk = [&](const auto& chunk, const auto& use_chunk) {
      ItemSums<B> t_sums, tt_sums;
      use_chunk(chunk, [&](auto item, auto v) {
        const auto t = clear_outside<B>(v - shift, item);  // where v is 0, but t is not
        t_sums.add(item, t);
        tt_sums.add_product(item, t, t);
      });
      sum_t.add(t_sums);
      sum_tt.add(tt_sums);
    };
    const auto find_variance = [&] {
      const auto sums = team.totals(sum_t, sum_tt);
      correction = math::divided(sums.item[0], width);
      variance = fma(-correction, correction, math::divided(sums.item[1], width));
      if (variance < 0) variance = 0;  // a NaN stays
    };
    place.with_first_chunk([&](const auto& chunk) {
      ItemSums<B> sums;
      load_and_use(chunk, [&](auto item, auto v) { sums.add(item, v); });
      first_sum.add(sums);
      shift = math::divided(team.totals(first_sum).item[0], C(place.first_width()));
      add_chunk(chunk, use_held);
    });
    place.for_each_next_chunk([&](const auto& chunk) { add_chunk(chunk, load_and_use); });
    find_variance();

    const bool is_far = 4 * correction * correction > variance;
    if (streamed<B> && is_far) {
      shift += correction;
      sum_t = {};
      sum_tt = {};
      place.for_each_chunk([&](const auto& chunk) { add_chunk(chunk, reload_and_use); });
      find_variance();
    }
  }

  // Factors.
  const C rstd = math::reciprocal_root(variance + C(arguments.eps));
  if (place.exists && team.thread() == 0) {
    if (arguments.mean != nullptr) arguments.mean[place.index] = shift + correction;
    if (arguments.rstd != nullptr) arguments.rstd[place.index] = rstd;
  }
  row.shift = shift;
  row.correction = correction;
  row.k_rstd = C(arguments.k) * rstd;
  return row;
}

// A streamed row from its end backwards.
template <class B>
__device__ inline void write_y(const Arguments<B>& arguments, ForwardRow<B>& row,
                               const Row<B>& place) {
  const typename B::compute_t offset = arguments.weight_offset;
  const auto k_rstd = spread<B>(row.k_rstd);
  place.for_each_chunk_again([&](const auto& chunk) {
    if constexpr (streamed<B>) {
      row.stream.load(chunk);
      row.gate.load(chunk);
      row.weight.load(chunk);
      row.bias.load(chunk);
    }
    chunk.for_each_pack([&](auto at) {
      const auto s = row.stream[at];
      const auto gate_pack = row.gate.again(at);
      const auto& p_pack = row.p.again(at, [&] { return row.gated(at, s); });
      const auto weight_pack = row.weight.again(at);
      const auto bias_pack = row.bias.again(at);
      RowOutput<B, typename B::y_t> y(row.y);
      for_each_item<B>(at, [&](auto item) {
        auto q = read<B>(p_pack, item);
        if constexpr (B::center) q = (q - row.shift) - row.correction;  // their sum is rounded
        auto n = affine<B>(as_rounded<B>(q * k_rstd), weight_pack, offset, bias_pack, item);
        if constexpr (B::post_gate) n *= B::activation::at(read<B>(gate_pack, item)).value;
        write(y, item, n);
      });
      y.store(at);
    });
  });
}

extern "C" __global__ void __launch_bounds__(Build::threads, Build::blocks_per_sm) CLUSTER_LAUNCH
    row_norm_forward(const Arguments<Build> arguments) {
  __shared__ Team<Build>::Scratch scratch;
  Team<Build> team(scratch);
  const BlockShare share(row_groups(arguments), Team<Build>::blocks);
  const Walk<Build> walk(team, share, arguments.rows, row_width(arguments));
  for_each_row(
      walk, [&](const auto& place) { return find_factors(arguments, team, place); },
      [&](auto& row, const auto& place) { write_y(arguments, row, place); });
}
