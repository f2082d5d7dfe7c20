// SPDX-License-Identifier: MIT
// Packs to and from global memory.
//
// B::pack divides the width, so a pack lies wholly inside the row or wholly outside it. A pack
// outside reads as zeros and is not stored. B::access is the number of elements that the alignment
// of all operands allows in one access: if a pointer is misaligned, the same pack is moved in
// narrower pieces. The CPU build replaces this file; there the end of a row may cut a pack.
#pragma once
#include "items.cuh"
#include "operations.cuh"

// The test that guards every access to global memory.
__device__ inline bool inside(index_t index, index_t count) { return index < count; }

// A pack as it is moved: in words of at most 16 bytes.
template <class B, class T>
struct Words {
  static constexpr int size = int(sizeof(T)), max_items = 16 / size;  // the most elements per word
  static constexpr int items = B::access <= max_items ? B::access : max_items;  // elements per word
  static constexpr int count = B::pack / items, bytes = items * size;
  using Word = either<
      bytes == 16, uint4,
      either<bytes == 8, uint2,
             either<bytes == 4, unsigned, either<bytes == 2, unsigned short, unsigned char>>>>;
  Word word[count];
};

// Where a row begins. In builds with STRIDED_ROWS, neighbouring columns are `step` elements apart.
template <class T>
struct SteppedRow {
  T* first = nullptr;
  index_t step = 1;

  __device__ T* operator+(int column) const { return first + column * step; }
};
template <class T>
using RowPointer = either<strided_rows, SteppedRow<T>, T*>;

// A pack read from memory.
template <class B, class T>
using LoadedPack = Pack<T, B::pack>;

template <class B, class T>
__device__ inline LoadedPack<B, T> unpacked(const Words<B, T>& words) {
  LoadedPack<B, T> out;
  memcpy(&out, &words, sizeof(out));
  return out;
}

template <class B, class T>
__device__ inline LoadedPack<B, T> load_where(bool live, const T* address) {
  using Moved = Words<B, T>;
  Moved words = {};
  if (live) {
#pragma unroll
    for (int i = 0; i < Moved::count; ++i)
      words.word[i] = reinterpret_cast<const typename Moved::Word*>(address)[i];
  }
  return unpacked<B, T>(words);
}

// `pack` has the bits of B::pack elements.
template <class B, class T, class Stored>
__device__ inline void store_where(bool live, T* address, const Stored& pack) {
  using Moved = Words<B, T>;
  Moved words;
  static_assert(sizeof(words) == sizeof(pack), "a pack is stored");
  memcpy(&words, &pack, sizeof(words));
  if (live) {
#pragma unroll
    for (int i = 0; i < Moved::count; ++i)
      reinterpret_cast<typename Moved::Word*>(address)[i] = words.word[i];
  }
}

template <class B, class T>
__device__ inline LoadedPack<B, T> load_pack(const T* row, index_t column, index_t end) {
  return load_where<B>(inside(column, end), row + column);
}

// A pack of an output row. write() sets its items; store() stores it, and returns the pack as if it
// had been loaded. `read_again`, which only a CPU uses, says that the kernel soon loads the pack.
template <class B, class T, bool read_again = false, class Row = T*>
struct OutputPack {
  Pack<T, B::pack> value;
  Row row;

  __device__ explicit OutputPack(Row row) : row(row) {}

  template <class At>
  __device__ LoadedPack<B, T> store(const At& at) const {
    if constexpr (present<T>) store_where<B>(at.live, row + at.column, value);
    return value;
  }
};

struct PartAt {
  index_t column;
  bool live;
};
// Calls f(at) for each part of a pack. Only a CPU cuts a pack into several parts.
template <class B, class F>
__device__ inline void for_each_part(index_t column, index_t end, F f) {
  f(PartAt{column, inside(column, end)});
}

struct ItemAt {
  int index;
  bool live, loaded;
};
// Calls f(at) for every item of a pack, even if the pack is outside the row (not live): its items
// were loaded as zeros, and they are not stored.
template <class B, class At, class F>
__device__ inline void for_each_item(const At& at, F f) {
#pragma unroll
  for (int i = 0; i < items_per_pack<B>; ++i) f(ItemAt{i, at.live, at.live});
}

// Two bfloat16 share a word, and one instruction converts either of them.
template <class B, class T>
__device__ inline typename B::compute_t read_element(const Pack<T, B::pack>& pack, int index) {
  using C = typename B::compute_t;
  if constexpr (same_type<T, bf16> && B::pack % 2 == 0) {
    unsigned word;
    memcpy(&word, &pack.item[index / 2 * 2], sizeof(word));
    return convert<C>(__uint_as_float(index % 2 ? word & 0xffff0000 : word << 16));
  }
  return convert<C>(pack.item[index]);
}
template <class B, class T>
__device__ inline Item<B> read(const Pack<T, B::pack>& pack, ItemAt at) {
  if constexpr (paired<B>)
    return {read_element<B>(pack, 2 * at.index), read_element<B>(pack, 2 * at.index + 1)};
  else
    return read_element<B>(pack, at.index);
}
template <class B, class T, bool read_again, class Row>
__device__ inline void write(OutputPack<B, T, read_again, Row>& pack, ItemAt at, Item<B> v) {
  if constexpr (paired<B>) {
    pack.value.item[2 * at.index] = convert<T>(v.low);
    pack.value.item[2 * at.index + 1] = convert<T>(v.high);
  } else {
    pack.value.item[at.index] = convert<T>(v);
  }
}

// Rounds v as if it were stored in a T.
template <class B, class T>
__device__ inline Item<B> rounded_to(Item<B> v) {
  if constexpr (paired<B>)
    return {convert<float>(convert<T>(v.low)), convert<float>(convert<T>(v.high))};
  else
    return convert<Item<B>>(convert<T>(v));
}

// Replaces an item outside the row by 0.
template <class B>
__device__ inline Item<B> clear_outside(Item<B> v, ItemAt at) {
  return at.loaded ? v : Item<B>{};
}
