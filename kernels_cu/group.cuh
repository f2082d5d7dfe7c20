// SPDX-License-Identifier: MIT
// Groups of channels: how a sample lies in memory, and which part of it a block and a thread have.
//
// A sample is some positions of some channels. What lies contiguous is a line: with channels last
// the channels of a position, with channels first the positions of a channel. Everything else is
// the same for both: a tile is some positions of some channels, a block has one, and a thread has
// packs of it that are of the same channels, at several positions. The packs of a tile's positions
// are summed together (a part of the sample); how large a part is depends on the shape of a sample
// and on the operands' types alone.
//
// On a GPU threads keep their packs in registers. On the CPU the one thread reads them again from
// its caches.
#pragma once
#include "group_memory.cuh"
#include "operands.cuh"
#include "reduce.cuh"

// Where an operand's lines are, strides in elements.
template <class T>
struct Lines {
  T* data;
  index_t sample_stride, line_stride;

  __device__ T* at(index_t sample, index_t line) const {
    if constexpr (!present<T>) return data;
    return data + sample * sample_stride + line * line_stride;
  }
};

// Which of the passes over a sample a launch makes.
template <class B>
inline constexpr bool one_pass = B::find && B::combine;
template <class B>
inline constexpr bool kept = B::threads > 1;

// The sizes of a sample and of its tiles.
template <class B>
struct Extent {
  static constexpr index_t tile_positions =
      index_t(B::position_threads) * B::packs * (B::channels_last ? 1 : B::pack);
  static constexpr index_t tile_channels = B::channel_threads * (B::channels_last ? B::pack : 1);
  index_t samples, first_sample, positions, channels, groups, block_groups;

  template <class Arguments>
  __device__ explicit Extent(const Arguments& arguments)
      : samples(arguments.samples),
        first_sample(arguments.first_sample),
        positions(arguments.positions),
        channels(B::channels > 0 ? B::channels : arguments.channels),
        groups(B::groups > 0 ? B::groups : arguments.groups),
        block_groups(arguments.block_groups) {}

  __device__ index_t group_channels() const { return channels / groups; }
  __device__ index_t group_size() const { return group_channels() * positions; }
  __device__ index_t width() const { return B::channels_last ? channels : positions; }
  __device__ index_t parts() const { return (positions + tile_positions - 1) / tile_positions; }
  __device__ index_t channel_tiles() const {
    return (channels + tile_channels - 1) / tile_channels;
  }
  // Of a part.
  __device__ index_t part_positions(index_t part) const {
    const index_t left = positions - part * tile_positions;
    return left < tile_positions ? left : tile_positions;
  }
};

// A block's part of a sample. Samples count from the first of the launch.
struct Tile {
  index_t sample, part, first_channel;
};

// use(tile) for the tile of the block, or, where the CPU's thread makes all passes, for each tile
// of its groups.
template <class B, class Use>
__device__ inline void for_each_tile(const Extent<B>& extent, Use use) {
  constexpr index_t step = Extent<B>::tile_channels;
  const index_t block = blockIdx.x, parts = extent.parts(), tiles = extent.channel_tiles();
  if constexpr (one_pass<B> && !kept<B>) {
    const index_t shares = extent.groups / extent.block_groups, sample = block / shares;
    const index_t share_channels = extent.block_groups * extent.group_channels();
    const index_t first = block % shares * share_channels, end = first + share_channels;
    for (index_t part = 0; part < parts; ++part)
      for (index_t channel = first; channel < end; channel += step)
        use(Tile{sample, part, channel});
  } else if constexpr (B::channels_last) {
    const index_t rest = block / tiles;
    use(Tile{rest / parts, rest % parts, block % tiles * step});
  } else {
    const index_t rest = block / parts;
    use(Tile{rest / tiles, block % parts, rest % tiles * step});
  }
}

// The team of threads that combines a group's parts: a warp for each of the groups of a block that
// makes all passes, else the block.
template <class B>
struct Combining {
  using compute_t = fp64;
  static constexpr int threads = B::threads;
  static constexpr int threads_per_row = one_pass<B> && kept<B> ? 32 : B::threads;
  static constexpr int pack = 1;
};

// use(sample, group) for the groups that the team combines.
template <class B, class Use>
__device__ inline void for_each_group(const Extent<B>& extent, const Team<Combining<B>>& team,
                                      Use use) {
  const index_t count = one_pass<B> ? extent.block_groups : 1, shares = extent.groups / count;
  const index_t sample = blockIdx.x / shares, first = blockIdx.x % shares * count;
  for (index_t i = team.index(); i < count; i += Team<Combining<B>>::per_block)
    use(sample, first + i);
}

// One value for each channel of a thread's packs.
template <class B>
using ChannelItems = either<B::channels_last, Items<B>, Pack<Item<B>, 1>>;

template <class B, class At>
__device__ inline Item<B> of_channel(const ChannelItems<B>& values, At at) {
  if constexpr (B::channels_last)
    return values.item[at.index];
  else
    return values.item[0];
}

