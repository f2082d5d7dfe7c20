// SPDX-License-Identifier: MIT
// Packs to and from global memory, guarded at the end of the row.
//
// B::pack divides the width, so a pack lies wholly inside the row or wholly outside it; outside, it
// reads as zeros and is not stored. B::access is the number of elements that every operand's
// alignment allows in one access: a misaligned pointer moves the same pack in narrower pieces. The
// CPU build replaces this file: there a pack may be cut by the end of the row.
#pragma once
#include "access.cuh"
#include "vec.cuh"
#include "whole_store.cuh"

// The one test that stands before an access to global memory.
__device__ inline bool inside(index_t index, index_t count) { return index < count; }

template <class T, int count>
struct alignas(count * sizeof(T)) Access {
  T item[count];
};

template <class B, class T>
inline constexpr int items_per_access =
    B::access * sizeof(T) <= 16 ? B::access : 16 / int(sizeof(T));

// A pack read from memory.
template <class B, class T>
using LoadedPack = Pack<T, B::pack>;

template <class B, class T>
__device__ inline LoadedPack<B, T> load_pack(const T* row, index_t column, index_t end) {
  constexpr int count = items_per_access<B, T>;
  Pack<T, B::pack> out = {};
  if (inside(column, end)) {
#pragma unroll
    for (int i = 0; i < B::pack; i += count) {
      const auto piece = global_load(reinterpret_cast<const Access<T, count>*>(row + column + i));
#pragma unroll
      for (int j = 0; j < count; ++j) out.item[i + j] = piece.item[j];
    }
  }
  return out;
}
template <class B>
__device__ inline LoadedPack<B, absent> load_pack(const absent*, index_t, index_t) {
  return {};
}

// How many rows a thread takes at once in a backward, so that they share the parameters' sums.
// Threads that keep a row in registers have room for one.
inline constexpr int max_rows_at_once = 1;
template <class T>
__device__ inline int rows_at_once(index_t) {
  return 1;
}

// Whether several blocks share a row (row_parts.cuh); only the CPU's do.
inline constexpr bool shared_rows = false;

// How many rows ahead to prefetch, whether to do so in each pass over the rows or in the last
// alone, and hints that a pack will soon be loaded, or stored; only the CPU takes them.
inline constexpr bool long_passes = false;
template <class T>
__device__ inline index_t rows_ahead(index_t) {
  return 0;
}
template <class B, class T>
__device__ inline void prefetch_pack(const T*, index_t) {}
template <class B, class T>
__device__ inline void prefetch_later(const T*, index_t) {}
template <class B, class T>
__device__ inline void prefetch_output(T*, index_t) {}

// Where a thread keeps V for each of so many packs, which took long to compute, from one pass to
// the next: the CPU's, in its caches. A GPU's has its packs in registers.
template <class V, int packs>
__device__ inline V* kept_packs() {
  return nullptr;
}

// Whether a kernel must say that an access is not to be cut up: NVRTC 13.5 stores items of group
// norms one by one otherwise. (Row norms are stored well, and would take more registers.)
template <class B>
inline constexpr bool stores_whole = false;

// A pack to be written: write() its items, then store() it at a column, which gives it as if
// loaded. read_again: the kernel will soon load it.
template <class B, class T, bool read_again = false>
struct OutputPack {
  Pack<T, B::pack> value;
  T* row;
  index_t end;

  __device__ OutputPack(T* row, index_t end) : row(row), end(end) {}

  __device__ LoadedPack<B, T> store(index_t column) const {
    constexpr int count = items_per_access<B, T>;
    if (inside(column, end)) {
#pragma unroll
      for (int i = 0; i < B::pack; i += count) {
        Access<T, count> piece;
#pragma unroll
        for (int j = 0; j < count; ++j) piece.item[j] = value.item[i + j];
        auto* place = reinterpret_cast<Access<T, count>*>(row + column + i);
        if constexpr (stores_whole<B>)
          global_store_whole(place, piece);
        else
          global_store(place, piece);
      }
    }
    return value;
  }
};
template <class B>
struct OutputPack<B, absent, false> {
  __device__ OutputPack(absent*, index_t) {}
  __device__ void store(index_t) const {}
};

// What a kernel computes on at once, and how many of them a pack has. On the CPU it is a vector.
template <class B>
using Item = typename B::compute_t;
template <class B>
inline constexpr int items_per_pack = B::pack;

// An item that is everywhere v.
template <class B>
__device__ inline Item<B> spread(typename B::compute_t v) {
  return v;
}

// f(column) for the columns at which a thread's packs begin: `first`, and on in steps; end_run()
// after at most 16 of them and after the last.
template <class B, class F, class EndRun>
__device__ inline void for_each_column(index_t first, index_t step, index_t end, F f,
                                       EndRun end_run) {
  for (index_t run = first; run < end; run += 16 * step) {
    const index_t run_end = run + 16 * step < end ? run + 16 * step : end;
#pragma unroll 2
    for (index_t column = run; column < run_end; column += step) f(column);
    end_run();
  }
}

// f(column), which the CPU calls with what it knows of the column.
template <class B, class F>
__device__ inline void with_column(index_t column, index_t, F f) {
  f(column);
}

// f(at) for every item of the pack at `column`; outside the row too, where loads gave zeros and
// stores do nothing.
struct ItemIndex {
  int index;
  bool live;
};
template <class B, class F>
__device__ inline void for_each_item(index_t column, index_t end, F f) {
  const bool live = inside(column, end);
#pragma unroll
  for (int i = 0; i < B::pack; ++i) f(ItemIndex{i, live});
}

template <class B, class T>
__device__ inline Item<B> read(const Pack<T, B::pack>& pack, ItemIndex at) {
  return convert<Item<B>>(pack.item[at.index]);
}
template <class B, class T, bool read_again>
__device__ inline void write(OutputPack<B, T, read_again>& pack, ItemIndex at, Item<B> v) {
  pack.value.item[at.index] = convert<T>(v);
}

// v as it would be stored in a T.
template <class B, class T>
__device__ inline Item<B> rounded_to(Item<B> v) {
  return convert<Item<B>>(convert<T>(v));
}

// Zero in place of what lies outside the row, so that it adds nothing to a sum.
template <class B>
__device__ inline Item<B> clear_outside(Item<B> v, ItemIndex at) {
  return at.live ? v : Item<B>(0);
}

// load(i / size) for every element i of the pack at `column`.
template <class B, class Load>
__device__ inline Pack<Item<B>, B::pack> load_each(index_t column, index_t end, index_t size,
                                                   Load load) {
  Pack<Item<B>, B::pack> out = {};
  if (inside(column, end)) {
#pragma unroll
    for (int i = 0; i < B::pack; ++i) out.item[i] = load((column + i) / size);
  }
  return out;
}

// The value of an item that is the same everywhere.
__device__ inline float first_of(float v) { return v; }
__device__ inline double first_of(double v) { return v; }

// The sum over what an item consists of.
__device__ inline float item_sum(float v) { return v; }
__device__ inline double item_sum(double v) { return v; }
