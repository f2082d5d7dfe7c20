// SPDX-License-Identifier: MIT
// The CPU's memory.cuh. A pack is 16 to 128 elements, which stay in memory; an item is a SIMD
// vector of them. Packs are processed in parts whose sums fit the registers.
//
// The end of a row may cut its last pack, and one item of that pack.
#pragma once
#include <algorithm>
#include <cstdint>

#include "operations.cuh"
#include "simd.h"
#include "simd_doubles.h"
#include "simd_first.h"
#include "simd_streaming.h"
#include "types.cuh"

// The number of results that bypass the caches, in calls that fill the last-level cache. A store
// that bypasses the caches does not first read the line that it overwrites.
#ifndef NON_TEMPORAL
#define NON_TEMPORAL 0
#endif

template <class B, class T>
inline constexpr bool streams =
    NON_TEMPORAL > 0 && simd::can_stream<T, typename B::compute_t, NON_TEMPORAL>;

template <class B>
using Item = simd::Vector<typename B::compute_t>;
template <class B>
inline constexpr int items_per_pack = B::pack / simd::lanes<typename B::compute_t>;

template <class B>
using Items = Pack<Item<B>, items_per_pack<B>>;

// All parts of a pack have the same number of items, which therefore divides items_per_pack.
constexpr int largest_divisor(int count, int max_divisor) {
  return count % max_divisor == 0 ? max_divisor : largest_divisor(count, max_divisor - 1);
}
template <class B>
inline constexpr int items_per_part = largest_divisor(items_per_pack<B>, simd::registers / 4);
template <class B>
inline constexpr int parts_per_pack = items_per_pack<B> / items_per_part<B>;
template <class B>
inline constexpr int part_elements = B::pack / parts_per_pack<B>;

template <class B>
inline Item<B> broadcast(typename B::compute_t v) {
  return v - Item<B>{};
}

template <class B>
using PerRow = typename B::compute_t;
template <class B, class C>
inline C load_per_row(const C* numbers, index_t row) {
  return numbers[row];
}
template <class B, class C>
inline void store_per_row(C* numbers, index_t row, C v) {
  numbers[row] = v;
}

// Where a row begins.
template <class T>
using RowPointer = T*;

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

// A part of a pack. The pack begins at `column`, and is whole or cut by the row's end. Each part
// has a type of its own: functions of that type are called once, so GCC inlines them. Loops over
// parts are recursive: with one more closure, as for `unrolled`, sums would not be in registers.
template <bool is_whole_, int part_>
struct PartOfPack {
  static constexpr bool is_whole = is_whole_;
  static constexpr int part = part_, slot_part = part;
  using Next = PartOfPack<is_whole, part + 1>;
  index_t column;
  operator index_t() const { return column; }
};
template <int part = 0>
using WholeColumn = PartOfPack<true, part>;
template <int part = 0>
using CutColumn = PartOfPack<false, part>;

// A part numbered at run time: all such parts have one type, and the same slots for sums.
template <bool is_whole_>
struct CountedPart {
  static constexpr bool is_whole = is_whole_;
  static constexpr int slot_part = 0;
  index_t column;
  int part;
  operator index_t() const { return column; }
};

// The column at which a part begins.
template <class B, class Column>
inline index_t part_column(Column at) {
  return at.column + at.part * part_elements<B>;
}

// A pack that the row's end cuts, visited as one part.
struct CutPack {
  static constexpr int part = 0, slot_part = 0;
  static constexpr bool is_whole = false;
  index_t column;
  operator index_t() const { return column; }
};

// The index of an item in its pack, and its slot among sums and results.
struct WholeItem {
  int index, slot;
};
struct CutItem {
  int index, slot;
  int count;  // elements inside the row
};

template <class B>
inline int elements_of(WholeItem) {
  return simd::lanes<typename B::compute_t>;
}
template <class B>
inline int elements_of(CutItem item) {
  return item.count;
}

// In a part that is cut, whole items are handled like cut items. This halves the code, and the time
// to compile it.
template <class B, class Part, class F>
inline void for_each_item_of_part(Part at, index_t end, const F& f) {
  constexpr int lanes = simd::lanes<typename B::compute_t>;
  const int count = static_cast<int>(end - at.column);
#pragma GCC unroll 32
  for (int i = 0; i < items_per_part<B>; ++i) {
    const int index = at.part * items_per_part<B> + i,
              slot = Part::slot_part * items_per_part<B> + i;
    if constexpr (Part::is_whole)
      f(WholeItem{index, slot});
    else if (index * lanes < count)
      f(CutItem{index, slot, std::min(lanes, count - index * lanes)});
  }
}
template <class B, bool is_whole, int part, class F>
inline void for_each_item(PartOfPack<is_whole, part> at, index_t end, const F& f) {
  for_each_item_of_part<B>(at, end, f);
}
template <class B, bool is_whole, class F>
inline void for_each_item(CountedPart<is_whole> at, index_t end, const F& f) {
  for_each_item_of_part<B>(at, end, f);
}

