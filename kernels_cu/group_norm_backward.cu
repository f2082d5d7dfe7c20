// SPDX-License-Identifier: MIT
// Group norm, backward: dx, and for each sample its part of dweight and dbias.
//
//   p  = x - mean,   n = weight * p * rstd + bias                 n again, as nothing else is saved
//   h  = dy * g'(n)                                               g: the activation
//   A  = sum of h,   B = sum of h * r                             of each channel of each sample
//   a  = mean of weight * h,   b = mean of weight * h * r         over a group
//   dx = rstd * (weight * h - a - r * b)
//   dbias = sum over samples of A,   dweight = sum over samples of B
//
// The saved mean is rounded, so its error is measured and taken out again where it counts:
//   correction = mean of p,   r = (p - correction) * rstd
//
// Three passes, as in the forward: find the sums of each channel in each part of the sample,
// combine them to a, b, A and B, and write dx. A and B of the samples are added up by
// param_grad.cu.
#include "activations.cuh"
#include "channel_sums.cuh"

// clang-format off
struct Build {
  using compute_t = COMPUTE_T;
  using dy_t = DY_T;
  using x_t = X_T;
  using dx_t = DX_T;
  using weight_t = WEIGHT_T;
  using bias_t = BIAS_T;
  using activation = activations::ACTIVATION;
  static constexpr bool identity = same_type<activation, activations::identity>;
  static constexpr bool dweight = DWEIGHT;
  static constexpr bool dbias = DBIAS;
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
  static constexpr int kept_h = KEPT_H;                 // packs of h that a CPU's thread keeps
  static constexpr int access = ACCESS;                 // elements in one access, by alignment
};
// clang-format on

template <class B>
struct Arguments {
  Lines<const typename B::dy_t> dy;
  Lines<const typename B::x_t> x;
  Lines<typename B::dx_t> dx;
  const typename B::weight_t* weight;
  const typename B::bias_t* bias;
  const typename B::compute_t* mean;
  const typename B::compute_t* rstd;
  typename B::compute_t* dweight_sums;  // a row of channels for each sample
  typename B::compute_t* dbias_sums;
  typename B::compute_t* handed_on;
  index_t samples, first_sample;  // of the launch
  index_t positions, channels, groups, block_groups;
};

enum ChannelSums { SumH, SumHP, SumP };   // of a channel: of h, h * p and p
enum GroupFactors { FactorOfP, Offset };  // of a group: what dx takes of it

template <class B>
struct Inputs {
  LoadedPack<B, typename B::dy_t> dy;
  LoadedPack<B, typename B::x_t> x;
};
template <class B>
using Packs = TilePacks<B, Inputs<B>>;

template <class B>
__device__ inline auto loader(const Arguments<B>& arguments, index_t sample) {
  return [&arguments, sample](index_t line, auto column, index_t end) {
    return Inputs<B>{load_pack<B>(arguments.dy.at(sample, line), column, end),
                     load_pack<B>(arguments.x.at(sample, line), column, end)};
  };
}

// With channels first a pass has `half` of the next group prefetched, the first its x and the last
// its dy, so that memory is busy in both; with channels last each pass what it comes to itself.
template <class B, class Half, class Other, class Column>
__device__ __forceinline__ void prefetch_inputs(const Half& half, const Other& other,
                                                index_t sample, index_t line, Column column) {
  prefetch_pack<B>(half.at(sample, line), column);
  if constexpr (B::channels_last) prefetch_pack<B>(other.at(sample, line), column);
}

// What p and h of a strip's channels take.
template <class B, class Bias>
struct Channels {
  ChannelItems<B> mean, factor;  // rstd * weight
  Bias bias;

  template <class At>
  __device__ Item<B> p(const Inputs<B>& inputs, At at) const {
    return clear_outside<B>(read<B>(inputs.x, at) - of_channel<B>(mean, at), at);
  }
  template <class At>
  __device__ Item<B> h(const Inputs<B>& inputs, Item<B> p, At at) const {
    const auto dy = read<B>(inputs.dy, at);
    if constexpr (B::identity)
      return dy;
    else
      return clear_outside<B>(dy * B::activation::at(affine<B>(p, factor, bias, at)).derivative,
                              at);
  }
};

