// SPDX-License-Identifier: MIT
// Group norm, backward: dx, and partial sums for dweight and dbias for each part of each sample.
//
//   p  = x - mean,   n = weight * p * rstd + bias    recomputed: only mean and rstd are saved
//   h  = dy * g'(n)                                  g: the activation
//   r  = (p - correction) * rstd,   correction = mean of p over a group
//   a  = mean of weight * h,   b = mean of weight * h * r    over a group
//   dx = rstd * (weight * h - a - r * b)            the h of group_derivative.cuh is weight * h
//   dbias = sum of h,   dweight = sum of h * r       over positions and samples that share a row
//
// The saved mean is rounded; the correction removes its rounding error from r.
//
// As in the forward, each part's sums are found and then combined. Each part also writes a row of
// sums of h for dbias, and a row of sums of h * p, which correct_dweight_sums turns into sums of
// h * r for dweight. param_grad.cu adds up the rows.
#include "group_derivative.cuh"
#include "group_tile.cuh"

struct Build : GroupBuild {
  using dy_t = DY_T;
  using dx_t = DX_T;
  static constexpr bool identity = same_type<activation, activations::identity>;
  static constexpr bool dweight = DWEIGHT;
  static constexpr bool dbias = DBIAS;
  static constexpr int sums = 3;                        // reduced together
  static constexpr bool reads = find || present<dx_t>;  // whether a launch reads the tile
};

template <class B>
struct Arguments {
  Lines<const typename B::dy_t> dy;
  Lines<const typename B::x_t> x;
  Lines<typename B::dx_t> dx;
  Parameter<const typename B::weight_t> weight;
  Parameter<const typename B::bias_t> bias;
  const typename B::compute_t *mean, *rstd;
  typename B::compute_t* dweight_sums;  // for each part of each sample, a row of channels
  typename B::compute_t* dbias_sums;    // like dweight_sums; also needed for dweight
  typename B::compute_t* handed_on;
  Sizes sizes;
};

template <class B>
struct Inputs {
  TilePacks<B, typename B::dy_t, true> dy;  // only h is computed from it
  TilePacks<B, typename B::x_t> x;
  TileItems<B> h;
};

// The values of a strip's channels from which p and h are computed. (A strip is the share of a tile
// that a thread handles at a time.)
template <class B>
struct Channels {
  const Inputs<B>& inputs;
  ChannelItems<B> mean, factor;  // factor: rstd * weight
  either<present<typename B::bias_t>, ChannelItems<B>, absent> bias;

  // Calls visit(item, p, h) for the items of a pack.
  template <class At, class Visit>
  __device__ void for_each_of_pack(At at, Visit visit) const {
    const auto x = inputs.x[at];
    const auto dy = inputs.dy[at];
    for_each_item<B>(at, [&](auto item) {
      const auto p = clear_outside<B>(read<B>(x, item) - of_channel<B>(mean, item), item);
      visit(item, p, inputs.h(at, item, [&] {
        if constexpr (B::identity) return read<B>(dy, item);
        const auto n =
            affine<B>(p, of_channel<B>(factor, item), bias, B::channels_last ? item.index : 0);
        return clear_outside<B>(read<B>(dy, item) * B::activation::at(n).derivative, item);
      }));
    });
  }
};

template <class B, class Strip>
__device__ inline Channels<B> channels_of(const Arguments<B>& arguments, const Inputs<B>& inputs,
                                          const Strip& strip) {
  const auto of_groups = [&](const typename B::compute_t* statistic) {
    return strip.of_groups([&](auto group) { return statistic[strip.index_of(group)]; });
  };
  const auto bias = parameter_of(arguments.bias, strip);
  const auto factor = weighted<B>(of_groups(arguments.rstd), parameter_of(arguments.weight, strip));
  return {inputs, of_groups(arguments.mean), factor, bias};
}

template <class B, class Strip, class Found>
__device__ inline void find_sums(const Arguments<B>& arguments, const Strip& strip,
                                 const Found& channels, const GroupTeam<B>& team) {
  const auto found = strip.template sums<3>([&](auto at, auto& sums) {
    channels.for_each_of_pack(at, [&](auto item, auto p, auto h) {
      sums[SumH].add(item, h);
      sums[SumHP].add_product(item, h, p);
      sums[SumP].add(item, p);
    });
  });
  team.hand_on(strip, found, row_of(arguments.weight, strip));
  const index_t row = strip.row_of_sums();
  if constexpr (B::dweight) team.store(strip, found, SumHP, arguments.dweight_sums + row);
  if constexpr (B::dweight || B::dbias) team.store(strip, found, SumH, arguments.dbias_sums + row);
}

template <class B, class Strip, class Found>
__device__ inline void write_dx(const Arguments<B>& arguments, const Strip& strip,
                                const Found& channels, const GroupTeam<B>& team) {
  const auto factor = [&](int value) {
    return strip.of_groups([&](auto group) { return team.of_group(value, group); });
  };
  const auto factor_of_p = factor(FactorOfP), offset = factor(Offset);
  strip.for_each_pack([&](auto at) {
    TileOutput<B, typename B::dx_t> dx(strip, arguments.dx, at);
    channels.for_each_of_pack(at, [&](auto item, auto p, auto h) {
      const auto rest = fma(p, of_channel<B>(factor_of_p, item), of_channel<B>(offset, item));
      write(dx, item, fma(h, of_channel<B>(channels.factor, item), rest));
    });
    dx.store(at);
  });
}

template <class B, class Strip>
__device__ inline void correct_dweight_sums(const Arguments<B>& arguments, const Strip& strip,
                                            const GroupTeam<B>& team) {
  const index_t row = strip.row_of_sums();
  team.for_each_channel(strip, [&](index_t channel, auto group) {
    auto& sum = arguments.dweight_sums[row + channel];
    const auto correction = team.of_group(Correction, group);
    sum = arguments.rstd[strip.index_of(group)] *
          fma(-correction, arguments.dbias_sums[row + channel], sum);
  });
}

extern "C" __global__ void __launch_bounds__(Build::threads, Build::blocks_per_sm) CLUSTER_LAUNCH
    group_norm_backward(const Arguments<Build> arguments) {
  __shared__ GroupTeam<Build>::Scratch scratch;
  SharedMemory memory;
  const Tile<Build> tile(arguments.sizes);
  begin_launch<Build, Build::dweight || Build::dbias>();

  // Load.
  const Inputs<Build> inputs{{memory, tile, arguments.dy},
                             {memory, tile, arguments.x},
                             {tile, arguments.dx, arguments.handed_on}};
  const auto channels =
      tile.of_strips([&](const auto& strip) { return channels_of(arguments, inputs, strip); });

  // Reduce: the tile's sums.
  const GroupTeam<Build> team(tile, scratch, arguments.handed_on);
  if constexpr (Build::find)
    tile.for_each_strip(
        [&](const auto& strip) { find_sums(arguments, strip, channels(strip), team); });

  // Factors.
  if constexpr (Build::combine)
    for_each_group(team, [&](const auto& group) { combine_sums(arguments.rstd, group); });

  // Store.
  if constexpr (Build::write)
    tile.for_each_strip([&](const auto& strip) {
      if constexpr (present<Build::dx_t>) write_dx(arguments, strip, channels(strip), team);
      if constexpr (Build::dweight) correct_dweight_sums(arguments, strip, team);
    });
}
