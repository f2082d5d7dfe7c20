// SPDX-License-Identifier: MIT
// Rows that are too long to be held. A team goes over a row chunk by chunk, in the second pass
// backwards, because the caches still have what was read last. The CPU build replaces this file.
#pragma once
#include "row.cuh"

template <class B>
struct StreamedRow : Row<B> {
  __device__ StreamedRow(const Row<B>& row) : Row<B>(row) {}

  // The number of columns of the first chunk, over all threads.
  static __device__ index_t first_width() { return chunk_width<B>; }

  template <class F>
  __device__ void with_first_chunk(F f) const {
    f(this->chunk(0));
  }
  template <class F>
  __device__ void for_each_next_chunk(F f) const {
    for (index_t begin = chunk_width<B>; begin < B::width; begin += chunk_width<B>)
      f(this->chunk(begin));
  }
  template <class F>
  __device__ void for_each_chunk(F f) const {
    f(this->chunk(0));
    for_each_next_chunk(f);
  }
  template <class F>
  __device__ void for_each_chunk_in_second_pass(F f) const {
    for (index_t begin = (B::width - 1) / chunk_width<B> * chunk_width<B>; begin > 0;
         begin -= chunk_width<B>)
      f(this->chunk(begin));
    f(this->chunk(0));
  }
};

// The values that a thread computed for the chunk it loaded last. The second pass recomputes them.
template <class B, class V, bool hold = true>
struct HeldPacks {
  V packs[B::packs];

  __device__ explicit HeldPacks(const Row<B>&) {}

  __device__ void put(const PackAt<B>& at, const V& pack) { packs[at.index] = pack; }
  __device__ V operator[](const PackAt<B>& at) const { return packs[at.index]; }
  template <class Compute>
  __device__ V held_or(const PackAt<B>&, Compute compute) const {
    return compute();
  }
};

template <class B, class Find, class Write>
__device__ inline void for_each_row(const Walk<B>& walk, Find find, Write write) {
  walk.for_each_row([&](const StreamedRow<B>& row) {
    auto found = find(row);
    write(found, row);
  });
}
