// SPDX-License-Identifier: MIT
// The CPU's reduce.cuh: sums of one thread, or of several that share a row, whose parts are added
// in their order. No result depends on whether rows are shared.
#pragma once
#include "memory.cuh"
#include "ptx.cuh"

// A sum of many. Each takes what adding the last one gave too much (Kahan's sum), unless that was
// infinite.
template <class B, class V>
struct RunSum {
  V sum = {}, excess = {};

  void add(V v) {
    v -= excess;
    const V next = sum + v;
    excess = next - next == V{} ? (next - sum) - v : V{};
    sum = next;
  }
};

// Sums over a chunk of at most 16 packs: the item of every pack in a slot is added to its sum.
inline constexpr int chunk_packs = 16, part_chunks = 8;
template <class B>
struct ItemSums {
  Items<B> sums = {};

  template <class At>
  void add(At at, Item<B> v) {
    sums.item[at.slot] += v;
  }
  template <class At>
  void add_product(At at, Item<B> a, Item<B> b) {
    sums.item[at.slot] = fma(a, b, sums.item[at.slot]);
  }
  typename B::compute_t total() {
    fold<items_per_pack<B> / 2>();
    return item_sum(sums.item[0]);
  }

 private:
  template <int half>
  void fold() {
    unrolled<half>([&](int i) { sums.item[i] += sums.item[i + half]; });
    if constexpr (half > 1) fold<half / 2>();
  }
};

// A sum over a row's chunks: those of a part are added up, and then the parts in the same manner.
// The sum of a part that is alone is taken as it is.
template <class B>
struct RowSum {
  using C = typename B::compute_t;
  RunSum<B, C> recent, parts_before;
  int chunks = 0;
  index_t part = -1;
  C* parts = nullptr;  // of a row that is shared

  RowSum() {
    if constexpr (shared_rows) parts = gang.ring<C>();
  }

  void add(ItemSums<B>& chunk) {
    const C sum = chunk.total();
    if constexpr (shared_rows) {
      if (gang.part < 0) return;
      if (part != gang.part) recent = {};
      part = gang.part;
      recent.add(sum);
      parts[part] = recent.sum;
    } else if (chunks++ == 0) {
      recent.sum = sum;
    } else {
      if ((chunks - 1) % part_chunks == 0) {
        parts_before.add(recent.sum);
        recent = {};
      }
      recent.add(sum);
    }
  }

  // Of a shared row: when all threads have waited for each other.
  C total() const {
    if (!shared_rows && chunks <= part_chunks) return recent.sum;
    RunSum<B, C> sum = parts_before;
    if constexpr (shared_rows)
      for (index_t i = 0; i < gang.parts; ++i) sum.add(parts[i]);
    else
      sum.add(recent.sum);
    return sum.sum;
  }
};

template <int threads, class C, int n>
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
  // The totals of the threads' sums.
  template <class... Sums>
  Pack<C, sizeof...(Sums)> totals(Sums&... sums) const {
    if constexpr (shared_rows) gang.wait();
    return {{sums.total()...}};
  }
};
