// SPDX-License-Identifier: MIT
// The CPU's group_memory.cuh: what of memory the group norms alone use.
#pragma once
#include "caches.h"
#include "memory.cuh"

template <class B, class T>
using TileOutput = OutputPack<B, T>;

template <class B, class F, class EndChunk>
inline void for_each_column(index_t first, index_t step, index_t end, const F& f,
                            const EndChunk& end_chunk) {
  index_t column = first;
  while (column + B::pack <= end) {
    const index_t last = std::min(column + 15 * step, end - B::pack);
    for (; column <= last; column += step) f(WholeColumn{column});
    end_chunk();
  }
  if (column < end) {
    f(CutColumn{column});
    end_chunk();
  }
}

template <class B, class F>
inline void with_column(index_t column, index_t end, const F& f) {
  if (column + B::pack <= end)
    f(WholeColumn{column});
  else
    f(CutColumn{column});
}

template <class B, class Load>
inline Pack<Item<B>, items_per_pack<B>> load_each(index_t column, index_t end, index_t size,
                                                  const Load& load) {
  typename B::compute_t values[B::pack] = {};
  const index_t last = std::min<index_t>(column + B::pack, end);
  for (index_t group = column / size; group * size < last; ++group) {
    const auto value = load(group);
    const index_t first = std::max(group * size, column);
    for (index_t i = first; i < std::min(last, (group + 1) * size); ++i) values[i - column] = value;
  }
  Pack<Item<B>, items_per_pack<B>> out;
  std::memcpy(&out, values, sizeof(out));
  return out;
}

struct NoEndChunk {
  void operator()() const {}
};

// A pack's items, converted.
template <class B, class T, class Column>
inline auto load_items(const T* row, Column column, index_t end) {
  if constexpr (!present<T>) {
    return absent{};
  } else {
    Items<B> out = {};
    const auto pack = load_pack<B>(row, column, end);
    for_each_item<B>(column, end, [&](auto at) { out.item[at.index] = read<B>(pack, at); });
    return out;
  }
}

// Where the kernel will load them again.
template <class B, class T, class Column>
inline void store_items(T* row, Column column, index_t end, const Items<B>& items) {
  OutputPack<B, T, true> output(row, end);
  for_each_item<B>(column, end, [&](auto at) { write(output, at, items.item[at.index]); });
  output.store(column);
}
