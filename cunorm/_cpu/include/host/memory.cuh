// SPDX-License-Identifier: MIT
// The CPU's memory.cuh: a pack is 64 elements of memory, used in place, and an item a SIMD vector
// of them.
//
// The last pack of a row is cut by the row's end, and with it one item.
#pragma once
#include "access.cuh"
#include "simd.h"
#include "vec.cuh"

// Results too large for the cache go past it: a store need not first read what it overwrites.
#ifdef NON_TEMPORAL
inline constexpr bool non_temporal = true;
#else
inline constexpr bool non_temporal = false;
#endif

inline bool inside(index_t index, index_t count) { return index < count; }

template <class B>
using Item = simd::Vector<typename B::compute_t>;
template <class B>
inline constexpr int items_per_pack = B::pack / simd::lanes<typename B::compute_t>;

template <class B, class T>
struct LoadedPack {
  const T* start;
};
template <class B, class T>
inline LoadedPack<B, T> load_pack(const T* row, index_t column, index_t) {
  return {row + column};
}
template <class B>
inline absent load_pack(const absent*, index_t, index_t) {
  return {};
}

// Worth its instructions where a row is too long to be fetched ahead by the machine itself.
template <class B, class T>
inline void prefetch_pack(const T* row, index_t column, index_t end) {
  constexpr int to_second_level = 2;
  if (end < 1024) return;
  for (int i = 0; i < B::pack; i += 64 / int(sizeof(T)))
    __builtin_prefetch(row + column + i, 0, to_second_level);
}

template <class B, class T, bool read_again = false>
struct OutputPack {
  T* start;
  OutputPack(T* row, index_t column, index_t) : start(row + column) {}
  LoadedPack<B, T> loaded() const { return {start}; }
  void store() const {}
};
template <class B>
struct OutputPack<B, absent, false> {
  OutputPack(absent*, index_t, index_t) {}
  void store() const {}
};

struct WholeItem {
  int index;
};
struct CutItem {
  int index;
  int count;  // elements inside the row
};

template <class B, class F>
inline void for_each_item(index_t column, index_t end, const F& f) {
  constexpr int lanes = simd::lanes<typename B::compute_t>;
  if (column + B::pack <= end) {
#pragma GCC unroll 32
    for (int i = 0; i < items_per_pack<B>; ++i) f(WholeItem{i});
    return;
  }
  const int count = static_cast<int>(end - column);
#pragma GCC unroll 32
  for (int i = 0; i < items_per_pack<B>; ++i) {
    if ((i + 1) * lanes <= count)
      f(WholeItem{i});
    else if (i * lanes < count)
      f(CutItem{i, count - i * lanes});
  }
}

// A cut item is converted as a whole one is, by way of an array. Converting it element by element
// would be slower, and a build would take several times as long to compile.
template <class T>
inline void copy_items(T* to, const T* from, int count) {
  for (int i = 0; i < count; ++i) to[i] = from[i];
}

template <class B, class T>
inline Item<B> read(const LoadedPack<B, T>& pack, WholeItem at) {
  using C = typename B::compute_t;
  return simd::load<C>(pack.start + at.index * simd::lanes<C>);
}
template <class B, class T>
inline Item<B> read(const LoadedPack<B, T>& pack, CutItem at) {
  using C = typename B::compute_t;
  T items[simd::lanes<C>] = {};
  copy_items(items, pack.start + at.index * simd::lanes<C>, at.count);
  return simd::load<C>(items);
}
template <class B, class T, bool read_again>
inline void write(const OutputPack<B, T, read_again>& pack, WholeItem at, Item<B> v) {
  T* place = pack.start + at.index * simd::lanes<typename B::compute_t>;
  if constexpr (non_temporal && !read_again)
    simd::store_non_temporal(place, v);
  else
    simd::store(place, v);
}
template <class B, class T, bool read_again>
inline void write(const OutputPack<B, T, read_again>& pack, CutItem at, Item<B> v) {
  constexpr int lanes = simd::lanes<typename B::compute_t>;
  T items[lanes];
  simd::store(items, v);
  copy_items(pack.start + at.index * lanes, items, at.count);
}

template <class B>
inline Item<B> clear_outside(Item<B> v, WholeItem) {
  return v;
}
template <class B>
inline Item<B> clear_outside(Item<B> v, CutItem at) {
  for (int i = at.count; i < simd::lanes<typename B::compute_t>; ++i) v[i] = 0;
  return v;
}

template <class V>
inline auto item_sum(V v) {
  return simd::sum(v);
}
