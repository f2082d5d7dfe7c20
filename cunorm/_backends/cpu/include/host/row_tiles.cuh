// SPDX-License-Identifier: MIT
// Strided rows on a CPU. A thread copies some neighbouring rows of an operand, which lie side by
// side, to a tile: memory of its own where each row is one run. The kernels read rows of tiles, and
// write rows of tiles, which are copied to the results.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <new>

#include "operands.cuh"
#include "shared.h"
#include "simd_first.h"
#include "simd_transpose.h"

// The memory of a thread's tiles, which is kept from call to call.
struct TileMemory {
  static constexpr int max_tiles = 8;
  void* data[max_tiles] = {};
  std::size_t sizes[max_tiles] = {};

  void* take(int tile, std::size_t size) {
    if (sizes[tile] < size) {
      std::free(data[tile]);
      sizes[tile] = 0;
      data[tile] = std::aligned_alloc(64, (size + 63) / 64 * 64);
      if (data[tile] == nullptr) throw std::bad_alloc();
      sizes[tile] = size;
    }
    return data[tile];
  }
  ~TileMemory() {
    for (void* one : data) std::free(one);
  }
};
SHARED { inline thread_local TileMemory tile_memory; }

// As many rows as one line of the caches has elements of a column.
template <class T>
inline constexpr int tile_rows = 64 / int(sizeof(T));

// Copies some rows that lie side by side between an operand and a tile, in blocks of rows and
// columns that registers transpose. Lines that later tiles need are prefetched.
template <class T>
struct TileCopy {
  using Bits = typename simd::BlockRow<sizeof(T)>::type;
  static constexpr int block = sizeof(Bits) / sizeof(T);
  static constexpr int ahead = 128 / sizeof(T);  // the rows from a load to its prefetch (measured)

  T* first;             // of the rows
  index_t step, width;  // from column to column, and the number of columns
  T* tile;
  index_t pitch;  // from row to row of the tile
  int count;      // of the rows, at most `block`

  template <bool to_tile>
  void copy() const {
    for (index_t column = 0; column < width; column += block) {
      const int columns = int(std::min<index_t>(block, width - column));
      if (count < block / 4)
        copy_one_by_one<to_tile>(column, columns);
      else if (count == block && columns == block)
        copy_block<to_tile, true>(column, columns);
      else
        copy_block<to_tile, false>(column, columns);
    }
  }

 private:
  T* in_operand(index_t column) const { return first + column * step; }
  T* in_tile(int row, index_t column) const { return tile + row * pitch + column; }

  template <bool to_tile>
  void copy_one_by_one(index_t column, int columns) const {
    for (int i = 0; i < count; ++i)
      for (int j = 0; j < columns; ++j) {
        T &of_tile = *in_tile(i, column + j), &of_operand = in_operand(column + j)[i];
        if constexpr (to_tile)
          of_tile = of_operand;
        else
          of_operand = of_tile;
      }
  }
  // The rows of a tile have room for whole blocks of columns.
  template <bool to_tile, bool is_whole>
  void copy_block(index_t column, int columns) const {
    Bits rows[block];
    unrolled<block>([&](int i) {
      if constexpr (to_tile)
        rows[i] = load_column<is_whole>(column + i, i < columns);
      else
        rows[i] = is_whole || i < count ? simd::load_bits<Bits>(in_tile(i, column)) : Bits{};
    });
    simd::transpose(rows);
    unrolled<block>([&](int i) {
      if constexpr (!to_tile)
        store_column<is_whole>(column + i, i < columns, rows[i]);
      else if (is_whole || i < count)
        simd::store_bits(in_tile(i, column), rows[i]);
    });
  }
  template <bool is_whole>
  Bits load_column(index_t column, bool exists) const {
    const T* const from = in_operand(column);
    if (!is_whole && !exists) return Bits{};
    __builtin_prefetch(from + ahead, 0);
    return is_whole ? simd::load_bits<Bits>(from) : simd::load_first<Bits>(from, count);
  }
  template <bool is_whole>
  void store_column(index_t column, bool exists, Bits v) const {
    T* const to = in_operand(column);
    if (!is_whole && !exists) return;
    __builtin_prefetch(to + block, 1);
    if constexpr (is_whole)
      simd::store_bits(to, v);
    else
      simd::store_first(to, v, count);
  }
};

// The tiles of the operands of a walk. An operand is known by its address.
template <class Walk>
struct RowTiles {
  struct Tile {
    const void* operand = nullptr;
    void* data = nullptr;
    index_t begin = 0, end = 0;                         // rows of the walk
    void (*store)(const Walk&, const Tile&) = nullptr;  // of a result
  };
  Tile tiles[TileMemory::max_tiles];
  int count = 0;

  // Returns row `number` of an operand; `last` is the end of the thread's rows.
  template <class T, int axes>
  T* row(const Walk& walk, const SteppedRows<T, axes>& operand, index_t number, index_t last) {
    Tile& tile = tile_of(&operand);
    if (number < tile.begin || number >= tile.end) {
      finish(walk, tile);
      tile.data = tile_memory.take(int(&tile - tiles), tile_rows<T>* pitch(walk) * sizeof(T));
      tile.begin = number;
      tile.end = std::min(number + tile_rows<T>, last);
      if constexpr (same_type<T, const T>)
        copy<true>(walk, tile, operand);
      else
        tile.store = [](const Walk& walk, const Tile& tile) {
          using Operand = const SteppedRows<T, axes>;
          walk.tiles.template copy<false>(walk, tile, *static_cast<Operand*>(tile.operand));
        };
    }
    return static_cast<T*>(tile.data) + (number - tile.begin) * pitch(walk);
  }
  // Copies the last tiles to the results.
  void finish(const Walk& walk) {
    for (int i = 0; i < count; ++i) finish(walk, tiles[i]);
    count = 0;
  }

 private:
  static index_t pitch(const Walk& walk) { return (walk.width + 15) / 16 * 16 + 16; }

  Tile& tile_of(const void* operand) {
    for (int i = 0; i < count; ++i)
      if (tiles[i].operand == operand) return tiles[i];
    tiles[count] = {operand};
    return tiles[count++];
  }
  static void finish(const Walk& walk, Tile& tile) {
    if (tile.store != nullptr) tile.store(walk, tile);
    tile.store = nullptr;
  }
  // Copies the rows of a tile, in runs of rows that lie side by side.
  template <bool to_tile, class T, int axes>
  void copy(const Walk& walk, const Tile& tile, const SteppedRows<T, axes>& operand) const {
    using Stored = std::remove_const_t<T>;
    const auto row = [&](index_t number) {
      return const_cast<Stored*>(operand.at(walk.share.row_index(number)));
    };
    for (index_t begin = tile.begin, end; begin < tile.end; begin = end) {
      Stored* const first = row(begin);
      const index_t limit = std::min<index_t>(tile.end, begin + TileCopy<Stored>::block);
      for (end = begin + 1; end < limit && row(end) == first + (end - begin);) ++end;
      Stored* const in_tile = static_cast<Stored*>(tile.data) + (begin - tile.begin) * pitch(walk);
      TileCopy<Stored>{first, operand.step, walk.width, in_tile, pitch(walk), int(end - begin)}
          .template copy<to_tile>();
    }
  }
};
