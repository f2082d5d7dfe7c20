// SPDX-License-Identifier: MIT
// Group norm, forward, with an activation g.
//
//   mean, variance over the positions and channels of one group of one sample
//   rstd = 1 / sqrt(variance + eps)
//   n    = weight * (x - mean) * rstd + bias
//   y    = g(n)
//
// A sample is cut into parts (group_tile.cuh). For each part, the moments about a shift near the
// part's mean are found; then the moments of all parts are combined. One rounded mean is not enough
// (see row_norm_forward.cu), so a correction of the mean is subtracted, too.
#include "group_tile.cuh"
#include "math.cuh"

struct Build : GroupBuild {
  using y_t = Y_T;
  static constexpr int sums = 2;       // reduced together
  static constexpr bool reads = true;  // whether a launch reads the tile
};

template <class B>
struct Arguments {
  Lines<const typename B::x_t> x;
  Lines<typename B::y_t> y;
  Parameter<const typename B::weight_t> weight;
  Parameter<const typename B::bias_t> bias;
  typename B::compute_t *mean, *rstd;  // null if not wanted
  typename B::compute_t* handed_on;
  Sizes sizes;
  double eps;
};

enum Moment { SumT, SumTT, Shift };  // per part: sums of t = x - shift and of t * t, and shift
enum Statistic { Mean, Correction, Rstd };

template <class B, class Strip>
__device__ inline void find_moments(const Strip& strip, const TilePacks<B, typename B::x_t>& x,
                                    const GroupTeam<B>& team) {
  const auto add = [&](auto at, auto& sums) {
    const auto pack = x[at];
    for_each_item<B>(at, [&](auto item) { sums[0].add(item, read<B>(pack, item)); });
  };
  const auto sums_about = [&](const auto& shift) {
    return strip.template sums<2>([&](auto at, auto& sums) {
      const auto pack = x[at];
      for_each_item<B>(at, [&](auto item) {
        const auto t = clear_outside<B>(read<B>(pack, item) - of_channel<B>(shift, item), item);
        sums[SumT].add(item, t);
        sums[SumTT].add_product(item, t, t);
      });
    });
  };
  team.hand_on_moments(strip, add, sums_about);
}

// Uses Chan's formula. distance(part) is the part's mean minus the first part's mean. The group's
// mean is the first part's mean plus the mean distance: if all elements are equal, each distance is
// 0, and the mean has no rounding error. from_sum is the computed mean distance; the mean of
// distance(part) - from_sum is its rounding error, which is added to it.
template <class B, class Group>
__device__ inline void combine_moments(const Arguments<B>& arguments, const Group& group) {
  using C = typename Group::C;
  const auto first = group.part(0);
  const auto distance = [&](const auto& part) {
    return (part.values.item[Shift] - first.values.item[Shift]) + (part.mean - first.mean);
  };
  Pack<C, 1> distances = {};
  Pack<C, 2> rest = {};
  group.for_each_part([&](const auto& part) { distances.item[0] += part.count * distance(part); });
  const C from_sum = warp_all_reduce<32>(distances).item[0] / group.elements();
  group.for_each_part([&](const auto& part) {
    const C left = distance(part) - from_sum;
    rest.item[SumT] += part.count * left;
    rest.item[SumTT] +=
        (part.values.item[SumTT] - part.values.item[SumT] * part.mean) + part.count * left * left;
  });
  rest = warp_all_reduce<32>(rest);
  const C left = rest.item[SumT] / group.elements();
  C variance = rest.item[SumTT] / group.elements() - left * left;
  if (variance < 0) variance = 0;  // a NaN stays
  if (!group.is_first_thread()) return;

  const C from_first = first.mean + (from_sum + left);
  const auto mean = typename B::compute_t(first.values.item[Shift] + from_first);
  const C rstd = math::reciprocal_root(variance + C(arguments.eps));
  group.put(Mean, mean);
  group.put(Correction, (first.values.item[Shift] - C(mean)) + from_first);
  group.put(Rstd, rstd);
  if (!group.is_of_first_part()) return;
  if (arguments.mean != nullptr) arguments.mean[group.index()] = mean;
  if (arguments.rstd != nullptr) arguments.rstd[group.index()] = rstd;
}

// The offset includes the mean's correction: n = (x - mean) * factor + offset.
template <class B, class Strip, class Weight, class Bias>
__device__ inline void write_y(const Arguments<B>& arguments, const Strip& strip,
                               const TilePacks<B, typename B::x_t>& x, const Weight& weight,
                               const Bias& bias, const GroupTeam<B>& team) {
  const auto statistic = [&](int value) {
    return strip.of_groups([&](auto group) { return team.of_group(value, group); });
  };
  const auto mean = statistic(Mean), correction = statistic(Correction);
  const auto factor = weighted<B>(statistic(Rstd), weight);
  const auto offset = for_channels<B>(
      [&](int i) { return affine<B>(-correction.item[i], factor.item[i], bias, i); });
  strip.for_each_pack([&](auto at) {
    const auto pack = x[at];
    TileOutput<B, typename B::y_t> y(strip, arguments.y, at);
    for_each_item<B>(at, [&](auto item) {
      const auto t = read<B>(pack, item) - of_channel<B>(mean, item);
      const auto n = fma(t, of_channel<B>(factor, item), of_channel<B>(offset, item));
      write(y, item, B::activation::at(n).value);
    });
    y.store(at);
  });
}

extern "C" __global__ void __launch_bounds__(Build::threads, Build::blocks_per_sm) CLUSTER_LAUNCH
    group_norm_forward(const Arguments<Build> arguments) {
  __shared__ GroupTeam<Build>::Scratch scratch;
  SharedMemory memory;
  const Tile<Build> tile(arguments.sizes);
  begin_launch<Build, false>();

  // Load.
  const TilePacks<Build, Build::x_t> x(memory, tile, arguments.x);
  const auto weight =
      tile.of_strips([&](const auto& strip) { return parameter_of(arguments.weight, strip); });
  const auto bias =
      tile.of_strips([&](const auto& strip) { return parameter_of(arguments.bias, strip); });

  // Reduce: the tile's moments.
  const GroupTeam<Build> team(tile, scratch, arguments.handed_on);
  if constexpr (Build::find)
    tile.for_each_strip([&](const auto& strip) { find_moments(strip, x, team); });

  // Factors.
  if constexpr (Build::combine)
    for_each_group(team, [&](const auto& group) { combine_moments(arguments, group); });

  // Store.
  if constexpr (Build::write)
    tile.for_each_strip(
        [&](const auto& strip) { write_y(arguments, strip, x, weight(strip), bias(strip), team); });
}
