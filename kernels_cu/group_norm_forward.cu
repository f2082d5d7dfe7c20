// SPDX-License-Identifier: MIT
// Group norm, forward, with an activation g.
//
//   mean, variance over the positions and channels of one group of one sample
//   rstd = 1 / sqrt(variance + eps)
//   n    = weight * (x - mean) * rstd + bias
//   y    = g(n)
//
// Three passes: find each channel's moments in each part of the sample, combine them to those of
// the groups, and write y (group.cuh). A block whose tile has whole groups makes all three, and
// reads x once; else each is a launch. As one rounded mean is not enough (row_norm_forward.cu), it
// is handed on as two numbers: mean = shift + correction.
#include "activations.cuh"
#include "channel_sums.cuh"
#include "math.cuh"

// clang-format off
struct Build {
  using compute_t = COMPUTE_T;
  using x_t = X_T;
  using weight_t = WEIGHT_T;
  using bias_t = BIAS_T;
  using y_t = Y_T;
  using activation = activations::ACTIVATION;
  static constexpr bool find = FIND;                    // the passes that a launch makes
  static constexpr bool combine = COMBINE;
  static constexpr bool write = WRITE;
  static constexpr bool channels_last = CHANNELS_LAST;
  static constexpr index_t channels = CHANNELS;         // 0: known only at run time
  static constexpr index_t groups = GROUPS;             // the same
  static constexpr int threads = THREADS;               // of a block
  static constexpr int channel_threads = CHANNEL_THREADS;
  static constexpr int position_threads = POSITION_THREADS;
  static constexpr int pack = PACK;                     // elements a thread handles at a time
  static constexpr int packs = PACKS;                   // packs of a thread in a tile
  static constexpr int access = ACCESS;                 // elements in one access, by alignment
};
// clang-format on

template <class B>
struct Arguments {
  Lines<const typename B::x_t> x;
  Lines<typename B::y_t> y;
  const typename B::weight_t* weight;
  const typename B::bias_t* bias;
  typename B::compute_t* mean;  // null: not wanted
  typename B::compute_t* rstd;  // null: not wanted
  typename B::compute_t* handed_on;
  index_t samples, first_sample;  // of the launch
  index_t positions, channels, groups, block_groups;
  double eps;
};

enum Moment { Shift, Sum, Squares };  // of a channel: sums of t = x - shift, and of t * t
enum GroupMoment { Mean, Correction, Rstd };

template <class B>
using Packs = TilePacks<B, LoadedPack<B, typename B::x_t>>;

template <class B>
__device__ inline void find_moments(const Arguments<B>& arguments, const Extent<B>& extent,
                                    const Tile& tile, Packs<B>& packs, ChannelTeam<B>& team,
                                    const HandedOn<B>& handed_on) {
  using C = typename B::compute_t;
  const index_t sample = extent.first_sample + tile.sample;
  const auto load = [&](index_t line, auto column, index_t end) {
    return load_pack<B>(arguments.x.at(sample, line), column, end);
  };
  with_strip(extent, tile, [&](const auto& strip) {
    ChannelSum<B> sum;
    packs.load_each(
        strip, load,
        [&](index_t line, auto column, index_t end, const auto& x) {
          if constexpr (B::channels_last)
            prefetch_pack<B>(arguments.x.at(sample, strip.later(line)), column);
          for_each_item<B>(column, end, [&](auto at) { sum.add(at, read<B>(x, at)); });
        },
        [&] { sum.end_chunk(); });
    const auto sums = team.all_reduce(sum);
    const C count = C(extent.part_positions(tile.part));
    const auto shift = for_channels<B>([&](int i) { return sums.item[i] / count; });

    ChannelSum<B> sum_t, sum_tt;
    packs.next_pass(
        strip, load,
        [&](index_t, auto column, index_t end, const auto& x) {
          for_each_item<B>(column, end, [&](auto at) {
            const auto t = clear_outside<B>(read<B>(x, at) - of_channel<B>(shift, at), at);
            sum_t.add(at, t);
            sum_tt.add_product(at, t, t);
          });
        },
        [&] {
          sum_t.end_chunk();
          sum_tt.end_chunk();
        });
    const auto sums_t = team.all_reduce(sum_t), sums_tt = team.all_reduce(sum_tt);
    if (!team.is_first()) return;
    handed_on.store(Shift, strip, shift);
    handed_on.store(Sum, strip, sums_t);
    handed_on.store(Squares, strip, sums_tt);
  });
}

// A channel in a part of the sample: how many elements it has there, how far their mean is from a
// first one's, and their squares about it.
struct PartMoments {
  double count, distance, squares;
};

// Of the parts of a sample, of which only the last may be shorter.
struct PartCounts {
  index_t last;
  double whole, whole_inverse, cut, cut_inverse;

  template <class B>
  __device__ explicit PartCounts(const Extent<B>& extent)
      : last(extent.parts() - 1),
        whole(double(extent.part_positions(0))),
        whole_inverse(1.0 / whole),
        cut(double(extent.part_positions(last))),
        cut_inverse(1.0 / cut) {}

  __device__ double count(index_t part) const { return part < last ? whole : cut; }
  __device__ double inverse(index_t part) const {
    return part < last ? whole_inverse : cut_inverse;
  }
};

