// SPDX-License-Identifier: MIT
// A strip: a pack of channels or, with channels first, one channel, at the positions of one part of
// a sample. Its packs form runs, whose sums are added up by Kahan's summation.
#pragma once
#include "group.cuh"
#include "reduce.cuh"

template <class Column, bool writes_>
struct TilePackAt {
  static constexpr bool writes = writes_;  // whether this pass writes
  index_t sample, line;
  Column column;
  index_t end;  // of the line
};
template <class B, class Column, bool writes, class F>
inline void for_each_item(TilePackAt<Column, writes> at, const F& f) {
  for_each_item<B>(at.column, at.end, f);
}

// A sum over runs of packs for each channel of a strip.
template <class B>
struct LineSum {
  Pack<Accumulator<Sum, Item<B>>, items_per_pack<B>> total = {};

  void add(ItemSums<B>& run, int part) {
    Accumulator<Sum, Item<B>>* const totals = total.item + part * items_per_part<B>;
    unrolled<items_per_part<B>>([&](int i) { totals[i].add(run.values.item[i]); });
  }
  Items<B> value() const {
    return for_channels<B>([&](int i) { return total.item[i].value; });
  }
};
template <class B>
struct ColumnSum : RowSum<B> {
  void add(ItemSums<B>& run, int) { RowSum<B>::add(run); }
  ChannelItems<B> value() const { return {{broadcast<B>(RowSum<B>::result())}}; }
};
template <class B>
using ChannelSum = either<B::channels_last, LineSum<B>, ColumnSum<B>>;

// A strip. Groups are numbered consecutively through all samples of a launch.
template <class B, bool is_whole = true>
struct Strip {
  using Part = CountedPart<is_whole>;  // a part of a pack of channels
  struct FirstPart : Part {
    index_t line;
  };
  const Sizes& sizes;
  index_t sample, part;  // sample: index in the launch
  index_t channel;

  index_t index_of(index_t group) const { return sizes.first_sample * sizes.groups + group; }
  index_t whole_sample() const { return sizes.first_sample + sample; }
  index_t row_of_sums() const {
    return (whole_sample() * sizes.parts + part) * sum_pitch(sizes.channels);
  }

  // Calls f(pack) for each pack, in the pass that writes.
  template <class F>
  void for_each_pack(const F& f) const {
    for_each_run<true>([&](auto first, index_t end) { for_each_pack_of<true>(first, end, f); });
  }
  template <int count, class Add>
  Pack<ChannelItems<B>, count> sums(const Add& add) const {
    ChannelSum<B> totals[count];
    for_each_run<false>([&](auto first, index_t end) {
      ItemSums<B> sums[count];
      for_each_pack_of<false>(first, end, [&](auto at) { add(at, sums); });
      unrolled<count>([&](int i) { totals[i].add(sums[i], first.part); });
    });
    Pack<ChannelItems<B>, count> found;
    unrolled<count>([&](int i) { found.item[i] = totals[i].value(); });
    return found;
  }

  // The mean of a few positions of each channel or, with channels first, of a few packs of
  // positions, which are evenly spaced. Mostly, a mean of 32 elements differs from the mean of all
  // by less than a fifth of the standard deviation.
  template <class Add>
  ChannelItems<B> sampled_mean(const Add& add) const {
    const index_t first = part * sizes.part_positions, positions = sizes.positions_of(part);
    if constexpr (B::channels_last) {
      const index_t step = sample_step(positions, 32);
      const auto count = typename B::compute_t((positions + step - 1) / step);
      Items<B> mean;
      for_each_part([&](Part at) {
        ItemSums<B> sums[1];
        for (index_t line = first; line < first + positions; line += step)
          add(TilePackAt<Part, false>{whole_sample(), line, at, sizes.channels}, sums);
        for (int i = 0; i < items_per_part<B>; ++i)
          mean.item[at.part * items_per_part<B> + i] = sums[0].values.item[i] / count;
      });
      return mean;
    } else {
      const index_t packs = positions / B::pack, step = sample_step(packs, 4);
      const auto count =
          typename B::compute_t(packs == 0 ? positions : (packs + step - 1) / step * B::pack);
      ItemSums<B> sums[1];
      const auto add_up = [&](auto at) { add(at, sums); };
      for (index_t pack = 0; pack < packs; pack += step)
        visit_column<false>(WholeColumn<>{first + pack * B::pack}, add_up);
      if (packs == 0) visit_column<false>(CutColumn<>{first}, add_up);
      return {{broadcast<B>(sums[0].result() / count)}};
    }
  }

