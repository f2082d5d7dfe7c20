// SPDX-License-Identifier: MIT
// The CPU's group_tile.cuh: a block's tile is either some groups of a sample, so that they stay in
// the core's caches, or all samples of a launch, whose strips threads share. A tile consists of
// strips: a strip is a pack of channels or, with channels first, one channel, at the positions of
// one part. Each strip hands on sums of each of its channels.
#pragma once
#include "group_items.cuh"

// Whether the channels of a line are whole packs. If so, half as much code is compiled.
#ifdef WHOLE_PACKS
inline constexpr bool whole_packs = true;
#else
inline constexpr bool whole_packs = false;
#endif

// Whether threads share the samples of a launch.
#ifdef SHARED_SAMPLES
inline constexpr bool shared_samples = true;
#else
inline constexpr bool shared_samples = false;
#endif

// Whether a pass reads an operand. If h (see group_items.cuh) is handed on, the last pass does not
// read an operand that only h needs.
template <class B, bool for_h, bool writes>
inline constexpr bool is_read = true;
template <class B>
inline constexpr bool is_read<B, true, true> = !handed_h<B>;

// The strips of a block.
template <class B>
struct Tile {
  const Sizes& sizes;

  explicit Tile(const Sizes& sizes) : sizes(sizes) {}

  // Returns a function of a strip: `of` itself, which computes its value again at each call.
  template <class Of>
  auto of_strips(const Of& of) const {
    return of;
  }
  template <class Visit>
  void for_each_strip(const Visit& visit) const {
    constexpr index_t step = B::channels_last ? B::pack : 1;
    const index_t strips = (sizes.channels + step - 1) / step;
    if constexpr (shared_samples) {
      for_each_share(sizes.samples * sizes.parts * strips, [&](index_t number) {
        const index_t rest = number / (B::channels_last ? strips : sizes.parts);
        if constexpr (B::channels_last)
          visit_strip(rest / sizes.parts, rest % sizes.parts, number % strips * step, visit);
        else
          visit_strip(rest / strips, number % sizes.parts, rest % strips, visit);
      });
    } else {
      const index_t blocks = sample_blocks(), sample = blockIdx.x / blocks;
      const index_t channels = sizes.channels / blocks, first = blockIdx.x % blocks * channels;
      for (index_t part = 0; part < sizes.parts; ++part)
        for (index_t channel = first; channel < first + channels; channel += step)
          visit_strip(sample, part, channel, visit);
    }
  }
  // Calls visit(sample, group) for the thread's groups.
  template <class Visit>
  void for_each_group(const Visit& visit) const {
    if constexpr (shared_samples) {
      for_each_share(sizes.samples * sizes.groups,
                     [&](index_t number) { visit(number / sizes.groups, number % sizes.groups); });
    } else {
      const index_t blocks = sample_blocks(), sample = blockIdx.x / blocks;
      const index_t groups = sizes.groups / blocks, first = blockIdx.x % blocks * groups;
      for (index_t i = 0; i < groups; ++i) visit(sample, first + i);
    }
  }

  index_t sample_blocks() const { return shared_samples ? 1 : gridDim.x / sizes.samples; }

 private:
  template <class Visit>
  static void for_each_share(index_t count, const Visit& visit) {
    const index_t last = count * (gang.thread + 1) / gang.threads;
    for (index_t i = count * gang.thread / gang.threads; i < last; ++i) visit(i);
  }
  template <class Visit>
  void visit_strip(index_t sample, index_t part, index_t channel, const Visit& visit) const {
    if (whole_packs || !B::channels_last || channel + B::pack <= sizes.channels)
      visit(Strip<B>{sizes, sample, part, channel});
    else if constexpr (!whole_packs && B::channels_last)
      visit(Strip<B, false>{sizes, sample, part, channel});
  }
};

// The items of a part of a pack (see memory.cuh), all loaded before one is used. Otherwise
// compilers would compute one after the other: they move no load across the store of an item of h.
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

// An operand's packs, which stay in memory, with their prefetches. With channels last, each pass
// prefetches packs that it will read. With channels first, the pass that writes prefetches the next
// group; in a backward each of the two passes prefetches half of the next group, so that memory is
// busy in both.
template <class B, class T, bool for_h = false>
struct TilePacks {
  const Sizes& sizes;
  Lines<const T> lines;

  TilePacks(const SharedMemory&, const Tile<B>& tile, const Lines<const T>& lines)
      : sizes(tile.sizes), lines(lines) {}

  template <class Column, bool writes>
  auto operator[](TilePackAt<Column, writes> at) const {
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

  // Hands on a shift for each channel, and the sums about it. The shift is the mean of a few
  // elements or, if this is too far from the mean of all elements, the mean of all. So the sum of
  // squares about the shift is at most one and a half times the sum of squares about the mean.
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
  template <class Strip, class Visit>
  void for_each_channel(const Strip& strip, const Visit& visit) const {
    const index_t size = sizes.channels / sizes.groups, first = strip.sample * sizes.groups;
    const index_t count = B::channels_last ? B::pack : 1;
    const index_t end = std::min<index_t>(strip.channel + count, sizes.channels);
    for (index_t channel = strip.channel; channel < end; ++channel)
      visit(channel, first + channel / size);
  }

 private:
  // Moves a shift to its channel's mean if 3 * sum^2 / count exceeds the sum of squares, or if the
  // sum is not finite. Returns whether any shift was moved. No channel affects another.
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

// A group. A Part is one channel of the group in one part of the sample.
template <class B>
struct Group {
  using C = fp64;  // there may be many parts
  struct Part {
    Pack<C, 3> values;
    C count, mean;  // the number of its elements; values.item[0] / count
  };
  const GroupTeam<B>& team;
  index_t sample, number;  // the sample in the launch, the group in the sample

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
  template <class Visit>
  void for_each_part(const Visit& visit) const {
    const index_t first = number * group_channels(), end = first + group_channels();
    for (index_t part = 0; part < team.sizes.parts; ++part) {
      const C count = C(team.sizes.positions_of(part));
      for (index_t channel = first; channel < end; ++channel)
        visit(of_channel(part, channel, count));
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

// Calls visit(group) for the thread's groups. Threads that share samples wait before and after.
template <class B, class Visit>
inline void for_each_group(const GroupTeam<B>& team, const Visit& visit) {
  if constexpr (shared_samples) gang.wait();
  team.tile.for_each_group(
      [&](index_t sample, index_t number) { visit(Group<B>{team, sample, number}); });
  if constexpr (shared_samples) gang.wait();
}
