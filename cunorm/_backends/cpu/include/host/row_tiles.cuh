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

// Copies between rows of an operand and a tile. All loops go along lines of the caches.
template <class T>
struct TileCopy {
  T* rows[tile_rows<T>];
  index_t step, width;  // from column to column, and the number of columns
  T* tile;
  index_t pitch;  // from row to row of the tile
  int count;      // rows

  void load() const {
    visit([](T& in_tile, T& v) { in_tile = v; });
  }
  void store() const {
    visit([](T& in_tile, T& v) { v = in_tile; });
  }

 private:
  static constexpr int block = 16;  // columns

  template <class Copy>
  __forceinline__ void visit(const Copy& copy) const {
    bool side_by_side = count == tile_rows<T>;
    for (int i = 1; i < count; ++i) side_by_side = side_by_side && rows[i] == rows[0] + i;
    for (index_t first = 0; first < width; first += block) {
      if (side_by_side && first + block <= width)
        for (int i = 0; i < tile_rows<T>; ++i)
          for (int j = 0; j < block; ++j)
            copy(tile[i * pitch + first + j], rows[0][(first + j) * step + i]);
      else
        for (int i = 0; i < count; ++i)
          for (index_t column = first; column < std::min(first + block, width); ++column)
            copy(tile[i * pitch + column], rows[i][column * step]);
    }
  }
};

// The tiles of the operands of a walk. An operand is known by its address.
template <class Walk>
struct RowTiles {
  struct Tile {
    const void* operand = nullptr;
    index_t begin = 0, end = 0;                        // rows of the walk
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
      tile.begin = number;
      tile.end = std::min(number + tile_rows<T>, last);
      if constexpr (same_type<T, const T>)
        copy_of(walk, tile, operand).load();
      else
        tile.store = [](const Walk& walk, const Tile& tile) {
          using Operand = const SteppedRows<T, axes>;
          walk.tiles.copy_of(walk, tile, *static_cast<Operand*>(tile.operand)).store();
        };
    }
    return memory<T>(walk, tile) + (number - tile.begin) * pitch(walk);
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
  template <class T>
  T* memory(const Walk& walk, const Tile& tile) const {
    return static_cast<T*>(
        tile_memory.take(int(&tile - tiles), tile_rows<T> * pitch(walk) * sizeof(T)));
  }
  template <class T, int axes>
  auto copy_of(const Walk& walk, const Tile& tile, const SteppedRows<T, axes>& operand) const {
    using Stored = std::remove_const_t<T>;
    TileCopy<Stored> copy{{},           operand.step,        walk.width,
                          memory<Stored>(walk, tile), pitch(walk), int(tile.end - tile.begin)};
    for (int i = 0; i < copy.count; ++i)
      copy.rows[i] = const_cast<Stored*>(operand.at(walk.share.row_index(tile.begin + i)));
    return copy;
  }
};
