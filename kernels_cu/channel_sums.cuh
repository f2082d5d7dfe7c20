// SPDX-License-Identifier: MIT
// Sums over the positions of a tile, one for each of its channels, and what a pass over a sample
// hands on to the next.
#pragma once
#include "group.cuh"

// One thread's sum over its packs.
template <class B>
struct LaneSum {
  ItemSums<B> chunk;
  RowSum<B> row;

  template <class At>
  __device__ void add(At at, Item<B> v) {
    chunk.add(at, v);
  }
  template <class At>
  __device__ void add_product(At at, Item<B> a, Item<B> b) {
    chunk.add_product(at, a, b);
  }
  __device__ void end_chunk() {
    row.add(chunk);
    chunk = {};
  }
  __device__ typename B::compute_t value() const { return row.value(); }
};

// One thread's sums, one for each item of its packs, of which a part has few.
template <class B>
struct ItemSum {
  Items<B> run = {};
  Pack<RunSum<B, Item<B>>, items_per_pack<B>> total = {};

  template <class At>
  __device__ void add(At at, Item<B> v) {
    run.item[at.index] += v;
  }
  template <class At>
  __device__ void add_product(At at, Item<B> a, Item<B> b) {
    run.item[at.index] = fma(a, b, run.item[at.index]);
  }
  __device__ void end_chunk() {
    unrolled<items_per_pack<B>>([&](int i) {
      total.item[i].add(run.item[i]);
      run.item[i] = Item<B>{};
    });
  }
  __device__ Items<B> value() const {
    Items<B> out;
    unrolled<items_per_pack<B>>([&](int i) { out.item[i] = total.item[i].sum; });
    return out;
  }
};

// One thread's sums for its channels.
template <class B>
using ChannelSum = either<B::channels_last, ItemSum<B>, LaneSum<B>>;

// What the threads of a block exchange: with channels last a row of sums from each of those that
// share channels; with channels first a sum from each of their warps, two halves used in turn.
template <class B>
struct ChannelScratch {
  using C = typename B::compute_t;
  static constexpr int rows = B::channels_last           ? B::position_threads
                              : B::position_threads > 32 ? B::position_threads / 32
                                                         : 1;
  static constexpr int halves = B::channels_last ? 1 : 2;
  C sums[halves][rows][Extent<B>::tile_channels];
  C totals[B::channels_last ? Extent<B>::tile_channels : 1];
};

// The sums over the threads that have the same channels; each of them gets those of its own.
template <class B>
struct ChannelTeam {
  using C = typename B::compute_t;
  ChannelScratch<B>& scratch;
  int turn = 0;

  __device__ explicit ChannelTeam(ChannelScratch<B>& scratch) : scratch(scratch) {}

  // Whether the thread is the one that stores what belongs to its channels.
  __device__ bool is_first() const { return position_thread<B>() == 0; }

  __device__ ChannelItems<B> all_reduce(const ChannelSum<B>& sum) {
    if constexpr (!B::channels_last)
      return {{spread<B>(all_reduce_channel(sum.value()))}};
    else if constexpr (B::position_threads == 1)
      return sum.value();
    else
      return all_reduce_columns(sum.value());
  }

 private:
  __device__ C all_reduce_channel(C v) {
    constexpr int lanes = B::position_threads > 32 ? 32 : B::position_threads;
    constexpr int warps = B::position_threads / lanes;
    if constexpr (lanes > 1) v = warp_all_reduce<lanes>(Pack<C, 1>{{v}}).item[0];
    if constexpr (warps > 1) {
      auto& sums = scratch.sums[turn++ % 2];
      const int channel = threadIdx.x / B::position_threads, warp = threadIdx.x / 32 % warps;
      if (threadIdx.x % 32 == 0) sums[warp][channel] = v;
      __syncthreads();
      v = 0;
#pragma unroll
      for (int i = 0; i < warps; ++i) v += sums[i][channel];
    }
    return v;
  }

  __device__ Items<B> all_reduce_columns(const Items<B>& v) {
    constexpr int columns = Extent<B>::tile_channels;
    const int row = threadIdx.x / B::channel_threads;
    const int column = threadIdx.x % B::channel_threads * B::pack;
    auto& sums = scratch.sums[0];
    if (row < B::position_threads)
      unrolled<B::pack>([&](int i) { sums[row][column + i] = v.item[i]; });
    __syncthreads();
    for (int i = threadIdx.x; i < columns; i += B::threads) {
      double total = 0;  // a long chain
      for (int other = 0; other < B::position_threads; ++other) total += sums[other][i];
      scratch.totals[i] = C(total);
    }
    __syncthreads();
    Items<B> out;
    unrolled<B::pack>([&](int i) { out.item[i] = scratch.totals[column + i]; });
    return out;
  }
};

