// SPDX-License-Identifier: MIT
// The CPU's group_tile.cuh: a tile is a strip of a part of a sample, one pack of channels wide or,
// with channels first, one channel. A block has a strip; where a launch makes all passes, all
// strips of some groups, which stay in the core's caches. Each strip hands on sums of each of its
// channels.
#pragma once
#include "caches.h"
#include "group_strip.cuh"

// Packs that a thread holds of what it computed of a group.
#ifndef KEPT_H
#define KEPT_H 0
#endif

// The strips of a block.
template <class B>
struct Tile {
  const Sizes& sizes;

  explicit Tile(const Sizes& sizes) : sizes(sizes) {}

  // What strips take is found for each of them anew.
  template <class Of>
  auto of_strips(const Of& of) const {
    return of;
  }
  template <class Use>
  void for_each_strip(const Use& use) const {
    constexpr index_t step = B::channels_last ? B::pack : 1;
    const index_t block = blockIdx.x, strips = (sizes.channels + step - 1) / step;
    if constexpr (one_launch<B>) {
      const index_t shares = gridDim.x / sizes.samples, channels = sizes.channels / shares;
      const index_t first = block % shares * channels;
      for (index_t part = 0; part < sizes.parts; ++part)
        for (index_t channel = first; channel < first + channels; channel += step)
          use_strip(block / shares, part, channel, use);
    } else if constexpr (B::channels_last) {
      const index_t rest = block / strips;
      use_strip(rest / sizes.parts, rest % sizes.parts, block % strips * step, use);
    } else {
      const index_t rest = block / sizes.parts;
      use_strip(rest / strips, block % sizes.parts, rest % strips, use);
    }
  }

 private:
  template <class Use>
  void use_strip(index_t sample, index_t part, index_t channel, const Use& use) const {
    if constexpr (!B::channels_last)
      use(Strip<B, index_t>{sizes, sample, part, channel});
    else if (channel + B::pack <= sizes.channels)
      use(Strip<B, WholeColumn<>>{sizes, sample, part, {channel}});
    else
      use(Strip<B, CutColumn<>>{sizes, sample, part, {channel}});
  }
};

// An operand's packs, which lie in memory, and are prefetched: with channels last those that a pass
// comes to, with channels first those of the group that comes next, by the pass that writes and, in
// the backward, half of them by the first pass, so that memory is busy in both.
template <class B, class T>
struct TilePacks {
  const Sizes& sizes;
  Lines<const T> lines;

  TilePacks(const SharedMemory&, const Tile<B>& tile, const Lines<const T>& lines)
      : sizes(tile.sizes), lines(lines) {}

  template <class Column, bool writes>
  LoadedPack<B, T> operator[](PackAt<Column, writes> at) const {
    const bool is_first_half = B::sums == 3 && 2 * at.column < at.end;
    if (B::channels_last || writes != is_first_half)
      prefetch_part<B>(lines.at(at.sample, later(at.line)), part_column<B>(at.column));
    return load_pack<B>(lines.at(at.sample, at.line), at.column, at.end);
  }

 private:
  index_t later(index_t line) const {
    const index_t count = B::channels_last ? sizes.positions : sizes.channels;
    const index_t next = line + (B::channels_last ? 32 : sizes.channels / sizes.groups);
    return next < count ? next : line;
  }
};

template <class B, class T>
struct TileOutput : OutputPack<B, T> {
  template <class Strip, class At>
  TileOutput(const Strip&, const Lines<T>& lines, At at)
      : OutputPack<B, T>(lines.at(at.sample, at.line), at.end) {}

  template <class At>
  void store(At at) const {
    OutputPack<B, T>::store(at.column);
  }
};

// What a thread that makes all passes over a group holds of it.
template <class B>
struct TileItems {
  Lines<typename B::dx_t> results;
  index_t group_channels, line_packs;
  Items<B>* packs = kept_packs<Items<B>, KEPT_H>();

  TileItems(const Tile<B>& tile, const Lines<typename B::dx_t>& results)
      : results(results),
        group_channels(tile.sizes.channels / tile.sizes.groups),
        line_packs((tile.sizes.positions + B::pack - 1) / B::pack) {}

  template <class At, class ItemAt, class F>
  Item<B> operator()(At at, ItemAt item, const F& f) const {
    if constexpr (KEPT_H > 0 && At::writes) return place(at)->item[item.index];
    const Item<B> v = f();
    if constexpr (KEPT_H > 0) {
      if (item.index % items_per_part<B> == 0)
        prefetch_output_part<B>(results.at(at.sample, at.line), part_column<B>(at.column));
      place(at)->item[item.index] = v;
    }
    return v;
  }

 private:
  template <class At>
  Items<B>* place(At at) const {
    return packs + at.line % group_channels * line_packs + at.column / B::pack;
  }
};

// What strips hand on: rows of sums of channels for each part of each sample; and what is found of
// each group of the launch.
template <class B>
struct GroupTeam {
  using C = typename B::compute_t;
  static constexpr int rows = 3;
  struct Scratch {};

