// SPDX-License-Identifier: MIT
// A block's tile of a sample: one part (some positions) of one unit (some whole groups). The tile's
// packs are in shared memory. A thread has packs of the same channels at several positions. If a
// group has more channels than a block's threads can take, a part has only some of the channels.
//
// If one launch makes all passes, a cluster's blocks have the parts of a unit, and send each other
// their sums; else a launch stores its sums for the next launch. The CPU build replaces this file.
#pragma once
#include "group.cuh"
#include "reduce.cuh"

// One of the thread's packs. Every pack lies inside the tile.
struct TilePackAt {
  int index;
  bool live = true;
};

// The block's tile, as one of its threads sees it.
template <class B>
struct Tile {
  static constexpr int group_channels = B::channels / B::groups;
  static constexpr int unit_channels = group_channels * B::unit_groups;
  static constexpr int units = B::groups / B::unit_groups;  // per sample
  static constexpr int columns = B::channel_threads * (B::channels_last ? B::pack : 1);
  static constexpr int channel_parts = (unit_channels + columns - 1) / columns;  // per unit
  static constexpr int pack_positions = B::channels_last ? 1 : B::pack;
  static constexpr int step = B::position_threads * pack_positions;  // positions from pack to pack

  const Sizes& sizes;
  index_t sample;  // index in the launch
  int unit, part;
  int row, column;         // where the thread is in the tile
  index_t channel, first;  // the thread's first channel and position
  int packs;               // how many the thread has

  // Without FIND, tiles are taken backwards: the caches still have the tiles that were read last.
  __device__ explicit Tile(const Sizes& sizes) : sizes(sizes) {
    const unsigned block = B::find ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    unit = (one_launch<B> ? block / parts() : block) % units;
    part = one_launch<B> ? block % parts() : block / units % parts();
    sample = block / (units * parts());
    const int lane =
        B::channels_last ? threadIdx.x % B::channel_threads : threadIdx.x / B::position_threads;
    row = B::channels_last ? threadIdx.x / B::channel_threads : threadIdx.x % B::position_threads;
    column = lane * (B::channels_last ? B::pack : 1);
    const int channel_in_unit = first_column(part) + column;
    channel = index_t(unit) * unit_channels + channel_in_unit;
    const int before = row * pack_positions, length = positions(part);
    first = along(part) * sizes.part_positions + before;
    const bool has_packs =
        has_columns() && inside(channel_in_unit, unit_channels) && inside(before, length);
    packs = has_packs ? (length - before + step - 1) / step : 0;
  }

  // These describe a part: its index along the positions, its number of positions, its first column
  // in the unit, its number of channels, and the number of channels of each of its groups.
  __device__ static int along(int part) { return part / channel_parts; }
  __device__ int positions(int part) const { return int(sizes.positions_of(along(part))); }
  __device__ static int first_column(int part) { return part % channel_parts * columns; }
  __device__ static int channels(int part) {
    return min(unit_channels - first_column(part), columns);
  }
  __device__ static int channels_of_group(int part) { return min(group_channels, channels(part)); }

  // False for threads at the end of a block that have nothing to do.
  __device__ bool has_columns() const {
    return inside(row, B::position_threads) && inside(column, columns);
  }
  __device__ int parts() const {
    return one_launch<B> ? B::cluster : int(sizes.parts) * channel_parts;
  }
  __device__ index_t first_channel() const {
    return index_t(unit) * unit_channels + first_column(part);
  }
  __device__ index_t whole_sample() const { return sizes.first_sample + sample; }

  // The index of a group of the tile among the groups of all samples.
  __device__ index_t index_of(int group) const {
    return whole_sample() * sizes.groups + index_t(unit) * B::unit_groups + group;
  }
  // Where the part's row of partial sums begins.
  __device__ index_t row_of_sums() const {
    return (whole_sample() * sizes.parts + along(part)) * sum_pitch(sizes.channels);
  }

  // The address of one of the thread's packs in an operand.
  template <class T>
  __device__ T* address(const Lines<T>& lines, TilePackAt at) const {
    const index_t position = first + at.index * index_t(step);
    if constexpr (B::channels_last) return lines.at(whole_sample(), position) + channel;
    return lines.at(whole_sample(), channel) + position;
  }

