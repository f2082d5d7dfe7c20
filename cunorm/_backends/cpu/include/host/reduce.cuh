// SPDX-License-Identifier: MIT
// The CPU's reduce.cuh: reductions by one thread, or by several threads that share a row. The parts
// of a row are combined in order, so no result depends on whether rows are shared.
#pragma once
#include "memory.cuh"
#include "ptx.cuh"

// In the first pass over a row, a chunk has at most 4 packs and is called a run. In the second
// pass, a chunk has at most 16 packs. A part of a row is 8 chunks of the second pass.
inline constexpr int run_packs = 4, chunk_packs = 16, part_chunks = 8;

// Whether a row is one run, of at most 8 packs, of which none is cut.
#ifdef ONE_RUN
inline constexpr bool one_run = true;
#else
inline constexpr bool one_run = false;
#endif

// Reduces over a run: value i is the result over item i of all packs. Runs are short, because if
// equal numbers are added to a larger sum, all roundings may have the same direction.
template <class B, class Op = Sum>
struct ItemReduction {
  using Operation = Op;
  Pack<Item<B>, items_per_pack<B>> values = {};
  bool is_cut = false;  // whether the run is a pack that the row's end cuts

  template <class At>
  void add(At at, Item<B> v) {
    is_cut = same_type<At, CutItem>;
    values.item[at.slot] = Op::of(values.item[at.slot], v);
  }
  template <class At>
  void add_product(At at, Item<B> a, Item<B> b) {
    static_assert(same_type<Op, Sum>, "add_product is only for sums");
    is_cut = same_type<At, CutItem>;
    values.item[at.slot] = fma(a, b, values.item[at.slot]);
  }
  // Returns the result over all items, and overwrites the values.
  typename B::compute_t result() {
    fold<1>();
    return simd::reduce<Op>(values.item[0]);
  }
  // Combines the upper and the lower half of the values until `left` are left.
  template <int left, int count = items_per_pack<B>>
  void fold() {
    if constexpr (count > left) {
      constexpr int half = count / 2;
      unrolled<half>(
          [&](int i) { values.item[i] = Op::of(values.item[i + half], values.item[i]); });
      fold<left, half>();
    }
  }
};
template <class B>
using ItemSums = ItemReduction<B>;

// Whether the first chunk has one pack only: in a centered forward, and only there.
template <class B, class = void>
inline constexpr bool begins_with_pack = false;
template <class B>
inline constexpr bool
    begins_with_pack<B, std::enable_if_t<B::center, std::void_t<typename B::y_t>>> = true;

// The items of 16 lanes, over which rows are reduced.
template <class B>
inline constexpr int lane_items =
    std::min(items_per_pack<B>, std::max(1, 16 / simd::lanes<typename B::compute_t>));

// Reduces over a row: over the runs of each part, in 16 lanes, then over the lanes, then over the
// parts. A row has the same parts whether or not threads share it (`Row` in row_walk.cuh).
template <class B, class Op = Sum, bool = one_run>
struct RowReduction {
  using Operation = Op;
  using C = typename B::compute_t;
  static constexpr int items = lane_items<B>;
  static constexpr int chunk_runs = chunk_packs / run_packs, part_runs = part_chunks * chunk_runs;
  Pack<Accumulator<Op, Item<B>>, items> lanes;
  Accumulator<Op, C> parts_before;
  int runs = part_runs;  // of the current part; a first chunk of one pack counts as chunk_runs
  index_t part = -1;
  C* parts = nullptr;  // values of the parts of a shared row

  RowReduction() {
    if constexpr (shared_rows) parts = gang.ring<C>();
  }

  void add(ItemReduction<B, Op>& run) {
    if (shared_rows && gang.part < 0) return;
    run.template fold<items>();
    if (shared_rows ? gang.part != part : runs > part_runs - (run.is_cut ? chunk_runs : 1)) {
      end_part();
      part = shared_rows ? gang.part : part + 1;
      runs = begins_with_pack<B> && part == 0 ? chunk_runs : 1;
      unrolled<items>([&](int i) { lanes.item[i] = {run.values.item[i]}; });
    } else {
      ++runs;
      unrolled<items>([&](int i) { lanes.item[i].add(run.values.item[i]); });
    }
  }
  // Keeps the current part's result. If threads share rows, all_reduce ends a thread's last part.
  void end_part() {
    if (part < 0) return;
    if constexpr (shared_rows)
      parts[part] = part_value();
    else
      parts_before.add(part_value());
  }

  // For a shared row, call it after all threads have waited for each other.
  C result() const {
    if (!shared_rows && part == 0) return part_value();
    Accumulator<Op, C> row = parts_before;
    if constexpr (shared_rows)
      for (index_t i = 0; i < gang.parts; ++i) row.add(parts[i]);
    else
      row.add(part_value());
    return row.value;
  }

 private:
  C part_value() const {
    ItemReduction<B, Op> found;
    unrolled<items>([&](int i) { found.values.item[i] = lanes.item[i].value; });
    found.template fold<1, items>();
    return simd::reduce<Op>(found.values.item[0]);
  }
};

// A row of one run, whose first pack may be a run of its own.
template <class B, class Op>
struct RowReduction<B, Op, true> {
  using Operation = Op;
  ItemReduction<B, Op> lanes;

  void add(ItemReduction<B, Op>& run) {
    run.template fold<lane_items<B>>();
    unrolled<lane_items<B>>([&](int i) {
      Item<B>& lane = lanes.values.item[i];
      lane = Op::of(lane, run.values.item[i]);
    });
  }
  typename B::compute_t result() const {
    ItemReduction<B, Op> found = lanes;
    found.template fold<1, lane_items<B>>();
    return simd::reduce<Op>(found.values.item[0]);
  }
};
template <class B>
using RowSum = RowReduction<B>;

template <int threads, class Op = Sum, class C, int n>
inline Pack<C, n> warp_all_reduce(Pack<C, n> v) {
  return v;
}

template <class B>
struct Team {
  using C = typename B::compute_t;
  static constexpr int blocks = 1;
  struct Scratch {};

  explicit Team(Scratch&) {}

  int thread() const { return shared_rows ? gang.thread : 0; }
  // Returns the results over a row, from all threads that share it.
  template <class... Reductions>
  Pack<C, sizeof...(Reductions)> all_reduce(Reductions&... reductions) const {
    if constexpr (shared_rows) {
      (reductions.end_part(), ...);
      gang.wait();
    }
    return {{reductions.result()...}};
  }
};
