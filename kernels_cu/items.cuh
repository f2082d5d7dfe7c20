// SPDX-License-Identifier: MIT
// Items: the items of a pack, converted and held in registers for several uses.
#pragma once
#include "memory.cuh"

template <class B>
using Items = Pack<Item<B>, items_per_pack<B>>;

template <class B, class T, class Column>
__device__ inline auto load_items(const T* row, Column column, index_t end) {
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
__device__ inline void store_items(T* row, Column column, index_t end, const Items<B>& items) {
  OutputPack<B, T, true> output(row, end);
  for_each_item<B>(column, end, [&](auto at) { write(output, at, items.item[at.index]); });
  output.store(column);
}