  const Sizes& sizes;
  C *channels, *groups;

  GroupTeam(const Tile<B>& tile, const Scratch&, C* handed_on)
      : sizes(tile.sizes),
        channels(handed_on),
        groups(handed_on + rows * sizes.samples * sizes.parts * sum_pitch(sizes.channels)) {}

  C& of_group(int value, index_t group) const {
    return groups[value * sizes.samples * sizes.groups + group];
  }
  C* row(int value, index_t sample, index_t part) const {
    const index_t number = (value * sizes.samples + sample) * sizes.parts + part;
    return channels + number * sum_pitch(sizes.channels);
  }

  template <class Strip>
  ChannelItems<B> means(const Strip& strip, const Pack<ChannelItems<B>, 1>& sums) const {
    const C count = C(sizes.positions_of(strip.part));
    return for_channels<B>([&](int i) { return sums.item[0].item[i] / count; });
  }

  template <class Strip>
  void hand_on(const Strip& strip, const Pack<ChannelItems<B>, 2>& sums,
               const ChannelItems<B>& shift) const {
    store(strip, 0, sums.item[0]);
    store(strip, 1, sums.item[1]);
    store(strip, 2, shift);
  }
  template <class Strip, class T>
  void hand_on(const Strip& strip, const Pack<ChannelItems<B>, 3>& sums, const T* weight) const {
    for (int i = 0; i < 2; ++i) store(strip, i, weighted<B>(sums.item[i], strip.parameter(weight)));
    store(strip, 2, sums.item[2]);
  }

  template <class Strip>
  void store(const Strip& strip, const Pack<ChannelItems<B>, 3>& sums, int value, C* row) const {
    store(strip, sums.item[value], row);
  }
  template <class Strip, class Use>
  void for_each_channel(const Strip& strip, const Use& use) const {
    const index_t size = sizes.channels / sizes.groups, first = strip.sample * sizes.groups;
    const index_t count = B::channels_last ? B::pack : 1;
    const index_t end = std::min<index_t>(strip.channel + count, sizes.channels);
    for (index_t channel = strip.channel; channel < end; ++channel)
      use(channel, first + channel / size);
  }

 private:
  template <class Strip>
  void store(const Strip& strip, int value, const ChannelItems<B>& items) const {
    store(strip, items, row(value, strip.sample, strip.part));
  }
  template <class Strip>
  void store(const Strip& strip, const ChannelItems<B>& items, C* row) const {
    if constexpr (B::channels_last) {
      OutputPack<B, C, true> output(row, sizes.channels);
      for_each_item<B>(index_t(strip.channel), sizes.channels,
                       [&](auto at) { write(output, at, items.item[at.index]); });
      output.store(index_t(strip.channel));
    } else {
      row[strip.channel] = first_of(items.item[0]);
    }
  }
};

// A group, of whose parts those of each channel are combined.
template <class B>
struct Group {
  using C = fp64;  // there may be many
  struct Part {
    Pack<C, 3> values;
    C count, mean;  // of its elements, and of the first value over them
  };
  const GroupTeam<B>& team;
  index_t sample, number;  // in the launch, in the sample

  index_t group_channels() const { return team.sizes.channels / team.sizes.groups; }
  C elements() const { return C(group_channels() * team.sizes.positions); }
  index_t of_launch() const { return sample * team.sizes.groups + number; }
  index_t index() const { return team.sizes.first_sample * team.sizes.groups + of_launch(); }
  bool is_first_thread() const { return true; }
  bool is_of_first_part() const { return true; }
  void put(int value, C v) const { team.of_group(value, of_launch()) = typename B::compute_t(v); }

  Part part(index_t) const {
    return of_channel(0, number * group_channels(), C(team.sizes.positions_of(0)));
  }
  template <class Use>
  void for_each_part(const Use& use) const {
    const index_t first = number * group_channels(), end = first + group_channels();
    for (index_t part = 0; part < team.sizes.parts; ++part) {
      const C count = C(team.sizes.positions_of(part));
      for (index_t channel = first; channel < end; ++channel) use(of_channel(part, channel, count));
    }
  }

 private:
  Part of_channel(index_t part, index_t channel, C count) const {
    Part found = {{}, count};
    for (int i = 0; i < 3; ++i) found.values.item[i] = team.row(i, sample, part)[channel];
    found.mean = found.values.item[0] / count;
    return found;
  }
};

// use(group) for the groups of a block.
template <class B, class Use>
inline void for_each_group(const GroupTeam<B>& team, const Use& use) {
  const Sizes& sizes = team.sizes;
  const index_t shares = gridDim.x / sizes.samples, count = sizes.groups / shares;
  const index_t sample = blockIdx.x / shares, first = blockIdx.x % shares * count;
  for (index_t i = 0; i < count; ++i) use(Group<B>{team, sample, first + i});
}
