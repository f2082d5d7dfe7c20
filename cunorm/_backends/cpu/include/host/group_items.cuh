// SPDX-License-Identifier: MIT
// The values that one pass over groups hands on to the next: sums, factors of groups, and in some
// backwards h (the gradient before the activation), so that the last pass need not compute it.
#pragma once
#include "caches.h"
#include "group_strip.cuh"

// KEPT_H: how many packs of h a thread keeps for its groups. HANDED_H: whether the workspace has
// room for h of all samples of a launch.
#ifndef KEPT_H
#define KEPT_H 0
#endif
#ifndef HANDED_H
#define HANDED_H false
#endif

// Whether the workspace hands on h: only where this is quicker than computing h again (measured).
template <class B>
inline constexpr bool handed_h =
    HANDED_H && (simd::bytes < 64 || sizeof(typename B::dy_t) < sizeof(typename B::compute_t) ||
                 same_type<typename B::activation, activations::gelu>);

template <class B>
struct Tile;

// The workspace: for each part of each sample, rows of sums of the channels; then factors of each
// group of the launch; then items of h.
template <class B>
struct HandedOn {
  using C = typename B::compute_t;
  static constexpr int values = 3;
  const Sizes& sizes;
  C* rows;

  C* row(int value, index_t sample, index_t part) const {
    const index_t number = (value * sizes.samples + sample) * sizes.parts + part;
    return rows + number * sum_pitch(sizes.channels);
  }
  C& of_group(int value, index_t group) const {
    return row(values, 0, 0)[value * sizes.samples * sizes.groups + group];
  }
  C* items() const {
    const auto end = reinterpret_cast<uintptr_t>(&of_group(values, 0));
    return reinterpret_cast<C*>((end + cache_line - 1) / cache_line * cache_line);
  }
};

// Items of h. The last pass reads the items that the first pass kept, or computes them again.
template <class B>
struct TileItems {
  static constexpr bool in_thread = KEPT_H > 0, kept = in_thread || handed_h<B>;
  static_assert(!kept || (B::find && B::write), "the last pass reads what the first pass keeps");
  const Sizes& sizes;
  Lines<typename B::dx_t> results;
  index_t block_channels, line_packs;
  Items<B>* packs = kept_packs<Items<B>, KEPT_H>();

  TileItems(const Tile<B>& tile, const Lines<typename B::dx_t>& results,
            typename B::compute_t* handed_on)
      : sizes(tile.sizes),
        results(results),
        block_channels(sizes.channels / tile.sample_blocks()),
        line_packs(((B::channels_last ? sizes.channels : sizes.positions) + B::pack - 1) /
                   B::pack) {
    if constexpr (handed_h<B>)
      packs = reinterpret_cast<Items<B>*>(HandedOn<B>{sizes, handed_on}.items());
  }

  template <class At, class ItemAt, class F>
  Item<B> operator()(At at, ItemAt item, const F& f) const {
    if constexpr (kept && At::writes) return kept_items(at)->item[item.index];
    const Item<B> v = f();
    if constexpr (in_thread)
      if (item.index % items_per_part<B> == 0)
        prefetch_output_part<B>(results.at(at.sample, at.line), part_column<B>(at.column));
    if constexpr (kept) kept_items(at)->item[item.index] = v;
    return v;
  }

 private:
  template <class At>
  Items<B>* kept_items(At at) const {
    index_t line = at.line;
    if constexpr (handed_h<B>)
      line +=
          (at.sample - sizes.first_sample) * (B::channels_last ? sizes.positions : sizes.channels);
    else if constexpr (!B::channels_last)
      line %= block_channels;
    return packs + line * line_packs + at.column / B::pack;
  }
};