  template <class T>
  auto parameter(const T* parameter) const {
    if constexpr (!present<T>) {
      return absent{};
    } else if constexpr (B::channels_last) {
      Items<B> out = {};
      const auto pack = load_pack<B>(parameter, channel, sizes.channels);
      for_each_part([&](auto part) {
        for_each_item<B>(part, sizes.channels,
                         [&](auto at) { out.item[at.index] = read<B>(pack, at); });
      });
      return out;
    } else {
      const auto value = convert<typename B::compute_t>(parameter[channel]);
      return ChannelItems<B>{{broadcast<B>(value)}};
    }
  }

  // Calls f(part) for the parts of a pack of channels.
  template <class F>
  void for_each_part(const F& f) const {
#pragma GCC unroll 1
    for (int part = 0; part < parts_per_pack<B>; ++part) f(Part{channel, part});
  }
  template <class Value>
  ChannelItems<B> of_groups(const Value& value) const {
    const index_t size = sizes.channels / sizes.groups, first = sample * sizes.groups;
    if constexpr (!B::channels_last) {
      return {{broadcast<B>(value(first + channel / size))}};
    } else {
      typename B::compute_t values[B::pack] = {}, found = 0;
      const index_t count = std::min<index_t>(B::pack, sizes.channels - channel);
      index_t group = channel / size, end = 0;  // the element at which the next group begins
      for (index_t i = 0; i < count; ++i) {
        if (i == end) {
          found = value(first + group++);
          end = group * size - channel;
        }
        values[i] = found;
      }
      ChannelItems<B> out;
      std::memcpy(&out, values, sizeof(out));
      return out;
    }
  }

 private:
  // The distance between sampled packs, so that at least `least` packs, or all, are sampled.
  static index_t sample_step(index_t packs, int least) {
    return std::max<index_t>(1, (packs - 1) / (least - 1));
  }

  // Calls f(first, end) for runs of packs. With channels last, `first` and `end` are lines, and a
  // run has the same part of each pack, so that a loop has few sums. With channels first, `first`
  // and `end` are columns.
  template <bool writes, class F>
  void for_each_run(const F& f) const {
    const index_t first = part * sizes.part_positions, end = first + sizes.positions_of(part);
    constexpr index_t step = (writes ? chunk_packs : run_packs) * (B::channels_last ? 1 : B::pack);
    if constexpr (B::channels_last) {
      for (index_t line = first; line < end; line += step)
        for_each_part([&](Part at) { f(FirstPart{at, line}, std::min(line + step, end)); });
    } else {
      const index_t whole = first + (end - first) / B::pack * B::pack;
      for (index_t column = first; column < whole; column += step)
        f(WholeColumn<>{column}, std::min(column + step, whole));
      if (whole < end) f(CutColumn<>{whole}, end);
    }
  }
  template <bool writes, class First, class F>
  void for_each_pack_of(First first, index_t end, const F& f) const {
    if constexpr (B::channels_last)
      for (index_t line = first.line; line < end; ++line)
        f(TilePackAt<Part, writes>{whole_sample(), line, first, sizes.channels});
    else
      visit_columns<writes>(first, First::is_whole ? end : first.column + 1, f);
  }
  template <bool writes, class Column, class F>
  void visit_columns(Column first, index_t end, const F& f) const {
    for (Column at = first; at.column < end; at.column += B::pack) visit_column<writes>(at, f);
  }
  template <bool writes, class Column, class F>
  void visit_column(Column at, const F& f) const {
    f(TilePackAt<Column, writes>{whole_sample(), channel, at, sizes.positions});
    if constexpr (Column::part + 1 < parts_per_pack<B>)
      visit_column<writes>(typename Column::Next{at.column}, f);
  }
};