template <class B, class Strip>
__device__ inline auto load_channels(const Arguments<B>& arguments, const Strip& strip) {
  const index_t first = (strip.extent.first_sample + strip.tile.sample) * strip.extent.groups;
  const auto of_group = [&](const typename B::compute_t* statistic) {
    return strip.load_groups([&](index_t group) { return statistic[first + group]; });
  };
  const auto bias = strip.load_parameter(arguments.bias);
  const auto weight = strip.load_parameter(arguments.weight);
  return Channels<B, decltype(strip.load_parameter(arguments.bias))>{
      of_group(arguments.mean), weighted<B>(of_group(arguments.rstd), weight), bias};
}

// The h of a line's packs, where a CPU's thread, which makes all passes, keeps that of its group.
template <class B>
__device__ inline Items<B>* kept_h_of(const Extent<B>& extent, index_t line) {
  Items<B>* const packs = kept_packs<Items<B>, B::kept_h>();
  if constexpr (B::kept_h == 0) return packs;
  const index_t line_packs = (extent.positions + B::pack - 1) / B::pack;
  return packs + line % extent.group_channels() * line_packs;
}

template <class B>
__device__ inline void find_sums(const Arguments<B>& arguments, const Extent<B>& extent,
                                 const Tile& tile, Packs<B>& packs, ChannelTeam<B>& team,
                                 const HandedOn<B>& handed_on) {
  const index_t sample = extent.first_sample + tile.sample;
  with_strip(extent, tile, [&](const auto& strip) {
    const auto channels = load_channels(arguments, strip);
    Items<B>* const line_h = kept_h_of(extent, strip.channel);
    ChannelSum<B> sum_h, sum_h_p, sum_p;
    packs.load_each(
        strip, loader(arguments, sample),
        [&](index_t line, auto column, index_t end, const Inputs<B>& inputs) {
          prefetch_inputs<B>(arguments.x, arguments.dy, sample, strip.later(line), column);
          if constexpr (B::kept_h > 0) prefetch_output<B>(arguments.dx.at(sample, line), column);
          Items<B> pack_h;  // stored together at the end, as results are
          for_each_item<B>(column, end, [&](auto at) {
            const auto p = channels.p(inputs, at), h = channels.h(inputs, p, at);
            pack_h.item[at.index] = h;
            sum_h.add(at, h);
            sum_h_p.add_product(at, h, p);
            sum_p.add(at, p);
          });
          if constexpr (B::kept_h > 0) line_h[column / B::pack] = pack_h;
        },
        [&] {
          sum_h.end_chunk();
          sum_h_p.end_chunk();
          sum_p.end_chunk();
        });
    const auto sums_h = team.all_reduce(sum_h), sums_h_p = team.all_reduce(sum_h_p);
    const auto sums_p = team.all_reduce(sum_p);
    if (!team.is_first()) return;
    handed_on.store(SumH, strip, sums_h);
    handed_on.store(SumHP, strip, sums_h_p);
    handed_on.store(SumP, strip, sums_p);
  });
}

// Threads that add up a channel's parts, of which a sample that one block takes has one.
template <class B>
inline constexpr int threads_of_channel = one_pass<B> || B::threads == 1 ? 1 : 32;

