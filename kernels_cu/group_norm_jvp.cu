// SPDX-License-Identifier: MIT
// Group norm, forward mode: the tangent of y.
//
//   r  = (x - mean) * rstd,   n = weight * r + bias          a tangent is marked by '
//   r' = rstd * (h - mean(h) - r * mean(r * h)),  h = x'     means are over a group
//   y' = g'(n) * (weight * r' + weight' * r + bias')         g: the activation
//
// As in the backward, each part's sums are found and then combined, and the rounding error of the
// saved mean is measured and removed: x - mean is p, and r is (p - correction) * rstd.
#include "group_derivative.cuh"
#include "group_tile.cuh"

struct Build : GroupBuild {
  using x_tangent_t = X_TANGENT_T;
  using weight_tangent_t = WEIGHT_TANGENT_T;
  using bias_tangent_t = BIAS_TANGENT_T;
  using y_tangent_t = Y_TANGENT_T;
  static constexpr int sums = 3;       // reduced together
  static constexpr bool reads = true;  // whether a launch reads the tile
};

template <class B>
struct Arguments {
  Lines<const typename B::x_t> x;
  Lines<const typename B::x_tangent_t> x_tangent;
  Lines<typename B::y_tangent_t> y_tangent;
  Parameter<const typename B::weight_t> weight;
  Parameter<const typename B::bias_t> bias;
  Parameter<const typename B::weight_tangent_t> weight_tangent;
  Parameter<const typename B::bias_tangent_t> bias_tangent;
  const typename B::compute_t *mean, *rstd;
  typename B::compute_t* handed_on;
  Sizes sizes;
};

template <class B>
struct Inputs {
  TilePacks<B, typename B::x_tangent_t> x_tangent;
  TilePacks<B, typename B::x_t> x;

  // Calls visit(item, p, h) for the items of a pack.
  template <class At, class Visit>
  __device__ void for_each_of_pack(At at, const ChannelItems<B>& mean, Visit visit) const {
    const auto x_pack = x[at];
    const auto x_tangent_pack = x_tangent[at];
    for_each_item<B>(at, [&](auto item) {
      const auto p = clear_outside<B>(read<B>(x_pack, item) - of_channel<B>(mean, item), item);
      visit(item, p, read<B>(x_tangent_pack, item));
    });
  }
};

// Returns a statistic of the groups of a strip's channels.
template <class B, class Strip>
__device__ inline ChannelItems<B> of_groups(const typename B::compute_t* statistic,
                                            const Strip& strip) {
  return strip.of_groups([&](auto group) { return statistic[strip.index_of(group)]; });
}

template <class B, class Strip>
__device__ inline void find_sums(const Arguments<B>& arguments, const Strip& strip,
                                 const Inputs<B>& inputs, const GroupTeam<B>& team) {
  const auto mean = of_groups<B>(arguments.mean, strip);
  const auto found = strip.template sums<3>([&](auto at, auto& sums) {
    inputs.for_each_of_pack(at, mean, [&](auto item, auto p, auto h) {
      sums[SumH].add(item, h);
      sums[SumHP].add_product(item, h, p);
      sums[SumP].add(item, p);
    });
  });
  const absent* const unweighted = nullptr;
  team.hand_on(strip, found, unweighted);
}

// The parameters of a strip's channels.
template <class Weight, class Bias, class WeightTangent, class BiasTangent>
struct Parameters {
  Weight weight;
  Bias bias;
  WeightTangent weight_tangent;
  BiasTangent bias_tangent;
};
template <class... T>
Parameters(T...) -> Parameters<T...>;

template <class B, class Strip>
__device__ inline auto parameters_of(const Arguments<B>& arguments, const Strip& strip) {
  return Parameters{parameter_of(arguments.weight, strip), parameter_of(arguments.bias, strip),
                    parameter_of(arguments.weight_tangent, strip),
                    parameter_of(arguments.bias_tangent, strip)};
}

template <class B, class Strip, class... T>
__device__ inline void write_tangent(const Arguments<B>& arguments, const Strip& strip,
                                     const Inputs<B>& inputs, const Parameters<T...>& of,
                                     const GroupTeam<B>& team) {
  const auto factor = [&](int value) {
    return strip.of_groups([&](auto group) { return team.of_group(value, group); });
  };
  const auto mean = of_groups<B>(arguments.mean, strip), rstd = of_groups<B>(arguments.rstd, strip);
  const auto factor_of_p = factor(FactorOfP), offset = factor(Offset);
  const auto correction = factor(Correction);
  strip.for_each_pack([&](auto at) {
    TileOutput<B, typename B::y_tangent_t> y_tangent(strip, arguments.y_tangent, at);
    inputs.for_each_of_pack(at, mean, [&](auto item, auto p, auto h) {
      const int i = B::channels_last ? item.index : 0;
      const auto r = (p - correction.item[i]) * rstd.item[i];
      auto n = r, found = fma(h, rstd.item[i], fma(p, factor_of_p.item[i], offset.item[i]));
      if constexpr (present<typename B::weight_t>) {
        n *= of.weight.item[i];
        found *= of.weight.item[i];
      }
      if constexpr (present<typename B::bias_t>) n += of.bias.item[i];
      if constexpr (present<typename B::weight_tangent_t>)
        found = fma(r, of.weight_tangent.item[i], found);
      if constexpr (present<typename B::bias_tangent_t>) found += of.bias_tangent.item[i];
      write(y_tangent, item, B::activation::at(n).derivative * found);
    });
    y_tangent.store(at);
  });
}

extern "C" __global__ void __launch_bounds__(Build::threads, Build::blocks_per_sm) CLUSTER_LAUNCH
    group_norm_jvp(const Arguments<Build> arguments) {
  __shared__ GroupTeam<Build>::Scratch scratch;
  SharedMemory memory;
  const Tile<Build> tile(arguments.sizes);
  begin_launch<Build, false>();

  // Load.
  const Inputs<Build> inputs{{memory, tile, arguments.x_tangent}, {memory, tile, arguments.x}};
  const auto parameters =
      tile.of_strips([&](const auto& strip) { return parameters_of(arguments, strip); });

  // Reduce: the tile's sums.
  const GroupTeam<Build> team(tile, scratch, arguments.handed_on);
  if constexpr (Build::find)
    tile.for_each_strip([&](const auto& strip) { find_sums(arguments, strip, inputs, team); });

  // Factors.
  if constexpr (Build::combine)
    for_each_group(team, [&](const auto& group) { combine_sums(arguments.rstd, group); });

  // Store.
  if constexpr (Build::write)
    tile.for_each_strip([&](const auto& strip) {
      write_tangent(arguments, strip, inputs, parameters(strip), team);
    });
}
