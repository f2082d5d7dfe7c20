// SPDX-License-Identifier: MIT
// The CPU's reduce.cuh: reductions by one thread, or by several threads that share a row. The parts
// of a row are combined in order, so no result depends on whether rows are shared.
#pragma once
#include "memory.cuh"
#include "ptx.cuh"

// Reduces over a chunk of at most 16 packs: value i is the result over item i of all packs.
inline constexpr int chunk_packs = 16, part_chunks = 8;
template <class B, class Op = Sum>
struct ItemReduction {
  using Operation = Op;
  Identities<Op, Item<B>, items_per_pack<B>> values = {};

  template <class At>
  void add(At at, Item<B> v) {
    values.item[at.slot] = Op::of(values.item[at.slot], v);
  }
  template <class At>
  void add_product(At at, Item<B> a, Item<B> b) {
    static_assert(same_type<Op, Sum>, "a product is added");
    values.item[at.slot] = fma(a, b, values.item[at.slot]);
  }
  // Returns the result over all items. It overwrites the values.
  typename B::compute_t result() {
    fold<items_per_pack<B> / 2>();
    return simd::reduce<Op>(values.item[0]);
  }

 private:
  template <int half>
  void fold() {
    unrolled<half>([&](int i) { values.item[i] = Op::of(values.item[i + half], values.item[i]); });
    if constexpr (half > 1) fold<half / 2>();
  }
};
template <class B>
using ItemSums = ItemReduction<B>;

// Reduces over a row: first over the chunks of each part, then over the parts. If a row has one
// part, the part's value is the result.
template <class B, class Op = Sum>
struct RowReduction {
  using Operation = Op;
  using C = typename B::compute_t;
  Accumulator<Op, C> recent, parts_before;
  int chunks = 0;
  index_t part = -1;
  C* parts = nullptr;  // values of the parts of a shared row

  RowReduction() {
    if constexpr (shared_rows) parts = gang.ring<Op, C>();
  }

  void add(ItemReduction<B, Op>& chunk) {
    const C v = chunk.result();
    if constexpr (shared_rows) {
      if (gang.part < 0) return;
      if (part != gang.part) recent = {};
      part = gang.part;
      recent.add(v);
      parts[part] = recent.value;
    } else if (chunks++ == 0) {
      recent.value = v;
    } else {
      if ((chunks - 1) % part_chunks == 0) {
        parts_before.add(recent.value);
        recent = {};
      }
      recent.add(v);
    }
  }

  // For a shared row, call it after all threads have waited for each other.
  C result() const {
    if (!shared_rows && chunks <= part_chunks) return recent.value;
    Accumulator<Op, C> row = parts_before;
    if constexpr (shared_rows)
      for (index_t i = 0; i < gang.parts; ++i) row.add(parts[i]);
    else
      row.add(recent.value);
    return row.value;
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
  // Returns the results over the threads.
  template <class... Reductions>
  Pack<C, sizeof...(Reductions)> all_reduce(Reductions&... reductions) const {
    if constexpr (shared_rows) gang.wait();
    return {{reductions.result()...}};
  }
};