  // The thread's share of a tile is one strip, so of(tile) is computed once.
  template <class Visit>
  __device__ void for_each_strip(Visit visit) const {
    visit(*this);
  }
  template <class Of>
  __device__ auto of_strips(Of of) const {
    return [found = of(*this)](const Tile&) { return found; };
  }
  // Waits for the copies, then calls f(pack) for at most `max_packs` of the thread's packs, from
  // index `from` on.
  template <class F>
  __device__ void for_each_pack(F f, int from = 0, int max_packs = 1 << 30) const {
    if constexpr (B::async_copies) async_wait<0>();
    const int to = min(packs, from + max_packs);
#pragma unroll 2
    for (int i = from; i < to; ++i) f(TilePackAt{i});
  }

  // Returns sums for each of the thread's channels; add(pack, sums) adds a pack to them. If
  // has_runs, runs of packs are summed separately, so that no chain of additions is long.
  template <int count, class Add>
  __device__ Pack<ChannelItems<B>, count> sums(Add add) const {
    constexpr int run = 16;
    ItemSums<B> sums[count];
    if constexpr (B::has_runs)
      for (int first = 0; first < packs; first += run) {
        ItemSums<B> recent[count];
        for_each_pack([&](TilePackAt at) { add(at, recent); }, first, run);
        unrolled<count>([&](int value) {
          unrolled<B::pack>(
              [&](int i) { sums[value].values.item[i] += recent[value].values.item[i]; });
        });
      }
    else
      for_each_pack([&](TilePackAt at) { add(at, sums); });
    Pack<ChannelItems<B>, count> found;
    unrolled<count>([&](int i) {
      if constexpr (B::channels_last)
        found.item[i] = sums[i].values;
      else
        found.item[i].item[0] = sums[i].result();
    });
    return found;
  }

  // Loads a parameter of the thread's channels.
  template <class T>
  __device__ auto parameter(const T* parameter) const {
    if constexpr (!present<T>) {
      return absent{};
    } else {
      Pack<T, B::channels_last ? B::pack : 1> loaded = {};
      if constexpr (B::channels_last)
        loaded = load_where<B>(packs > 0, parameter + channel);
      else if (packs > 0)
        loaded.item[0] = parameter[channel];
      return for_channels<B>([&](int i) { return convert<Item<B>>(loaded.item[i]); });
    }
  }

  // Returns value(group) for each of the thread's channels. Group 0 is the tile's first group.
  template <class Value>
  __device__ ChannelItems<B> of_groups(Value value) const {
    constexpr bool is_one = !B::channels_last || channel_parts > 1 || group_channels % B::pack == 0;
    ChannelItems<B> out = {};
    if (packs == 0) return out;
    const int in_unit = int(channel - index_t(unit) * unit_channels);
    const int group = in_unit / group_channels, left = (group + 1) * group_channels - in_unit;
    const auto one = value(group), next = is_one || left >= B::pack ? one : value(group + 1);
    return for_channels<B>([&](int i) {
      if constexpr (is_one || group_channels >= B::pack) return i < left ? one : next;
      return value((in_unit + i) / group_channels);
    });
  }
};

// An operand's packs in the tile: the constructor starts to copy them.
template <class B, class T, bool for_h = false>
struct TilePacks {
  SharedPacks<B, T> shared;

  __device__ TilePacks(SharedMemory& memory, const Tile<B>& tile, const Lines<const T>& lines)
      : shared(memory, B::reads ? int(tile.sizes.part_positions / Tile<B>::step) : 0) {
    if constexpr (!B::reads) return;
#pragma unroll 4
    for (int i = 0; i < tile.packs; ++i)
      shared.template copy<B::async_copies>(i, tile.address(lines, {i}));
    if constexpr (B::async_copies) async_commit();
  }
  __device__ LoadedPack<B, T> operator[](TilePackAt at) const {
    return shared.load_where(true, at.index);
  }
};

// A pack of an output.
template <class B, class T>
struct TileOutput : OutputPack<B, T> {
  __device__ TileOutput(const Tile<B>& tile, const Lines<T>& lines, TilePackAt at)
      : OutputPack<B, T>(tile.address(lines, at)) {}

