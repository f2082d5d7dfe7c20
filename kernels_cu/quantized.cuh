// SPDX-License-Identifier: MIT
// The results of a chunk of a row: y or, if the result is quantised, q and the scales of blocks of
// columns. The CPU build replaces this file.
#pragma once
#include "quantization.cuh"
#include "row.cuh"

// Returns the larger magnitudes of two pairs of numbers of 16 bits, or NaN, with any signs.
#if __CUDA_ARCH__ >= 860
__device__ inline unsigned larger_magnitudes(unsigned a, unsigned b, fp16) {
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
  return a;
}
__device__ inline unsigned larger_magnitudes(unsigned a, unsigned b, bf16) {
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
  return a;
}
#else
template <class T>  // magnitudes are ordered as integers are, and NaN is the largest
__device__ inline unsigned larger_magnitudes(unsigned a, unsigned b, T) {
  const unsigned low = 0x7fff, high = low << 16;
  return max(a & high, b & high) | max(a & low, b & low);
}
#endif

// The largest |y| of a thread's packs, as a reduction of a team.
template <class B>
struct Magnitudes {
  using Operation = Max;
  using C = typename B::compute_t;
  using T = typename B::y_t;
  Pack<T, B::pack> largest = {};

  template <class Y>
  __device__ void add(const PackAt<B>& at, const Y& y) {
    if (!at.live) return;
    if constexpr (sizeof(T) == 2 && B::pack % 2 == 0) {
      Pack<unsigned, B::pack / 2> all, own;
      memcpy(&all, &largest, sizeof(all));
      memcpy(&own, &y.value, sizeof(own));
      unrolled<B::pack / 2>(
          [&](int i) { all.item[i] = larger_magnitudes(all.item[i], own.item[i], T()); });
      memcpy(&largest, &all, sizeof(all));
    } else {
      unrolled<B::pack>([&](int i) {
        const C a = convert<C>(largest.item[i]), b = convert<C>(y.value.item[i]);
        largest.item[i] = convert<T>(Max::of(a, math::fabs(b)));
      });
    }
  }
  __device__ C result() const {
    C found = 0;
    if constexpr (sizeof(T) == 2 && B::pack % 2 == 0) {
      Pack<unsigned, B::pack / 2> all;
      memcpy(&all, &largest, sizeof(all));
      unrolled<B::pack / 2, 1>(
          [&](int i) { all.item[0] = larger_magnitudes(all.item[0], all.item[i], T()); });
      const auto both = same_bits<Pack<T, B::pack>>(all);
      return Max::of(math::fabs(read_element<B>(both, 0)), math::fabs(read_element<B>(both, 1)));
    }
    unrolled<B::pack>(
        [&](int i) { found = Max::of(found, math::fabs(convert<C>(largest.item[i]))); });
    return found;
  }
};

#if __CUDA_ARCH__ >= 890
inline constexpr bool has_float8 = true;
#else
inline constexpr bool has_float8 = false;
#endif

// Returns the codes of four quotients, the first in the lowest byte.
template <class Q>
__device__ inline unsigned coded_word(const float* v) {
  unsigned codes;
#define CODES(TYPE)               \
  asm("{.reg .b16 low, high;\n\t" \
      "cvt.rn.satfinite." TYPE    \
      "x2.f32 low, %2, %1;\n\t"   \
      "cvt.rn.satfinite." TYPE    \
      "x2.f32 high, %4, %3;\n\t"  \
      "mov.b32 %0, {low, high};}" \
      : "=r"(codes)               \
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]))
  if constexpr (same_type<Q, e4m3>)
    CODES("e4m3");
  else
    CODES("e5m2");
#undef CODES
  return codes;
}

// Returns the codes of quotients, one by one or in words of four. From compute capability 8.9 on,
// instructions make those of floats.
template <class Q, class C, int n>
__device__ inline auto coded(const Pack<C, n>& v) {
  constexpr bool is_float = same_type<C, float>;
  if constexpr (has_float8 && is_float && !same_type<Q, s8> && n % 4 == 0) {
    Pack<unsigned, n / 4> words;
    unrolled<n / 4>([&](int i) { words.item[i] = coded_word<Q>(v.item + 4 * i); });
    return words;
  } else {
    Pack<Q, n> out;
    unrolled<n>([&](int i) {
      if constexpr (is_float && same_type<Q, s8>)
        out.item[i].bits = min(max(__float2int_rn(v.item[i]), -127), 127);  // NaN becomes 0
      else
        out.item[i].bits = code_of<Q>(v.item[i]);
    });
    return out;
  }
}

template <class B, bool = B::quantizes>
struct ChunkResults {
  using C = typename B::compute_t;
  using Q = typename B::q_t;
  RowScale<B> scale;
  Q* q;
  struct {
    Pack<typename B::y_t, B::pack> value;
  } y[B::packs];

  template <class Arguments>
  __device__ ChunkResults(const Arguments& arguments, const Row<B>& row, const RowScale<B>& scale)
      : scale(scale), q(row.of(arguments.q)) {}

  __device__ void begin(const Chunk<B>&) {}
  // Takes the y of a pack.
  template <class Y>
  __device__ void put(const PackAt<B>& at, Y& result) {
    if constexpr (B::writes_y) result.store(at);
    y[at.index].value = result.value;
  }
  // Stores q and the scales of the chunk.
  __device__ void store(const Chunk<B>& chunk) {
    if constexpr (B::block > 0) {
      store_blocks(chunk);
    } else {
      const Divisor<B> divisor(scale.own);
      chunk.for_each_pack([&](auto at) { store_pack(at, divisor); });
    }
  }

 private:
  __device__ void store_pack(const PackAt<B>& at, const Divisor<B>& divisor) const {
    Items<B> quotients;
    for_each_item<B>(at, [&](auto item) {
      quotients.item[item.index] = divisor.quotient(read<B>(y[at.index].value, item));
    });
    store_where<B>(at.live, q + at.column, coded<Q>(same_bits<Pack<C, B::pack>>(quotients)));
  }
  // A block of columns is `lanes` packs side by side or, if the team has fewer threads, these packs
  // of `turns` turns.
  __device__ void store_blocks(const Chunk<B>& chunk) const {
    constexpr int packs = B::block / B::pack, threads = Team<B>::threads;
    constexpr int lanes = packs < threads ? packs : threads, turns = packs / lanes;
    static_assert(B::block % B::pack == 0 && packs <= 32, "a warp has a block");
    constexpr int blocks = (B::packs + turns - 1) / turns;
    Magnitudes<B> of_thread[blocks];
    chunk.for_each_pack([&](auto at) { of_thread[at.index / turns].add(at, y[at.index]); });
    Pack<C, blocks> maxima;
    unrolled<blocks>([&](int i) { maxima.item[i] = of_thread[i].result(); });
    const auto of_blocks = warp_all_reduce<lanes, Max>(maxima);
    chunk.for_each_pack([&](auto at) {
      const bool is_first = at.live && at.column % B::block == 0;
      const C a = of_blocks.item[at.index / turns];
      store_pack(at, Divisor<B>(scale.of_block(a, at.column / B::block, is_first)));
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
