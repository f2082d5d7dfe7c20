// SPDX-License-Identifier: MIT
// How a CPU's threads walk over rows. A thread takes neighbouring rows, and goes over each row in
// chunks of packs. Packs stay in memory; the second pass reads them from the caches.
#pragma once
#include <new>
#include <type_traits>

#include "caches.h"
#include "operands.cuh"
#include "reduce.cuh"
#include "row_tiles.cuh"

// Whether a row and its results fill a core's caches. Then later rows are not prefetched.
#ifdef WIDE_ROWS
inline constexpr bool wide_rows = true;
#else
inline constexpr bool wide_rows = false;
#endif

template <class B>
inline constexpr bool streamed = true;

// How many rows are taken at once. Between passes, these rows of x stay in a second-level cache,
// with dy, the sums for a parameter and prefetched rows (measured with a 1 MiB cache). The number
// is a power of two, so that it divides the eight rows that param_sums.cuh adds up at a time.
inline constexpr int max_rows_at_once = 4;
inline int rows_at_once(index_t row_bytes) {
  return row_bytes <= 1 << 14 ? max_rows_at_once : row_bytes <= 1 << 16 ? 2 : 1;
}

// How many rows ahead to prefetch: as many as 64 KiB hold, so that memory answers in time, but at
// least as many as are taken at once.
inline index_t rows_ahead(index_t row_bytes) {
  return std::max<index_t>(rows_at_once(row_bytes), (1 << 16) / row_bytes);
}

// A part of a whole pack, or a pack that the row's end cuts, and which of the passes visits it.
template <class Place, bool second_pass_>
struct PackAt {
  static constexpr bool second_pass = second_pass_;
  Place place;
  index_t column, end;  // where the pack begins, and where the row ends
};

template <class B, class Place, bool second_pass, class F>
inline void for_each_item(PackAt<Place, second_pass> at, const F& f) {
  for_each_item<B>(at.place, at.end, f);
}
// The results of a row, which the first pass prefetches for writing.
template <class B>
struct Results {
  static constexpr int max_count = 3;
  const char* row[max_count] = {};
  index_t itemsize[max_count] = {};
  int count = 0;

  template <class T>
  void add(const T* result) {
    if constexpr (!present<T> || streams<B, T>) return;
    row[count] = reinterpret_cast<const char*>(result);
    itemsize[count++] = sizeof(T);
  }
  __forceinline__ void prefetch(index_t column) const {
    constexpr int to_write = 1, to_first_level = 3;
    for (int i = 0; i < count; ++i)
      for (index_t byte = 0; byte < part_elements<B> * itemsize[i]; byte += cache_line)
        __builtin_prefetch(row[i] + column * itemsize[i] + byte, to_write, to_first_level);
  }
};

// The first pass of a centered backward has three sums, and 16 registers cannot hold the sums of
// all parts of a pack. So the pass visits the first part of each pack of a chunk, then the second
// part of each pack, and so on, wherever this order is quicker.
#ifdef LONG_PASSES
template <class B>
inline constexpr bool parts_in_turn = false;
#else
template <class B>
inline constexpr bool parts_in_turn =
    simd::registers == 16 && B::center && !begins_with_pack<B> && sizeof(typename B::x_t) == 2;
#endif

template <class B, bool second_pass, bool is_cut>
struct Chunk {
  index_t first, end;  // columns
  const Results<B>& results;

  template <class F>
  void for_each_pack(const F& f) const {
    if constexpr (is_cut)
      f(PackAt<CutPack, second_pass>{{first}, first, end});
    else if constexpr (!second_pass && parts_in_turn<B>)
      visit_part_of_all(WholeColumn<>{first}, f);
    else
      for (index_t column = first; column < end; column += B::pack)
        visit_parts(WholeColumn<>{column}, f);
  }

 private:
  template <class Place, class F>
  void visit_parts(Place place, const F& f) const {
    if constexpr (!second_pass) results.prefetch(part_column<B>(place));
    f(PackAt<Place, second_pass>{place, place.column, end});
    if constexpr (Place::part + 1 < parts_per_pack<B>)
      visit_parts(typename Place::Next{place.column}, f);
  }
  template <class Place, class F>
  void visit_part_of_all(Place place, const F& f) const {
    for (; place.column < end; place.column += B::pack) {
      results.prefetch(part_column<B>(place));
      f(PackAt<Place, second_pass>{place, place.column, end});
    }
    if constexpr (Place::part + 1 < parts_per_pack<B>)
      visit_part_of_all(typename Place::Next{first}, f);
  }
};

// A row of an input, and a later row to prefetch.
template <class T>
struct InputRow {
  T *data, *later;
};

template <class B>
struct Row;

template <class B>
struct Walk {
  BlockShare share;
  index_t rows, width, row_bytes;
  index_t ahead;         // how many rows ahead to prefetch
  mutable index_t last;  // the end of the thread's rows
  mutable RowTiles<Walk> tiles = {};

  Walk(const Team<B>&, const BlockShare& share, index_t rows, index_t width)
      : share(share),
        rows(rows),
        width(width),
        row_bytes(width * itemsize()),
        ahead(rows_ahead(row_bytes)) {}

  Row<B> row(index_t row, int slot = 0) const {
    return {*this, row, share.row_index(row),
            share.row_index(row + ahead < rows ? row + ahead : row), slot};
  }

