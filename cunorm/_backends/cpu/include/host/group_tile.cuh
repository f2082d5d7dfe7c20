// SPDX-License-Identifier: MIT
// The CPU's group_tile.cuh: a tile is a strip of a part of a sample, one pack of channels wide or,
// with channels first, one channel. A block has all strips of some groups of a sample, which stay
// in the core's caches; or of all samples of the launch, and threads share it. Each strip hands on
// sums of each of its channels.
#pragma once
#include "group_items.cuh"

// The channels are a multiple of those of a pack: half of what there is to compile.
#ifdef WHOLE_PACKS
inline constexpr bool whole_packs = true;
#else
inline constexpr bool whole_packs = false;
#endif

// Threads share the samples of a launch.
#ifdef SHARED_SAMPLES
inline constexpr bool shared_samples = true;
#else
inline constexpr bool shared_samples = false;
#endif

// Whether a pass reads an operand: the last does not where h, which alone takes it, is handed on.
template <class B, bool for_h, bool writes>
inline constexpr bool is_read = true;
template <class B>
inline constexpr bool is_read<B, true, true> = !handed_h<B>;

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
    const index_t strips = (sizes.channels + step - 1) / step;
    if constexpr (shared_samples) {
      for_each_share(sizes.samples * sizes.parts * strips, [&](index_t number) {
        const index_t rest = number / (B::channels_last ? strips : sizes.parts);
        if constexpr (B::channels_last)
          use_strip(rest / sizes.parts, rest % sizes.parts, number % strips * step, use);
        else
          use_strip(rest / strips, number % sizes.parts, rest % strips, use);
      });
    } else {
      const index_t blocks = sample_blocks(), sample = blockIdx.x / blocks;
      const index_t channels = sizes.channels / blocks, first = blockIdx.x % blocks * channels;
      for (index_t part = 0; part < sizes.parts; ++part)
        for (index_t channel = first; channel < first + channels; channel += step)
          use_strip(sample, part, channel, use);
    }
  }
  // use(sample, group) for those of the thread.
  template <class Use>
  void for_each_group(const Use& use) const {
    if constexpr (shared_samples) {
      for_each_share(sizes.samples * sizes.groups,
                     [&](index_t number) { use(number / sizes.groups, number % sizes.groups); });
    } else {
      const index_t blocks = sample_blocks(), sample = blockIdx.x / blocks;
      const index_t groups = sizes.groups / blocks, first = blockIdx.x % blocks * groups;
      for (index_t i = 0; i < groups; ++i) use(sample, first + i);
    }
  }

  index_t sample_blocks() const { return shared_samples ? 1 : gridDim.x / sizes.samples; }

 private:
  template <class Use>
  static void for_each_share(index_t count, const Use& use) {
    const index_t last = count * (gang.thread + 1) / gang.threads;
    for (index_t i = count * gang.thread / gang.threads; i < last; ++i) use(i);
  }
  template <class Use>
  void use_strip(index_t sample, index_t part, index_t channel, const Use& use) const {
    if (whole_packs || !B::channels_last || channel + B::pack <= sizes.channels)
      use(Strip<B>{sizes, sample, part, channel});
    else if constexpr (!whole_packs && B::channels_last)
      use(Strip<B, false>{sizes, sample, part, channel});
  }
};

// A part of a pack, loaded before any item is used: the compiler moves no load over the store of an
// item that is kept, and would compute one item after the other.
template <class B>
struct LoadedPart {
  Items<B> items;

  template <class T, class At>
  LoadedPart(const LoadedPack<B, T>& pack, At at) {
    for_each_item<B>(at, [&](auto item) { items.item[item.slot] = read<B>(pack, item); });
  }
};
template <class B, class At>
inline Item<B> read(const LoadedPart<B>& loaded, At at) {
  return loaded.items.item[at.slot];
}

// An operand's packs, which lie in memory, and are prefetched: with channels last those that a pass
// comes to, with channels first those of the group that comes next, by the pass that writes and, in
// the backward, half of them by the first pass, so that memory is busy in both.
template <class B, class T, bool for_h = false>
struct TilePacks {
  const Sizes& sizes;
  Lines<const T> lines;

