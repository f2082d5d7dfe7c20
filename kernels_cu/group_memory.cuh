// SPDX-License-Identifier: MIT
// What of memory the group norms alone use; the CPU build replaces this file.
#pragma once
#include "memory.cuh"

template <class B>
__device__ inline LoadedPack<B, absent> load_pack(const absent*, index_t, index_t) {
  return {};
}

// Stores to global memory that no compiler cuts into smaller ones.
__device__ inline void global_store_whole(uint4* address, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ inline void global_store_whole(uint2* address, uint2 v) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(v.x), "r"(v.y) : "memory");
}
template <class Word>
__device__ inline void global_store_whole(Word* address, Word v) {
  *address = v;
}

// As OutputPack, but that each word is stored whole.
template <class B, class T, bool read_again = false>
struct TileOutput : OutputPack<B, T, read_again> {
  using OutputPack<B, T, read_again>::OutputPack;

  __device__ void store(index_t column) const {
    using Moved = Words<B, T>;
    Moved words;
    memcpy(&words, &this->value, sizeof(words));
    if (!inside(column, this->end)) return;
#pragma unroll
    for (int i = 0; i < Moved::count; ++i)
      global_store_whole(reinterpret_cast<typename Moved::Word*>(this->row + column) + i,
                         words.word[i]);
  }
};
template <class B>
struct TileOutput<B, absent, false> {
  __device__ TileOutput(absent*, index_t) {}
  __device__ void store(index_t) const {}
};

// Hints that a pack will soon be loaded, or stored; only the CPU takes them.
template <class B, class T>
__device__ inline void prefetch_pack(const T*, index_t) {}
template <class B, class T>
__device__ inline void prefetch_output(T*, index_t) {}

// Where a thread keeps V for each of so many packs, which took long to compute, from one pass to
// the next: the CPU's, in its caches.
template <class V, int packs>
__device__ inline V* kept_packs() {
  return nullptr;
}

// f(column) for the columns at which a thread's packs begin: the CPU's, in runs.
template <class B, class F, class EndChunk>
__device__ inline void for_each_column(index_t first, index_t step, index_t end, F f,
                                       EndChunk end_chunk) {}

// f(column), which the CPU calls with what it knows of the column.
template <class B, class F>
__device__ inline void with_column(index_t column, index_t, F f) {
  f(column);
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

// Where nothing is to be done after a chunk of packs.
struct NoEndChunk {
  __device__ void operator()() const {}
};

// A sum of chunks' sums.
template <class B, class V>
struct RunSum {
  V sum = {};

  __device__ void add(V v) { sum += v; }
};

// The value of an item that is the same everywhere.
template <class C>
__device__ inline C first_of(C v) {
  return v;
}

// A pack's items, converted.
template <class B, class T, class Column>
__device__ inline auto load_items(const T* row, Column column, index_t end) {
  if constexpr (!present<T>) {
    return absent{};
  } else {
    Items<B> out = {};
    const auto pack = load_pack<B>(row, column, end);
    for_each_item<B>(column, end, [&](auto at) { out.item[at.index] = read<B>(pack, at); });
    return out;
  }
}

// Where the kernel will load them again.
template <class B, class T, class Column>
__device__ inline void store_items(T* row, Column column, index_t end, const Items<B>& items) {
  TileOutput<B, T, true> output(row, end);
  for_each_item<B>(column, end, [&](auto at) { write(output, at, items.item[at.index]); });
  output.store(column);
}
