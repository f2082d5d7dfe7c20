// SPDX-License-Identifier: MIT
// The CPU's memory.cuh: a pack is 16 to 128 elements of memory, used in place, and an item a SIMD
// vector of them.
//
// The last pack of a row is cut by the row's end, and with it one item.
#pragma once
#include <algorithm>
#include <cstdint>

#include "access.cuh"
#include "simd.h"
#include "simd_doubles.h"
#include "simd_streaming.h"
#include "vec.cuh"

// Results too large for the cache go past it: a store need not first read what it overwrites.
#ifdef NON_TEMPORAL
inline constexpr bool non_temporal = true;
#else
inline constexpr bool non_temporal = false;
#endif

// Passes over the rows last so long that memory idles in one that prefetches nothing.
#ifdef LONG_PASSES
inline constexpr bool long_passes = true;
#else
inline constexpr bool long_passes = false;
#endif

// One row and its results fill a core's caches.
#ifdef WIDE_ROWS
inline constexpr bool wide_rows = true;
#else
inline constexpr bool wide_rows = false;
#endif

// Several blocks share a row, and a launch makes one pass.
#ifdef SHARED_ROWS
inline constexpr bool shared_rows = true;
#else
inline constexpr bool shared_rows = false;
#endif

inline constexpr int cache_line = 64;

inline bool inside(index_t index, index_t count) { return index < count; }

template <class B>
using Item = simd::Vector<typename B::compute_t>;
template <class B>
inline constexpr int items_per_pack = B::pack / simd::lanes<typename B::compute_t>;

template <class B>
inline Item<B> spread(typename B::compute_t v) {
  return v - Item<B>{};
}

template <class B, class T>
struct LoadedPack {
  const T* start;
};
template <class B>
struct LoadedPack<B, absent> {};
template <class B, class T>
inline LoadedPack<B, T> load_pack(const T* row, index_t column, index_t) {
  return {row + column};
}
template <class B>
inline LoadedPack<B, absent> load_pack(const absent*, index_t, index_t) {
  return {};
}

inline constexpr int max_rows_at_once = 4;

// As many rows of x as stay in a second-level cache between passes, with dy, the sums of a
// parameter's gradient and the rows on their way in; measured with 1 MiB of it. Powers of two: sums
// are counted to sixteen rows.
template <class T>
inline int rows_at_once(index_t width) {
  const index_t row_bytes = width * index_t(sizeof(T));
  return row_bytes <= 1 << 14 ? max_rows_at_once : row_bytes <= 1 << 16 ? 2 : 1;
}

// Far enough for memory to answer in time: 64 KiB, and beyond the rows that are taken at once.
template <class T>
inline index_t rows_ahead(index_t width) {
  const index_t row_bytes = width * index_t(sizeof(T));
  return std::max<index_t>(rows_at_once<T>(width), (1 << 16) / row_bytes);
}

// GCC takes what only prefetches for something without an effect, and drops calls that it does not
// inline at once.
template <class B, class T>
__forceinline__ void prefetch_pack(const T* row, index_t column) {
  constexpr int to_read = 0, to_second_level = 2;
  for (int i = 0; i < B::pack; i += cache_line / int(sizeof(T)))
    __builtin_prefetch(row + column + i, to_read, to_second_level);
}
template <class B>
inline void prefetch_pack(const absent*, index_t) {}

// Of a row to come.
template <class B, class T>
__forceinline__ void prefetch_later(const T* row, index_t column) {
  if constexpr (!wide_rows) prefetch_pack<B>(row, column);
}

template <class B, class T>
__forceinline__ void prefetch_output(T* row, index_t column) {
  constexpr int to_write = 1, to_first_level = 3;
  if constexpr (non_temporal && simd::can_stream<T, typename B::compute_t>) return;
  for (int i = 0; i < B::pack; i += cache_line / int(sizeof(T)))
    __builtin_prefetch(row + column + i, to_write, to_first_level);
}
template <class B>
inline void prefetch_output(absent*, index_t) {}

// GCC must not know what the address is: it would ask for it anew in each step of a loop.
template <class V, int packs>
inline V* kept_packs() {
  if constexpr (packs == 0) {
    return nullptr;
  } else {
    thread_local static V kept[packs];
    V* place = kept;
    asm("" : "+r"(place));
    return place;
  }
}

// Where a pack begins, with what is known of it: that it is whole, or that the row's end cuts it.
struct WholeColumn {
  index_t column;
  operator index_t() const { return column; }
};
struct CutColumn {
  index_t column;
  operator index_t() const { return column; }
};

template <class B, class F, class EndRun>
inline void for_each_column(index_t first, index_t step, index_t end, const F& f,
                            const EndRun& end_run) {
  index_t column = first;
  while (column + B::pack <= end) {
    const index_t last = std::min(column + 15 * step, end - B::pack);
    for (; column <= last; column += step) f(WholeColumn{column});
    end_run();
  }
  if (column < end) {
    f(CutColumn{column});
    end_run();
  }
}