  // Uses __stcg, because compilers may split a plain store into smaller ones.
  __device__ void store(TilePackAt) const {
    Words<B, T> words;
    memcpy(&words, &this->value, sizeof(words));
    auto* const to = reinterpret_cast<typename Words<B, T>::Word*>(this->row);
    unrolled<Words<B, T>::count>([&](int i) { __stcg(to + i, words.word[i]); });
  }
};

// Returns f() for an item. On a GPU every pass calls f again.
template <class B>
struct TileItems {
  template <class... T>
  __device__ TileItems(const Tile<B>&, const T&...) {}
  template <class F>
  __device__ Item<B> operator()(TilePackAt, ItemAt, F f) const {
    return f();
  }
};

// A block's threads: they sum over the tile, and find three values for each group in their part.
template <class B>
struct GroupTeam {
  using C = typename B::compute_t;
  using Values = Pack<C, 3>;
  template <int count>
  using Sums = Pack<ChannelItems<B>, count>;
  static constexpr int columns = Tile<B>::columns, group_channels = Tile<B>::group_channels;
  static constexpr bool is_cluster = one_launch<B> && B::cluster > 1;
  // The sums of the rows of threads are first reduced to `slices` rows.
  static constexpr int rows = B::position_threads, max_slices = rows < 16 ? rows : 16;
  static constexpr int spare = B::threads / columns;
  static constexpr int slices = spare < 1 ? 1 : spare < max_slices ? spare : max_slices;

  struct Scratch {
    C sums[B::sums][rows][columns];
    C means[B::unit_groups];
    C groups[3][B::unit_groups];
    Values parts[one_launch<B> ? B::cluster : 1][B::unit_groups];
    Arrivals arrivals;
  };
  static_assert(sizeof(Scratch) <= 48 << 10, "a kernel declares at most 48 KiB of shared memory");

  const Tile<B>& tile;
  Scratch& scratch;
  C* handed_on;  // values of each sample, group and part

  __device__ GroupTeam(const Tile<B>& tile, Scratch& scratch, C* handed_on)
      : tile(tile), scratch(scratch), handed_on(handed_on) {
    if constexpr (is_cluster) {
      if (threadIdx.x == 0) begin_arrivals(scratch.arrivals);
      cluster_begun();
      wait_for_cluster();
      if (threadIdx.x == 0) expect_arrivals(scratch.arrivals, sizeof(scratch.parts));
    }
  }

  __device__ C& of_group(int value, int group) const { return scratch.groups[value][group]; }

  // Hands on, for each group, its mean over the tile and its sums about that mean.
  template <class Add, class SumsAbout>
  __device__ void hand_on_moments(const Tile<B>& tile, const Add& add,
                                  const SumsAbout& sums_about) const {
    add_up(tile.template sums<1>(add));
    for_each_group([&](int group) {
      const C total = group_sums<1>(group, unweighted).item[0];
      const C count = C(tile.channels_of_group(tile.part) * tile.positions(tile.part));
      if (threadIdx.x % 32 == 0) scratch.means[group] = count > 0 ? total / count : 0;
    });
    __syncthreads();
    add_up(sums_about(tile.of_groups([&](int group) { return scratch.means[group]; })));
    for_each_group([&](int group) {
      const auto found = group_sums<2>(group, unweighted);
      send(group, Values{{found.item[0], found.item[1], scratch.means[group]}});
    });
  }
  // Hands on sums; the first two are multiplied by the weight.
  template <class T>
  __device__ void hand_on(const Tile<B>&, const Sums<3>& sums, const T* weight) const {
    add_up(sums);
    for_each_group([&](int group) { send(group, group_sums<3>(group, weight)); });
  }

  // Stores one sum of each channel, in the thread that for_each_channel chooses for the channel.
  __device__ void store(const Tile<B>& tile, const Sums<3>&, int value, C* row) const {
    for_each_channel(tile, [&](index_t channel, int) {
      C sum = 0;
      for (int slice = 0; slice < slices; ++slice)
        sum += scratch.sums[value][slice][channel - tile.first_channel()];
      row[channel] = sum;
    });
  }
  // Calls visit(channel, group) for the tile's channels, which are divided among the threads.
  template <class Visit>
  __device__ void for_each_channel(const Tile<B>& tile, Visit visit) const {
#pragma unroll 1
    for (int column = threadIdx.x; column < tile.channels(tile.part); column += B::threads)
      visit(tile.first_channel() + column, column / group_channels);
  }

