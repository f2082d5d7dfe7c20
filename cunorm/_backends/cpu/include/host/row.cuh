// SPDX-License-Identifier: MIT
// The CPU's row.cuh: the operands and results of rows; row_walk.cuh walks the rows. Reading an
// operand prefetches a later row of it.
#pragma once
#include "row_walk.cuh"

// Packs of computed values that a thread holds, of a row or of the rows that it takes at once.
#ifndef HELD_PACKS
#define HELD_PACKS 0
#endif

// With a gate of more than 16 bits, loading is slower than computing with AVX-512.
template <class B>
inline constexpr int held_packs =
    B::reduces && (simd::bytes < 64 || sizeof(typename B::gate_t) < sizeof(typename B::compute_t))
        ? HELD_PACKS
        : 0;

// Passes over a row are so long that memory would idle in one that prefetches nothing.
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

// An operand's row, in memory. Each pack of a later row is prefetched once: in the second pass, in
// the only pass that reads it, or, where passes are long, half of the packs in each pass.
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

// A parameter, the same for all rows.
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

// Copies a part of a pack to the same part of another.
template <class B, class At, class T>
inline void copy_part(At, LoadedPack<B, T>& to, const LoadedPack<B, T>& from) {
  to = from;
}
template <class B, class At, class V, int count>
inline void copy_part(At at, Pack<V, count>& to, const Pack<V, count>& from) {
  for_each_item<B>(at, [&](auto item) { to.item[item.index] = from.item[item.index]; });
}

// What a thread computes of a row in the first pass. It holds that for the second pass if computing
// takes longer than loading. With `hold` the last pack is read back in the first pass, too.
template <class B, class V, bool hold = true>
struct HeldPacks {
  V* packs;
  either<hold, V, absent> last;

  explicit HeldPacks(const Row<B>& row) : packs(kept_packs<V, held_packs<B>>()) {
    if constexpr (held_packs<B> > 0) packs += row.slot * ((row.walk.width + B::pack - 1) / B::pack);
  }
  template <class At>
  void put(At at, const V& pack) {
    static_assert(B::reduces, "else nothing is held, and `held_or` computes");
    if constexpr (hold) copy_part<B>(at, last, pack);
    if constexpr (held_packs<B> > 0) copy_part<B>(at, packs[at.column / B::pack], pack);
  }
  template <class At>
  const V& operator[](At) const {
    return last;
  }
  template <bool second_pass>
  V operator[](PackAt<CutPack, second_pass>) const {
    return last;  // a copy in memory, for a loop
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