  TilePacks(const SharedMemory&, const Tile<B>& tile, const Lines<const T>& lines)
      : sizes(tile.sizes), lines(lines) {}

  template <class Column, bool writes>
  auto operator[](PackAt<Column, writes> at) const {
    const bool is_first_half = B::sums == 3 && 2 * at.column < at.end;
    if (is_read<B, for_h, writes> && (B::channels_last || writes != is_first_half))
      prefetch_part<B>(lines.at(at.sample, later(at.line)), part_column<B>(at.column));
    const auto pack = load_pack<B>(lines.at(at.sample, at.line), at.column, at.end);
    if constexpr (Column::is_whole)
      return LoadedPart<B>(pack, at);
    else
      return pack;
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

template <class B>
struct GroupTeam {
  using C = typename B::compute_t;
  struct Scratch {};

  const Tile<B>& tile;
  const Sizes& sizes;
  HandedOn<B> handed_on;

  GroupTeam(const Tile<B>& tile, const Scratch&, C* handed_on)
      : tile(tile), sizes(tile.sizes), handed_on{sizes, handed_on} {}

  C& of_group(int value, index_t group) const { return handed_on.of_group(value, group); }

  // Hands on sums about a shift for each channel, and the shifts: the means of a sample of the
  // strip or, where one is too far from the channel's mean, those means. As near as they are then,
  // the squares are at most half as large again as those about the mean.
  template <class Strip, class Add, class SumsAbout>
  void hand_on_moments(const Strip& strip, const Add& add, const SumsAbout& sums_about) const {
    const C count = C(sizes.positions_of(strip.part));
    auto shift = strip.sampled_mean(add);
    for (bool is_sampled = true;; is_sampled = false) {
      const auto sums = sums_about(shift);
      if (is_sampled && bring_near(shift, sums, count)) continue;
      for (int i = 0; i < 2; ++i) store(strip, i, sums.item[i]);
      store(strip, 2, shift);
      return;
    }
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
  // Moves shifts to the means if twice (sum / count)^2 is larger than the variance, or the sum is
  // not finite; returns whether there are some. Channels do not depend on others.
  static bool bring_near(ChannelItems<B>& shift, const Pack<ChannelItems<B>, 2>& sums, C count) {
    decltype(Item<B>{} > Item<B>{}) any_far = {};
    for (int i = 0; i < int(sizeof(shift) / sizeof(shift.item[0])); ++i) {
      const Item<B> sum = sums.item[0].item[i], mean = sum / count;
      const auto is_far = (3 * sum * mean > sums.item[1].item[i]) | (sum - sum != 0);
      shift.item[i] = math::select(is_far, shift.item[i] + mean, shift.item[i]);
      any_far |= is_far;
    }
    return simd::any((simd::Words)any_far);
  }

  template <class Strip>
  void store(const Strip& strip, int value, const ChannelItems<B>& items) const {
    store(strip, items, handed_on.row(value, strip.sample, strip.part));
  }
  template <class Strip>
  void store(const Strip& strip, const ChannelItems<B>& items, C* row) const {
    if constexpr (B::channels_last) {
      strip.for_each_part([&](auto part) {
        OutputPack<B, C, true> output(row, sizes.channels);
        for_each_item<B>(part, sizes.channels,
                         [&](auto at) { write(output, at, items.item[at.index]); });
        output.store(part);
      });
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
    for (int i = 0; i < 3; ++i) found.values.item[i] = team.handed_on.row(i, sample, part)[channel];
    found.mean = found.values.item[0] / count;
    return found;
  }
};

// use(group), when all have found the sums of their strips; then all wait for each other again.
template <class B, class Use>
inline void for_each_group(const GroupTeam<B>& team, const Use& use) {
  if constexpr (shared_samples) gang.wait();
  team.tile.for_each_group(
      [&](index_t sample, index_t number) { use(Group<B>{team, sample, number}); });
  if constexpr (shared_samples) gang.wait();
}