  // Calls visit(group) for the tile's groups, each in one warp.
  template <class Visit>
  __device__ void for_each_group(Visit visit) const {
    for (int group = threadIdx.x / 32; group < B::unit_groups; group += B::threads / 32)
      visit(group);
  }
  // The values that a part handed on.
  __device__ Values* values_of(int group, int part) const {
    if constexpr (one_launch<B>) return &scratch.parts[part][group];
    const index_t of_launch = tile.index_of(group) - tile.sizes.first_sample * tile.sizes.groups;
    return reinterpret_cast<Values*>(handed_on) + of_launch * tile.parts() + part;
  }

 private:
  __device__ void send(int group, const Values& values) const {
    if constexpr (is_cluster) {
      if (const int lane = threadIdx.x % 32; inside(lane, B::cluster))
        unrolled<3>([&](int i) {
          cluster_send(values.item[i], &values_of(group, tile.part)->item[i], scratch.arrivals,
                       lane);
        });
    } else if (threadIdx.x % 32 == 0) {
      *values_of(group, tile.part) = values;
    }
  }

  // Reduces the threads' sums to `slices` sums of each column.
  template <int count>
  __device__ void add_up(const Sums<count>& sums) const {
    if (tile.has_columns())
      unrolled<count>([&](int value) {
        for_channels<B>([&](int i) {
          return scratch.sums[value][tile.row][tile.column + i] = sums.item[value].item[i];
        });
      });
    __syncthreads();
    for (int i = threadIdx.x; i < slices * columns; i += B::threads) {
      C total[count] = {};
      for (int row = i / columns; row < rows; row += slices)
        unrolled<count>([&](int value) { total[value] += scratch.sums[value][row][i % columns]; });
      unrolled<count>(
          [&](int value) { scratch.sums[value][i / columns][i % columns] = total[value]; });
    }
    __syncthreads();
  }
  static constexpr const absent* unweighted = nullptr;
  // Sums over a group's columns, in one warp. The first two sums are weighted.
  template <int count, class T>
  __device__ Pack<C, count> group_sums(int group, const T* weight) const {
    const int channels = tile.channels_of_group(tile.part);
    Pack<C, count> sums = {};
    for (int i = threadIdx.x % 32; i < slices * channels; i += 32) {
      const int column = group * channels + i % channels;
      C factor = 1;
      if constexpr (present<T>) factor = convert<C>(weight[tile.first_channel() + column]);
      unrolled<count>([&](int value) {
        const C sum = scratch.sums[value][i / channels][column];
        sums.item[value] += value < 2 ? factor * sum : sum;
      });
    }
    return warp_all_reduce<32>(sums);
  }
};

// A group of the tile. One warp combines the group's parts.
template <class B>
struct Group {
  using C = typename B::compute_t;
  struct Part {
    Pack<C, 3> values;
    C count, mean;  // the number of elements; values.item[0] / count
  };
  const GroupTeam<B>& team;
  int group, lane = threadIdx.x % 32;

  __device__ index_t index() const { return team.tile.index_of(group); }
  __device__ C elements() const { return C(Tile<B>::group_channels * team.tile.sizes.positions); }
  __device__ Part part(int number) const {
    const auto values = *team.values_of(group, number);
    const C count = C(team.tile.channels_of_group(number) * team.tile.positions(number));
    return {values, count, count > 0 ? values.item[0] / count : 0};
  }
  template <class Visit>
  __device__ void for_each_part(Visit visit) const {
    for (int i = lane; i < team.tile.parts(); i += 32) visit(part(i));
  }
  __device__ bool is_first_thread() const { return lane == 0; }
  __device__ bool is_of_first_part() const { return team.tile.part == 0; }
  __device__ void put(int value, C v) const { team.of_group(value, group) = v; }
};

// Waits for the values of all parts, then calls visit(group) for each group, in one warp. All
// threads see what visit stores.
template <class B, class Visit>
__device__ inline void for_each_group(const GroupTeam<B>& team, Visit visit) {
  if constexpr (GroupTeam<B>::is_cluster)
    wait_for_arrivals(team.scratch.arrivals, 0);
  else
    __syncwarp();
  team.for_each_group([&](int group) { visit(Group<B>{team, group}); });
  __syncthreads();
}