template <class B, class F>
inline void with_column(index_t column, index_t end, const F& f) {
  if (column + B::pack <= end)
    f(WholeColumn{column});
  else
    f(CutColumn{column});
}

struct WholeItem {
  int index;
};
struct CutItem {
  int index;
  int count;  // elements inside the row
};

template <class B, class F>
inline void for_each_item(WholeColumn, index_t, const F& f) {
#pragma GCC unroll 32
  for (int i = 0; i < items_per_pack<B>; ++i) f(WholeItem{i});
}
// Those that are whole are taken as cut ones too: it is half the code, and half the time to compile
// it.
template <class B, class F>
inline void for_each_item(CutColumn column, index_t end, const F& f) {
  constexpr int lanes = simd::lanes<typename B::compute_t>;
  const int count = static_cast<int>(end - column);
#pragma GCC unroll 32
  for (int i = 0; i < items_per_pack<B>; ++i)
    if (i * lanes < count) f(CutItem{i, std::min(lanes, count - i * lanes)});
}

template <class B, class F>
inline void for_each_item(index_t column, index_t end, const F& f) {
  if (column + B::pack <= end)
    for_each_item<B>(WholeColumn{column}, end, f);
  else
    for_each_item<B>(CutColumn{column}, end, f);
}

// A cut item is converted as a whole one is, by way of an array of them as they are stored.
template <class T, int count>
struct StoredItem {
  typedef uint8_t Bits __attribute__((vector_size(count * sizeof(T))));
  alignas(64) T items[count];
};

template <class B, class T>
inline Item<B> read(const LoadedPack<B, T>& pack, WholeItem at) {
  using C = typename B::compute_t;
  return simd::load<C>(pack.start + at.index * simd::lanes<C>);
}
template <class B, class T>
inline Item<B> read(const LoadedPack<B, T>& pack, CutItem at) {
  using C = typename B::compute_t;
  using Stored = StoredItem<T, simd::lanes<C>>;
  Stored stored;
  simd::store_bits(stored.items, simd::load_first<typename Stored::Bits>(
                                     pack.start + at.index * simd::lanes<C>, at.count));
  return simd::load<C>(stored.items);
}
// Of items that were computed and kept.
template <class B, class At>
inline Item<B> read(const Pack<Item<B>, items_per_pack<B>>& items, At at) {
  return items.item[at.index];
}

template <class B>
inline constexpr bool stores_whole = false;

// The items are stored together at the end: stores in between, which may branch, would keep the
// compiler from computing on all items at a time.
template <class B, class T, bool read_again = false>
struct OutputPack {
  Pack<Item<B>, items_per_pack<B>> value;
  T* row;
  index_t end;

  OutputPack(T* row, index_t end) : row(row), end(end) {}

  template <class Column>
  LoadedPack<B, T> store(Column column) const {
    if constexpr (std::is_same_v<Column, WholeColumn> && !streams)
      simd::store_all(row + column, value.item);
    else
      for_each_item<B>(column, end, [&](auto at) {
        store_item(row + column + at.index * simd::lanes<typename B::compute_t>, at);
      });
    return {row + column};
  }

 private:
  static constexpr bool streams = non_temporal && !read_again;

  void store_item(T* place, WholeItem at) const {
    if constexpr (streams)
      simd::store_non_temporal(place, value.item[at.index]);
    else
      simd::store(place, value.item[at.index]);
  }
  void store_item(T* place, CutItem at) const {
    using Stored = StoredItem<T, simd::lanes<typename B::compute_t>>;
    Stored stored;
    simd::store(stored.items, value.item[at.index]);
    simd::store_first(place, simd::load_bits<typename Stored::Bits>(stored.items), at.count);
  }
};
template <class B>
struct OutputPack<B, absent, false> {
  OutputPack(absent*, index_t) {}
  void store(index_t) const {}
};
template <class B, class T, bool read_again, class At>
inline void write(OutputPack<B, T, read_again>& pack, At at, Item<B> v) {
  pack.value.item[at.index] = v;
}

template <class B, class T>
inline Item<B> rounded_to(Item<B> v) {
  using C = typename B::compute_t;
  StoredItem<T, simd::lanes<C>> stored;
  simd::store(stored.items, v);
  return simd::load<C>(stored.items);
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

template <class B, class Load>
inline Pack<Item<B>, items_per_pack<B>> load_each(index_t column, index_t end, index_t size,
                                                  const Load& load) {
  typename B::compute_t values[B::pack] = {};
  const index_t last = std::min<index_t>(column + B::pack, end);
  for (index_t group = column / size; group * size < last; ++group) {
    const auto value = load(group);
    const index_t first = std::max(group * size, column);
    for (index_t i = first; i < std::min(last, (group + 1) * size); ++i) values[i - column] = value;
  }
  Pack<Item<B>, items_per_pack<B>> out;
  std::memcpy(&out, values, sizeof(out));
  return out;
}

template <class V>
inline auto first_of(V v) {
  return v[0];
}

template <class V>
inline auto item_sum(V v) {
  return simd::sum(v);
}
