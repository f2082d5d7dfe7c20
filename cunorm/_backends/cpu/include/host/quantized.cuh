// SPDX-License-Identifier: MIT
// The CPU's quantized.cuh: the results of a chunk of a row.
#pragma once
#include "quantization.cuh"
#include "row.cuh"

template <>
struct Bits<simd::Floats> : Bits<float> {
  using type = decltype(simd::Floats{} == simd::Floats{});
};
template <>
struct Bits<simd::Doubles> : Bits<double> {
  using type = decltype(simd::Doubles{} == simd::Doubles{});
};

// Returns y at an item, as it is stored.
template <class B, class Y, class At>
inline Item<B> stored(const Y& y, At item) {
  return rounded_to<B, typename B::y_t>(y.value.item[item.slot]);
}

// The largest |y| of a run.
template <class B>
struct Magnitudes : ItemReduction<B, Max> {
  template <class At, class Y>
  void add(At at, const Y& y) {
    ItemReduction<B, Max>& items = *this;
    for_each_item<B>(at, [&](auto item) {
      items.add(item, clear_outside<B>(math::fabs(stored<B>(y, item)), item));
    });
  }
};

// Takes the y of a row's chunks, keeps it until it has whole blocks of columns, and stores their q.
template <class B, bool = B::quantizes>
struct ChunkResults {
  using C = typename B::compute_t;
  using Q = typename B::q_t;
  static constexpr int lanes = simd::lanes<C>;
  typedef uint8_t Codes __attribute__((vector_size(lanes)));

  const RowScale<B>& scale;
  Q* q;
  index_t width;
  index_t first = 0, end = 0;  // the columns that are kept
  alignas(64) C kept[(chunk_packs + 1) * B::pack];

  template <class Arguments>
  ChunkResults(const Arguments& arguments, const Row<B>& row, const RowScale<B>& scale)
      : scale(scale), q(row.of(arguments.q)), width(row.walk.width) {}

  template <class Chunk>
  void begin(const Chunk& chunk) {
    if (chunk.first != end) first = chunk.first;  // another thread has the columns between
    end = chunk.end;
  }
  template <class At, class Y>
  void put(At at, Y& y) {
    C* const pack = kept + (at.column - first);
    for_each_item<B>(
        at, [&](auto item) { simd::store_bits(pack + item.index * lanes, stored<B>(y, item)); });
    if constexpr (B::writes_y) y.store(at);
  }
  template <class Chunk>
  void store(const Chunk&) {
    index_t done = first;
    if constexpr (B::block == 0) {
      store_codes(first, end, Divisor<B>(scale.own));
      done = end;
    } else {
      for (; done < end && (done + B::block <= end || end == width); done += B::block) {
        const index_t last = std::min<index_t>(done + B::block, end);
        constexpr bool is_first = true;
        const auto of_block = scale.of_block(magnitude(done, last), done / B::block, is_first);
        store_codes(done, last, Divisor<B>(of_block));
      }
    }
    const index_t left = std::max<index_t>(end - done, 0);
    std::memmove(kept, kept + (done - first), left * sizeof(C));
    first = end - left;
  }

 private:
  // Calls visit(column, count, v) for each vector of columns, whose last one may have less columns.
  template <class Visit>
  void for_each_vector(index_t column, index_t last, const Visit& visit) const {
    for (; column < last; column += lanes) {
      const auto v = simd::load_bits<Item<B>>(kept + (column - first));
      visit(column, int(std::min<index_t>(lanes, last - column)), v);
    }
  }
  C magnitude(index_t column, index_t last) const {
    Item<B> largest = {};
    for_each_vector(column, last, [&](index_t, int count, Item<B> v) {
      const auto magnitude = math::fabs(v);
      largest = Max::of(
          largest, count == lanes ? magnitude : simd::first_elements(magnitude, count, largest));
    });
    return simd::reduce<Max>(largest);
  }
  void store_codes(index_t column, index_t last, const Divisor<B>& divisor) const {
    for_each_vector(column, last, [&](index_t at, int count, Item<B> y) {
      const Codes codes = __builtin_convertvector(code_of<Q>(divisor.quotient(y)), Codes);
      if (count == lanes)
        simd::store_bits(q + at, codes);
      else
        std::memcpy(q + at, &codes, count);
    });
  }
};

// Without quantisation, each y is stored as soon as it is known.
template <class B>
struct ChunkResults<B, false> {
  template <class Arguments>
  ChunkResults(const Arguments&, const Row<B>&, const RowScale<B>&) {}

  template <class Chunk>
  void begin(const Chunk&) {}
  template <class At, class Y>
  void put(At at, Y& y) {
    y.store(at);
  }
  template <class Chunk>
  void store(const Chunk&) {}
};