// A row has at most one cut pack. If this pack has many items, the loop over them is not unrolled:
// this is quick enough and compiles quickly. The loop keeps its sums and results in memory, so it
// cannot share them with a loop over whole packs.
template <class B, class F>
inline void for_each_item(CutPack at, index_t end, const F& f) {
  if constexpr (parts_per_pack<B> == 1 && items_per_pack<B> <= 4) {
    for_each_item<B>(CutColumn<>{at.column}, end, f);
  } else {
    constexpr int lanes = simd::lanes<typename B::compute_t>;
    const int count = static_cast<int>(end - at.column);
#pragma GCC unroll 1
    for (int i = 0; i * lanes < count; ++i) f(CutItem{i, i, std::min(lanes, count - i * lanes)});
  }
}

// A part, and where its row ends.
template <class Part>
struct PartAt : Part {
  index_t end;
};
template <class B, class Part, class F>
inline void for_each_item(PartAt<Part> at, const F& f) {
  for_each_item<B>(static_cast<Part>(at), at.end, f);
}

// Calls f(at) for each part of a pack.
template <class B, class Column, class F>
inline void for_each_part(Column at, index_t end, const F& f) {
  f(PartAt<Column>{at, end});
  if constexpr (Column::part + 1 < parts_per_pack<B>)
    for_each_part<B>(typename Column::Next{at.column}, end, f);
}
template <class B, class F>
inline void for_each_part(index_t column, index_t end, const F& f) {
  if (column + B::pack <= end)
    for_each_part<B>(WholeColumn<>{column}, end, f);
  else
    f(PartAt<CutPack>{{column}, end});
}

// A cut item is copied to an array of stored elements, and then converted like a whole item.
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
// Reads an item that was computed.
template <class B, class At>
inline Item<B> read(const Pack<Item<B>, items_per_pack<B>>& items, At at) {
  return items.item[at.index];
}

// The items are stored together at the end. Stores in between may branch, which would keep
// compilers from interleaving the computations of items.
template <class B, class T, bool read_again = false>
struct OutputPack {
  Pack<Item<B>, items_per_pack<B>> value;
  T* row;
  index_t end;

  explicit OutputPack(T* row, index_t end = 0) : row(row), end(end) {}
  // Stores a part that knows the end of its row.
  template <class Part>
  void store(PartAt<Part> at) {
    end = at.end;
    store(static_cast<Part>(at));
  }

  template <class Column>
  LoadedPack<B, T> store(Column column) const {
    T* const address = row + part_column<B>(column);
    const Item<B>* const items = value.item + Column::slot_part * items_per_part<B>;
    if constexpr (!Column::is_whole)
      for_each_item<B>(column, end, [&](CutItem at) { store_item(column, at); });
    else if constexpr (streams<B, T> && !read_again)
      simd::store_all_non_temporal<items_per_part<B>>(address, items);
    else
      simd::store_all<items_per_part<B>>(address, items);
    return {row + column};
  }

 private:
  void store_item(index_t column, CutItem at) const {
    constexpr int lanes = simd::lanes<typename B::compute_t>;
    using Stored = StoredItem<T, lanes>;
    T* const address = row + column + at.index * lanes;
    Stored stored;
    simd::store(stored.items, value.item[at.slot]);
    const auto bits = simd::load_bits<typename Stored::Bits>(stored.items);
    if constexpr (streams<B, T> && !read_again)
      if (at.count == lanes) return simd::stream(address, bits);
    simd::store_first(address, bits, at.count);
  }
};
template <class B>
struct OutputPack<B, absent, false> {
  OutputPack(absent*, index_t) {}
  void store(index_t) const {}
};
template <class B, class T, bool read_again, class At>
inline void write(OutputPack<B, T, read_again>& pack, At at, Item<B> v) {
  pack.value.item[at.slot] = v;
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
  return simd::first_elements(v, at.count, Item<B>{});
}

template <class V>
inline auto first_of(V v) {
  return v[0];
}