  // Calls visit(found, first, count) for rows taken at once; found[i] belongs to row first + i.
  template <class Find, class Visit>
  void for_each_rows(int at_once, const Find& find, const Visit& visit) const {
    using Found = decltype(find(row(0)));
    alignas(Found) unsigned char memory[max_rows_at_once][sizeof(Found)];
    Found* const found = reinterpret_cast<Found*>(memory);
    constexpr index_t unit = strided_rows ? tile_rows<RowType> : 1;
    const index_t units = (rows + unit - 1) / unit;
    last = std::min(rows, units * (share.block + 1) / share.blocks * unit);
    for (index_t first = units * share.block / share.blocks * unit; first < last;
         first += at_once) {
      const int count = int(std::min<index_t>(at_once, last - first));
      for (int i = 0; i < count; ++i) new (found + i) Found(find(row(first + i, i)));
      visit(found, first, count);
    }
    if constexpr (strided_rows) tiles.finish(*this);
  }

 private:
  template <class Types, bool = present<typename Types::x_t>>
  struct OfRow {
    using Type = typename Types::x_t;
  };
  template <class Types>
  struct OfRow<Types, false> {
    using Type = typename Types::dy_t;
  };
  using RowType = typename OfRow<B>::Type;
  static constexpr index_t itemsize() { return sizeof(RowType); }
};

// A row, and its chunks. A chunk has 4 packs in the first pass and 16 in the second, or the packs
// that are left of the row; a row of one run is one chunk. A pack that the row's end cuts is a
// chunk of its own. If the first chunk has one pack only, the next chunk has the rest of the first
// 4 or 16 packs, or of the run. If threads share a row, each thread has some parts of it (gang.h).
template <class B>
struct Row {
  static constexpr bool exists = true;
  const Walk<B>& walk;
  index_t number, index, later;  // number in the walk, and indices of this row and a later one
  int slot;                      // index among the rows that are taken at once
  mutable Results<B> results = {};

  template <class T, int axes>
  InputRow<const T> of(const Rows<const T, axes>& operand) const {
    return {operand.at(index), operand.at(later)};
  }
  template <class T, int axes>
  T* of(const Rows<T, axes>& operand) const {
    T* const row = operand.at(index);
    results.add(row);
    return row;
  }
  template <class T, int axes>
  InputRow<const T> of(const SteppedRows<const T, axes>& operand) const {
    const T* const row = row_of_tile(operand);
    return {row, row};
  }
  template <class T, int axes>
  T* of(const SteppedRows<T, axes>& operand) const {
    return row_of_tile(operand);
  }

  index_t first_width() const { return std::min<index_t>(walk.width, B::pack); }
  template <class F>
  void with_first_chunk(const F& f) const {
    static_assert(begins_with_pack<B>);
    const bool is_mine = !shared_rows || gang.thread == 0;
    if constexpr (shared_rows) gang.part = is_mine ? 0 : -1;
    if (is_mine && !one_run && walk.width < B::pack)
      f(Chunk<B, false, true>{0, walk.width, results});
    else
      f(Chunk<B, false, false>{0, is_mine ? B::pack : 0, results});
  }
  template <class F>
  void for_each_next_chunk(const F& f) const {
    for_each_chunk_from<false>(first_width(), f);
  }
  template <class F>
  void for_each_chunk(const F& f) const {
    for_each_chunk_from<false>(0, f);
  }
  template <class F>
  void for_each_chunk_in_second_pass(const F& f) const {
    for_each_chunk_from<true>(0, f);
  }

 private:
  static constexpr index_t columns = chunk_packs * B::pack;  // per chunk

  template <class T, int axes>
  T* row_of_tile(const SteppedRows<T, axes>& operand) const {
    if constexpr (present<T>)
      return walk.tiles.row(walk, operand, number, walk.last);
    else
      return nullptr;
  }

  template <bool second_pass, class F>
  void for_each_chunk_from(index_t first, const F& f) const {
    const index_t whole = one_run ? walk.width : walk.width / B::pack * B::pack;
    const auto visit_cut = [&] { f(Chunk<B, second_pass, true>{whole, walk.width, results}); };
    const bool is_cut = first <= whole && whole < walk.width;  // a cut pack is still to be visited
    if constexpr (!shared_rows) {
      for_each_whole_chunk<second_pass>(first, whole, f);
      if (is_cut) visit_cut();
    } else {
      constexpr index_t more = begins_with_pack<B>;
      const index_t cut = (whole + columns - 1) / columns + more;  // index of the cut chunk
      gang.for_each_part([&](index_t part) {
        gang.part = part;
        const index_t begin = (part * part_chunks - more) * columns;
        const index_t end = begin + part_chunks * columns;
        for_each_whole_chunk<second_pass>(std::max(first, begin), std::min(end, whole), f);
        if (is_cut && cut / part_chunks == part) visit_cut();
      });
    }
  }
  template <bool second_pass, class F>
  void for_each_whole_chunk(index_t column, index_t last, const F& f) const {
    constexpr index_t step = second_pass || one_run ? columns : run_packs * B::pack;
    while (column < last) {
      const bool is_pack = begins_with_pack<B> && column == 0;
      const index_t next = is_pack ? B::pack : column - column % step + step;
      f(Chunk<B, second_pass, false>{column, std::min(next, last), results});
      column = next;
    }
  }
};

// If x has 16 bits and there is no AVX-512, a row takes so many instructions that a core cannot
// reach the next row while it waits for the row's sums. So several narrow rows are taken at once.
template <class B, class Find, class Store>
inline void for_each_row(const Walk<B>& walk, const Find& find, const Store& store) {
  constexpr bool is_long = sizeof(typename B::x_t) == 2 && simd::bytes < 64;
  constexpr index_t narrow = 1 << 10;
  const int at_once = is_long && walk.row_bytes <= narrow ? max_rows_at_once : 1;
  walk.for_each_rows(at_once, find, [&](auto* found, index_t first, int count) {
    for (int i = 0; i < count; ++i) store(found[i], walk.row(first + i, i));
  });
}