// Chan's formula, in double: a group's mean is that of its first channel's first part plus the mean
// distance from that, so that equal elements leave no rest.
template <class B>
__device__ inline void combine_moments(const Arguments<B>& arguments, const Extent<B>& extent,
                                       Team<Combining<B>>& team, index_t sample, index_t group,
                                       const HandedOn<B>& handed_on) {
  using C = typename B::compute_t;
  const index_t size = extent.group_channels(), first = group * size;
  const double first_shift = handed_on.load(Shift, sample, 0, first);
  const PartCounts counts(extent);
  const double first_rest = handed_on.load(Sum, sample, 0, first) * counts.inverse(0);
  const auto moments = [&](index_t part, index_t channel) {
    const double sum = handed_on.load(Sum, sample, part, channel);
    const double rest = sum * counts.inverse(part);
    const double shift = handed_on.load(Shift, sample, part, channel);
    const double squares = handed_on.load(Squares, sample, part, channel) - sum * rest;
    return PartMoments{counts.count(part), (shift - first_shift) + (rest - first_rest), squares};
  };

  double distances = 0;
  for_each_part(team, extent.parts(), size, [&](index_t part, index_t channel) {
    const auto m = moments(part, first + channel);
    distances += m.count * m.distance;
  });
  const double elements = double(extent.group_size());
  const double distance = team.all_reduce(distances) / elements;

  double squares = 0;
  for_each_part(team, extent.parts(), size, [&](index_t part, index_t channel) {
    const auto m = moments(part, first + channel);
    const double rest = m.distance - distance;
    squares += m.squares + m.count * rest * rest;
  });
  squares = team.all_reduce(squares);
  if (team.thread() > 0) return;

  const double rest = first_rest + distance, mean = first_shift + rest;
  const C shift = C(mean);
  const double rstd = 1.0 / sqrt((squares < 0 ? 0 : squares) / elements + arguments.eps);
  handed_on.store_group(Mean, sample, group, shift);
  handed_on.store_group(Correction, sample, group, C((first_shift - double(shift)) + rest));
  handed_on.store_group(Rstd, sample, group, C(rstd));
  const index_t index = (extent.first_sample + sample) * extent.groups + group;
  if (arguments.mean != nullptr) arguments.mean[index] = shift;
  if (arguments.rstd != nullptr) arguments.rstd[index] = C(rstd);
}

template <class B>
__device__ inline void write_y(const Arguments<B>& arguments, const Extent<B>& extent,
                               const Tile& tile, Packs<B>& packs, const HandedOn<B>& handed_on) {
  const index_t sample = extent.first_sample + tile.sample;
  with_strip(extent, tile, [&](const auto& strip) {
    const auto of_group = [&](int value) {
      return strip.load_groups(
          [&](index_t group) { return handed_on.load_group(value, tile.sample, group); });
    };
    const auto shift = of_group(Mean), correction = of_group(Correction), rstd = of_group(Rstd);
    const auto weight = strip.load_parameter(arguments.weight);
    const auto bias = strip.load_parameter(arguments.bias);
    const auto factor = weighted<B>(rstd, weight);
    packs.last_pass(
        strip,
        [&](index_t line, auto column, index_t end) {
          return load_pack<B>(arguments.x.at(sample, line), column, end);
        },
        [&](index_t line, auto column, index_t end, const auto& x) {
          prefetch_pack<B>(arguments.x.at(sample, strip.later(line)), column);
          TileOutput<B, typename B::y_t> y(arguments.y.at(sample, line), end);
          for_each_item<B>(column, end, [&](auto at) {
            const auto q =
                (read<B>(x, at) - of_channel<B>(shift, at)) - of_channel<B>(correction, at);
            const auto n = affine<B>(q, factor, bias, at);
            write(y, at, B::activation::at(n).value);
          });
          y.store(column);
        });
  });
}

extern "C" __global__ void __launch_bounds__(Build::threads, 1)
    group_norm_forward(const Arguments<Build> arguments) {
  __shared__ ChannelScratch<Build> channel_scratch;
  __shared__ Team<Combining<Build>>::Scratch team_scratch;
  __shared__ HandedOn<Build>::Scratch handed_scratch;
  const Extent<Build> extent(arguments);
  const HandedOn<Build> handed_on(extent, arguments.handed_on, handed_scratch);
  Packs<Build> packs;
  if constexpr (Build::find) {
    ChannelTeam<Build> team(channel_scratch);
    for_each_tile(extent, [&](const Tile& tile) {
      find_moments(arguments, extent, tile, packs, team, handed_on);
    });
  }
  if constexpr (one_pass<Build>) __syncthreads();
  if constexpr (Build::combine) {
    Team<Combining<Build>> team(team_scratch);
    for_each_group(extent, team, [&](index_t sample, index_t group) {
      combine_moments(arguments, extent, team, sample, group, handed_on);
    });
  }
  if constexpr (Build::write) {
    if constexpr (one_pass<Build>) __syncthreads();
    for_each_tile(extent,
                  [&](const Tile& tile) { write_y(arguments, extent, tile, packs, handed_on); });
  }
}