template <class B>
__device__ inline void combine_sums(const Arguments<B>& arguments, const Extent<B>& extent,
                                    Team<Combining<B>>& team, index_t sample, index_t group,
                                    const HandedOn<B>& handed_on) {
  using C = typename B::compute_t;
  constexpr int lanes = threads_of_channel<B>;
  const index_t size = extent.group_channels(), first = group * size, parts = extent.parts();
  const double elements = double(extent.group_size());

  double sum_p = 0;
  for_each_part(team, parts, size, [&](index_t part, index_t channel) {
    sum_p += handed_on.load(SumP, sample, part, first + channel);
  });
  const double correction = team.all_reduce(sum_p) / elements;

  const index_t whole_sample = extent.first_sample + sample;
  const double rstd = arguments.rstd[whole_sample * extent.groups + group];
  Pack<double, 2> weighted = {};  // sums of weight * h and of weight * h * r
  for (index_t i = team.thread() / lanes; i < size; i += Team<Combining<B>>::threads / lanes) {
    const index_t channel = first + i;
    Pack<double, 2> sums = {};
    for (index_t part = team.thread() % lanes; part < parts; part += lanes) {
      sums.item[0] += handed_on.load(SumH, sample, part, channel);
      sums.item[1] += handed_on.load(SumHP, sample, part, channel);
    }
    sums = warp_all_reduce<lanes>(sums);
    if (team.thread() % lanes > 0) continue;
    const double sum_h = sums.item[0], sum_h_r = rstd * (sums.item[1] - correction * sum_h);
    const index_t place = whole_sample * sum_pitch(extent.channels) + channel;
    if constexpr (B::dweight) arguments.dweight_sums[place] = C(sum_h_r);
    if constexpr (B::dbias) arguments.dbias_sums[place] = C(sum_h);
    double weight = 1;
    if constexpr (present<typename B::weight_t>) weight = convert<C>(arguments.weight[channel]);
    weighted.item[0] += weight * sum_h;
    weighted.item[1] += weight * sum_h_r;
  }

  if constexpr (present<typename B::dx_t>) {
    weighted = team.all_reduce(weighted);
    if (team.thread() > 0) return;
    const double a = weighted.item[0] / elements, b = weighted.item[1] / elements;
    const double factor_of_p = -rstd * rstd * b;
    handed_on.store_group(FactorOfP, sample, group, C(factor_of_p));
    handed_on.store_group(Offset, sample, group, C(-rstd * a - correction * factor_of_p));
  }
}

template <class B>
__device__ inline void write_dx(const Arguments<B>& arguments, const Extent<B>& extent,
                                const Tile& tile, Packs<B>& packs, const HandedOn<B>& handed_on) {
  const index_t sample = extent.first_sample + tile.sample;
  with_strip(extent, tile, [&](const auto& strip) {
    const auto channels = load_channels(arguments, strip);
    Items<B>* const line_h = kept_h_of(extent, strip.channel);
    const auto of_group = [&](int value) {
      return strip.load_groups(
          [&](index_t group) { return handed_on.load_group(value, tile.sample, group); });
    };
    const auto factor_of_p = of_group(FactorOfP), offset = of_group(Offset);
    packs.last_pass(
        strip, loader(arguments, sample),
        [&](index_t line, auto column, index_t end, const Inputs<B>& inputs) {
          prefetch_inputs<B>(arguments.dy, arguments.x, sample, strip.later(line), column);
          TileOutput<B, typename B::dx_t> dx(arguments.dx.at(sample, line), end);
          for_each_item<B>(column, end, [&](auto at) {
            const auto p = channels.p(inputs, at);
            Item<B> h;
            if constexpr (B::kept_h > 0)
              h = line_h[column / B::pack].item[at.index];
            else
              h = channels.h(inputs, p, at);
            const auto rest = fma(p, of_channel<B>(factor_of_p, at), of_channel<B>(offset, at));
            const auto ds = fma(h, of_channel<B>(channels.factor, at), rest);
            if constexpr (present<typename B::dx_t>) write(dx, at, ds);
          });
          dx.store(column);
        });
  });
}

extern "C" __global__ void __launch_bounds__(Build::threads, 1)
    group_norm_backward(const Arguments<Build> arguments) {
  __shared__ ChannelScratch<Build> channel_scratch;
  __shared__ Team<Combining<Build>>::Scratch team_scratch;
  __shared__ HandedOn<Build>::Scratch handed_scratch;
  const Extent<Build> extent(arguments);
  const HandedOn<Build> handed_on(extent, arguments.handed_on, handed_scratch);
  Packs<Build> packs;
  if constexpr (Build::find) {
    ChannelTeam<Build> team(channel_scratch);
    for_each_tile(extent, [&](const Tile& tile) {
      find_sums(arguments, extent, tile, packs, team, handed_on);
    });
  }
  if constexpr (one_pass<Build>) __syncthreads();
  if constexpr (Build::combine) {
    Team<Combining<Build>> team(team_scratch);
    for_each_group(extent, team, [&](index_t sample, index_t group) {
      combine_sums(arguments, extent, team, sample, group, handed_on);
    });
  }
  if constexpr (Build::write) {
    if constexpr (one_pass<Build>) __syncthreads();
    for_each_tile(extent,
                  [&](const Tile& tile) { write_dx(arguments, extent, tile, packs, handed_on); });
  }
}
