// SPDX-License-Identifier: MIT
// Rows on their way to shared memory: while a team computes on a row, its next one is copied.
//
// Two stages take turns, each for one row of every team of the block. No barrier is needed: of a
// stage, a thread reads only what it copied itself, after it has waited for it, and copies to it
// again only after it has read that. The CPU build, whose caches do this, replaces this file.
#pragma once
#include "async_copy.cuh"
#include "row.cuh"

// The packs of one operand in both stages, in the pieces that are copied at a time. Those of
// neighbouring threads are neighbours, so that no two of them wait for the same bank.
template <class B, class T>
struct StagedPacks {
  static constexpr int count = items_per_access<B, T>;
  using Piece = Access<T, count>;
  Piece pieces[2][B::packs][B::pack / count][B::threads];

  __device__ void copy(int stage, int pack, const T* row, index_t column) {
#pragma unroll
    for (int i = 0; i < B::pack / count; ++i)
      async_copy<sizeof(Piece)>(&pieces[stage][pack][i][threadIdx.x], row + column + i * count);
  }

  __device__ LoadedPack<B, T> load(int stage, int pack) const {
    LoadedPack<B, T> out;
#pragma unroll
    for (int i = 0; i < B::pack / count; ++i) {
      const Piece piece = pieces[stage][pack][i][threadIdx.x];
#pragma unroll
      for (int j = 0; j < count; ++j) out.item[i * count + j] = piece.item[j];
    }
    return out;
  }
};
template <class B>
struct StagedPacks<B, absent> {
  __device__ void copy(int, int, const absent*, index_t) {}
  __device__ LoadedPack<B, absent> load(int, int) const { return {}; }
};

template <class B, bool = B::async_copies>
struct StagedRows {
  struct Storage {
    StagedPacks<B, typename B::dy_t> dy;
    StagedPacks<B, typename B::x_t> x;
    StagedPacks<B, typename B::gate_t> gate;
  };

  Storage& storage;
  int stage = 0;  // that is filled next; until then it holds the row that was copied before last

  __device__ explicit StagedRows(Storage& storage) : storage(storage) {}

  // Starts the copies of the thread's packs of a row.
  __device__ void copy(const Team<B>& team, index_t end, const typename B::dy_t* dy,
                       const typename B::x_t* x, const typename B::gate_t* gate) {
#pragma unroll
    for (int i = 0; i < B::packs; ++i) {
      const index_t column = team.column(i);
      if (!inside(column, end)) continue;
      storage.dy.copy(stage, i, dy, column);
      storage.x.copy(stage, i, x, column);
      storage.gate.copy(stage, i, gate, column);
    }
    async_commit();
    stage ^= 1;
  }

  // Waits for the row that was copied before last, and keeps the thread's packs of it.
  template <class Inputs>
  __device__ void take(const Team<B>& team, index_t end, RowPacks<B, Inputs>& row) const {
    async_wait<1>();
#pragma unroll
    for (int i = 0; i < B::packs; ++i) {
      row.kept[i] = {};
      if (inside(team.column(i), end))
        row.kept[i] = {storage.dy.load(stage, i), storage.x.load(stage, i),
                       storage.gate.load(stage, i)};
    }
  }
};

// Of builds whose rows are loaded when they are needed.
template <class B>
struct StagedRows<B, false> {
  struct Storage {};

  __device__ explicit StagedRows(Storage&) {}
};