// f(i) for each of them.
template <class B, class F>
__device__ inline ChannelItems<B> for_channels(const F& f) {
  ChannelItems<B> out;
  unrolled<int(sizeof(out) / sizeof(out.item[0]))>([&](int i) { out.item[i] = f(i); });
  return out;
}

// What multiplies a channel, rstd * weight.
template <class B, class Weight>
__device__ inline ChannelItems<B> weighted(const ChannelItems<B>& rstd, const Weight& weight) {
  if constexpr (present<typename B::weight_t>)
    return for_channels<B>([&](int i) { return rstd.item[i] * weight.item[i]; });
  else
    return rstd;
}

// n of an item about the mean.
template <class B, class Bias, class At>
__device__ inline Item<B> affine(Item<B> q, const ChannelItems<B>& factor, const Bias& bias,
                                 At at) {
  if constexpr (present<typename B::bias_t>)
    return fma(q, of_channel<B>(factor, at), of_channel<B>(bias, at));
  else
    return q * of_channel<B>(factor, at);
}

// The thread's place among those that have the same channels.
template <class B>
__device__ inline int position_thread() {
  return B::channels_last ? threadIdx.x / B::channel_threads : threadIdx.x % B::position_threads;
}

// The thread's channels in a tile; with channels last, at a column. (The CPU knows of a column
// whether its pack is whole.)
template <class B, class Column>
struct Strip {
  using C = typename B::compute_t;
  const Extent<B>& extent;
  Tile tile;
  Column channel;

  // Those left over at the end of a block have no packs; with channels first, no channels.
  __device__ static bool has_packs() { return position_thread<B>() < B::position_threads; }
  __device__ bool has_channels() const { return inside(channel, extent.channels); }

  // use(i, line, column, end) for each of the thread's packs; the pack is there where column < end.
  // end_chunk() after at most 16 of them and after the last.
  template <class Use, class EndChunk>
  __device__ void for_each_pack(Use use, EndChunk end_chunk) const {
    const index_t first = tile.part * Extent<B>::tile_positions, width = extent.width();
    if constexpr (kept<B>) {
#pragma unroll
      for (int i = 0; i < B::packs; ++i) {
        const index_t step = i * B::position_threads + position_thread<B>();
        if constexpr (B::channels_last) {
          const index_t line = first + step;
          use(i, line, channel, has_packs() && inside(line, extent.positions) ? width : 0);
        } else {
          use(i, index_t(channel), first + step * B::pack, has_channels() ? width : 0);
        }
        if (i % 16 == 15 || i == B::packs - 1) end_chunk();
      }
    } else if constexpr (B::channels_last) {
      const index_t end = first + extent.part_positions(tile.part);
      for (index_t run = first; run < end; run += 16) {
        for (index_t line = run; line < end && line < run + 16; ++line)
          use(0, line, channel, width);
        end_chunk();
      }
    } else {
      for_each_column<B>(
          first, B::pack, first + extent.part_positions(tile.part),
          [&](auto column) { use(0, index_t(channel), column, width); }, end_chunk);
    }
  }

  // A line to come, to be prefetched: with channels first, of the group that comes next.
  __device__ index_t later(index_t line) const {
    const index_t lines = B::channels_last ? extent.positions : extent.channels;
    const index_t next = line + (B::channels_last ? 32 : extent.group_channels());
    return next < lines ? next : line;
  }

  // A parameter's values for the thread's channels.
  template <class T>
  __device__ auto load_parameter(const T* parameter) const {
    if constexpr (!present<T>) {
      return absent{};
    } else if constexpr (B::channels_last) {
      return load_items<B>(parameter, channel, extent.channels);
    } else {
      const C value = has_channels() ? convert<C>(parameter[channel]) : C(0);
      return ChannelItems<B>{{spread<B>(value)}};
    }
  }

  // load(group) for the groups of the thread's channels.
  template <class Load>
  __device__ ChannelItems<B> load_groups(Load load) const {
    const index_t size = extent.group_channels();
    if constexpr (B::channels_last)
      return load_each<B>(channel, extent.channels, size, load);
    else
      return {{spread<B>(has_channels() ? load(channel / size) : C(0))}};
  }
};

// use(strip) for the thread's strip of a tile.
template <class B, class Use>
__device__ inline void with_strip(const Extent<B>& extent, const Tile& tile, Use use) {
  const auto with_channel = [&](auto channel) {
    use(Strip<B, decltype(channel)>{extent, tile, channel});
  };
  if constexpr (!B::channels_last) {
    const index_t thread = threadIdx.x / B::position_threads;
    with_channel(inside(thread, B::channel_threads) ? tile.first_channel + thread
                                                    : extent.channels);
  } else {
    with_column<B>(tile.first_channel + index_t(threadIdx.x % B::channel_threads) * B::pack,
                   extent.channels, with_channel);
  }
}
