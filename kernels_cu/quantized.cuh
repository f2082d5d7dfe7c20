// SPDX-License-Identifier: MIT
// The results of a chunk of a row: y or, if the result is quantised, q and the scales of blocks of
// columns. The CPU build replaces this file.
#pragma once
#include "quantization.cuh"
#include "row.cuh"

// Returns y at an item, as it is stored.
template <class B, class Y>
__device__ inline Item<B> stored(const Y& y, ItemAt item) {
  return read<B>(y.value, item);
}

#if __CUDA_ARCH__ >= 890
__device__ inline unsigned short coded_pair(float low, float high, e4m3) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
__device__ inline unsigned short coded_pair(float low, float high, e5m2) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
inline constexpr bool has_pairs = true;
#else
template <class Q>
__device__ inline unsigned short coded_pair(float, float, Q);
inline constexpr bool has_pairs = false;
#endif

// Returns the codes of quotients, by instructions for float.
template <class Q, class C, int n>
__device__ inline Pack<Q, n> coded(const Pack<C, n>& v) {
  constexpr bool is_float = same_type<C, float>;
  Pack<Q, n> out;
  if constexpr (has_pairs && is_float && !same_type<Q, s8> && n % 2 == 0)
    unrolled<n / 2>([&](int i) {
      const auto codes = coded_pair(v.item[2 * i], v.item[2 * i + 1], Q());
      memcpy(&out.item[2 * i], &codes, sizeof(codes));
    });
  else
    unrolled<n>([&](int i) {
      if constexpr (is_float && same_type<Q, s8>)
        out.item[i].bits = min(max(__float2int_rn(v.item[i]), -127), 127);  // NaN becomes 0
      else
        out.item[i].bits = code_of<Q>(v.item[i]);
    });
  return out;
}

template <class B, bool = B::quantizes>
struct ChunkResults {
  using C = typename B::compute_t;
  using Q = typename B::q_t;
  RowScale<B> scale;
  Q* q;
  Pack<typename B::y_t, B::pack> y[B::packs];

  template <class Arguments>
  __device__ ChunkResults(const Arguments& arguments, const Row<B>& row, const RowScale<B>& scale)
      : scale(scale), q(row.of(arguments.q)) {}

  __device__ void begin(const Chunk<B>&) {}
  // Takes the y of a pack.
  template <class Y>
  __device__ void put(const PackAt<B>& at, Y& result) {
    if constexpr (B::writes_y) result.store(at);
    y[at.index] = result.value;
  }
  // Stores q and the scales of the chunk.
  __device__ void store(const Chunk<B>& chunk) {
    if constexpr (B::block == 0)
      chunk.for_each_pack([&](auto at) { store_pack(at, scale.divisor); });
    else
      store_blocks(chunk);
  }

 private:
  __device__ void store_pack(const PackAt<B>& at, const Divisor<B>& divisor) const {
    Items<B> quotients;
    for_each_item<B>(at, [&](auto item) {
      quotients.item[item.index] = divisor.quotient(read<B>(y[at.index], item));
    });
    store_where<B>(at.live, q + at.column, coded<Q>(quotients));
  }
  // A block of columns is `lanes` packs side by side or, if the team has fewer threads, these packs
  // of `turns` turns.
  __device__ void store_blocks(const Chunk<B>& chunk) const {
    constexpr int packs = B::block / B::pack, threads = Team<B>::threads;
    constexpr int lanes = packs < threads ? packs : threads, turns = packs / lanes;
    static_assert(B::block % B::pack == 0 && packs <= 32, "a warp has a block");
    FilledPack<Max, C, (B::packs + turns - 1) / turns> maxima;
    chunk.for_each_pack([&](auto at) {
      for_each_item<B>(at, [&](auto item) {
        const C v = clear_outside<B, Max>(math::fabs(read<B>(y[at.index], item)), item);
        maxima.item[at.index / turns] = Max::of(maxima.item[at.index / turns], v);
      });
    });
    const auto of_blocks = warp_all_reduce<lanes, Max>(maxima);
    chunk.for_each_pack([&](auto at) {
      const bool is_first = at.live && at.column % B::block == 0;
      store_pack(at,
                 scale.of_block(of_blocks.item[at.index / turns], at.column / B::block, is_first));
    });
  }
};

// Without quantisation, each y is stored as soon as it is known.
template <class B>
struct ChunkResults<B, false> {
  template <class Arguments>
  __device__ ChunkResults(const Arguments&, const Row<B>&, const RowScale<B>&) {}

  __device__ void begin(const Chunk<B>&) {}
  template <class Y>
  __device__ void put(const PackAt<B>& at, Y& result) {
    result.store(at);
  }
  __device__ void store(const Chunk<B>&) const {}
};
