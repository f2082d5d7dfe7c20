// SPDX-License-Identifier: MIT
// The CPU's reduce.cuh: reductions of one thread, or of several that share a row, whose parts are
// combined in their order. No result depends on whether rows are shared.
#pragma once
#include "memory.cuh"
#include "ptx.cuh"

// Over a chunk of at most 16 packs: value i is that of the items in slot i of all packs.
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
  // Over all items; it overwrites the values.
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

// Over a row's chunks: those of a part are combined, and then the parts in the same manner. A part
// that is alone is taken as it is.
template <class B, class Op = Sum>
struct RowReduction {
  using Operation = Op;
  using C = typename B::compute_t;
  Accumulator<Op, C> recent, parts_before;
  int chunks = 0;
  index_t part = -1;
  C* parts = nullptr;  // of a row that is shared

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

  // Of a shared row, after all threads have waited for each other.
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
  // The results over the threads.
  template <class... Reductions>
  Pack<C, sizeof...(Reductions)> all_reduce(Reductions&... reductions) const {
    if constexpr (shared_rows) gang.wait();
    return {{reductions.result()...}};
  }
};
