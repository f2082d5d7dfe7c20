// SPDX-License-Identifier: MIT
// The CPU's row.cuh: the operands and results of rows; row_walk.cuh walks over the rows. Reading a
// row of an operand prefetches a later row of that operand.
#pragma once
#include "row_walk.cuh"

// How many packs of computed values a thread holds, for the row or rows that it takes at once.
#ifndef HELD_PACKS
#define HELD_PACKS 0
#endif

// With AVX-512 and a gate of compute_t's size, loading held values is slower than computing them.
template <class B>
inline constexpr int held_packs =
    B::reduces && (simd::bytes < 64 || sizeof(typename B::gate_t) < sizeof(typename B::compute_t))
        ? HELD_PACKS
        : 0;

// Whether passes over a row are so long that memory would idle in a pass that prefetches nothing.
#if defined(LONG_PASSES)
template <class B>
inline constexpr bool long_passes = true;
#elif defined(LONG_IF_HELD)
template <class B>
inline constexpr bool long_passes = held_packs<B> > 0;
#else
template <class B>
inline constexpr bool long_passes = false;
#endif

// An operand's row. Unless wide_rows, each pack of a later row is prefetched once: in the second
// pass, or in the only pass that reads the operand. Of two long passes, each prefetches half a row.
template <class B, class T, bool once = false>
struct RowPacks {
  InputRow<const T> row;

  explicit RowPacks(InputRow<const T> row) : row(row) {}
  explicit RowPacks(const T* row) : row{row, row} {}

  template <class Chunk>
  void load(const Chunk&) {}
  template <class At>
  __forceinline__ LoadedPack<B, T> operator[](At at) const {
    constexpr bool split = long_passes<B> && !once;
    if constexpr (!wide_rows && (once || split || At::second_pass))
      if (!split || (at.column / B::pack % 2 == 0) == At::second_pass)
        prefetch_part<B>(row.later, part_column<B>(at.place));
    return {row.data + at.column};
  }
};
template <class B, bool once>
struct RowPacks<B, absent, once> {
  template <class Pointer>
  explicit RowPacks(Pointer) {}
  template <class Chunk>
  void load(const Chunk&) {}
  template <class At>
  LoadedPack<B, absent> operator[](At) const {
    return {};
  }
};

// One number for each row, in place of an operand's packs.
template <class B, class T>
struct ScalarPacks {
  EqualItems<B> items;

  explicit ScalarPacks(InputRow<const T> row)
      : items{broadcast<B>(convert<typename B::compute_t>(*row.data))} {}

  template <class Chunk>
  void load(const Chunk&) {}
  template <class At>
  EqualItems<B> operator[](At) const {
    return items;
  }
};
template <class B, class T, bool once = false>
using GatePacks = either<B::scalar_gate, ScalarPacks<B, T>, RowPacks<B, T, once>>;

template <class B, class T, class At>
inline LoadedPack<B, T> load_at(const T* row, At at) {
  return {row + at.column};
}

// A parameter.
template <class B, class T>
struct ParameterPacks {
  const T* row;

  explicit ParameterPacks(const T* row) : row(row) {}
  template <class Chunk>
  void load(const Chunk&) {}
  template <class At>
  LoadedPack<B, T> operator[](At at) const {
    return load_pack<B>(row, at.column, 0);
  }
};

// Copies a part of a pack to the same part of another pack.
template <class B, class At, class T>
inline void copy_part(At, LoadedPack<B, T>& to, const LoadedPack<B, T>& from) {
  to = from;
}
template <class B, class At, class V, int count>
inline void copy_part(At at, Pack<V, count>& to, const Pack<V, count>& from) {
  for_each_item<B>(at, [&](auto item) { to.item[item.index] = from.item[item.index]; });
}

// The values that a thread computes in the first pass over a row, and holds for the second pass if
// computing takes longer than loading. With `hold`, operator[] returns the pack that was put last.
template <class B, class V, bool hold = true>
struct HeldPacks {
  V* packs;
  either<hold, V, absent> last;

  explicit HeldPacks(const Row<B>& row) : packs(kept_packs<V, held_packs<B>>()) {
    if constexpr (held_packs<B> > 0) packs += row.slot * ((row.walk.width + B::pack - 1) / B::pack);
  }
  template <class At>
  void put(At at, const V& pack) {
    static_assert(B::reduces, "without reductions nothing is held");
    if constexpr (hold) copy_part<B>(at, last, pack);
    if constexpr (held_packs<B> > 0) copy_part<B>(at, packs[at.column / B::pack], pack);
  }
  template <class At>
  const V& operator[](At) const {
    return last;
  }
  template <bool second_pass>
  V operator[](PackAt<CutPack, second_pass>) const {
    return last;  // a copy: the loop over a cut pack would keep `last` itself in memory
  }
  template <class At, class Compute>
  either<(held_packs<B> > 0), const V&, V> held_or(At at, const Compute& compute) const {
    if constexpr (held_packs<B> > 0)
      return packs[at.column / B::pack];
    else
      return compute();
  }
};

template <class B, class T, bool read_again = false>
struct RowOutput : OutputPack<B, T, read_again> {
  explicit RowOutput(T* row) : OutputPack<B, T, read_again>(row, 0) {}

  template <class At>
  LoadedPack<B, T> store(At at) {
    this->end = at.end;
    return OutputPack<B, T, read_again>::store(at.place);
  }
};
template <class B>
struct RowOutput<B, absent, false> {
  explicit RowOutput(absent*) {}
  template <class At>
  void store(At) const {}
};

// A CPU copies no rows to shared memory.
template <class B, class T>
struct StagedPacks {
  explicit StagedPacks(SharedMemory&) {}
};