// Numbers that a pass hands on to the next one: in shared memory where a block of several threads
// makes both, else in global memory.
template <class B>
inline constexpr bool in_shared_memory = one_pass<B> && kept<B>;

// Three numbers for each channel of each part, and three for each group.
template <class B>
struct HandedOn {
  using C = typename B::compute_t;
  static constexpr int values = 3;
  struct Scratch {
    C channels[in_shared_memory<B> ? values * Extent<B>::tile_channels : 1];
    C groups[in_shared_memory<B> ? values * Extent<B>::tile_channels : 1];
  };

  const Extent<B>& extent;
  C *channels, *groups;

  __device__ HandedOn(const Extent<B>& extent, C* in_global_memory, Scratch& scratch)
      : extent(extent) {
    if constexpr (in_shared_memory<B>) {
      channels = scratch.channels;
      groups = scratch.groups;
    } else {
      channels = in_global_memory;
      groups = in_global_memory + values * extent.samples * extent.parts() * pitch();
    }
  }

  // The row of channels of one of the values.
  __device__ C* row(int value, index_t sample, index_t part) const {
    if constexpr (in_shared_memory<B>)
      return channels + value * Extent<B>::tile_channels;
    else
      return channels + ((value * extent.samples + sample) * extent.parts() + part) * pitch();
  }
  __device__ C load(int value, index_t sample, index_t part, index_t channel) const {
    return row(value, sample, part)[in_row(channel)];
  }
  // A thread's values of its channels.
  template <class Strip>
  __device__ void store(int value, const Strip& strip, const ChannelItems<B>& v) const {
    C* const place = row(value, strip.tile.sample, strip.tile.part) + in_row(strip.channel);
    if constexpr (B::channels_last && !in_shared_memory<B>)
      store_items<B>(place - strip.channel, strip.channel, extent.channels, v);
    else if (!strip.has_channels())
      return;
    else if constexpr (in_shared_memory<B>)
      unrolled<int(sizeof(v) / sizeof(C))>([&](int i) { place[i] = v.item[i]; });
    else
      *place = first_of(v.item[0]);
  }

  __device__ C load_group(int value, index_t sample, index_t group) const {
    return *group_place(value, sample, group);
  }
  __device__ void store_group(int value, index_t sample, index_t group, C v) const {
    *group_place(value, sample, group) = v;
  }

 private:
  __device__ index_t pitch() const { return sum_pitch(extent.channels); }
  __device__ static index_t in_row(index_t channel) {
    return in_shared_memory<B> ? channel % Extent<B>::tile_channels : channel;
  }
  __device__ C* group_place(int value, index_t sample, index_t group) const {
    if constexpr (in_shared_memory<B>)
      return groups + value * extent.block_groups + group % extent.block_groups;
    else
      return groups + (value * extent.samples + sample) * extent.groups + group;
  }
};

// The packs that a thread keeps of its tile, as loaded; on the CPU none.
template <class B, class Loaded>
struct TilePacks {
  Loaded packs[kept<B> ? B::packs : 1];

  // use(column, end, pack) for each pack, which load(line, column, end) gives.
  template <class Strip, class Load, class Use, class EndChunk>
  __device__ void load_each(const Strip& strip, Load load, Use use, EndChunk end_chunk) {
    if constexpr (kept<B>)
      strip.for_each_pack([&](int i, index_t line, auto column,
                              index_t end) { packs[i] = load(line, column, end); },
                          NoEndChunk{});
    next_pass(strip, load, use, end_chunk);
  }
  // The pass that writes, which another launch than the first has to load for.
  template <class Strip, class Load, class Use>
  __device__ void last_pass(const Strip& strip, Load load, Use use) {
    if constexpr (B::find)
      next_pass(strip, load, use);
    else
      load_each(strip, load, use, NoEndChunk{});
  }
  template <class Strip, class Load, class Use, class EndChunk = NoEndChunk>
  __device__ void next_pass(const Strip& strip, Load load, Use use, EndChunk end_chunk = {}) const {
    strip.for_each_pack(
        [&](int i, index_t line, auto column, index_t end) {
          if constexpr (kept<B>)
            use(line, column, end, packs[i]);
          else
            use(line, column, end, load(line, column, end));
        },
        end_chunk);
  }
};

// use(part, channel) for the thread's share of the channels of a group, in all parts.
template <class T, class Use>
__device__ inline void for_each_part(const T& team, index_t parts, index_t channels, Use use) {
  if constexpr (T::threads == 1) {
    for (index_t part = 0; part < parts; ++part)
      for (index_t channel = 0; channel < channels; ++channel) use(part, channel);
  } else {
    for (index_t i = team.thread(); i < parts * channels; i += T::threads)
      use(i / channels, i % channels);
  }
}
