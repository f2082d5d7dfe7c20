// SPDX-License-Identifier: MIT
// From the normalised row to n: weight, with its offset, and bias.
//
//   n = k * r * (weight + weight_offset) + bias      k * r first rounded to rounded_t, if present
#pragma once
#include "row.cuh"

// The part of weight and bias that belongs to the block's group of columns.
template <class B>
struct Affine {
  using C = typename B::compute_t;
  const typename B::weight_t* weight;
  const typename B::bias_t* bias;
  C offset;

  template <class Arguments>
  __device__ Affine(const Arguments& arguments, const BlockShare& share)
      : weight(arguments.weight + share.group * row_width(arguments)),
        bias(arguments.bias + share.group * row_width(arguments)),
        offset(C(arguments.weight_offset)) {}

  // The factor of an item.
  template <class At>
  __device__ Item<B> factor(const LoadedPack<B, typename B::weight_t>& pack, At at) const {
    const auto w = read<B>(pack, at);
    if constexpr (B::weight_offset)
      return w + offset;
    else
      return w;
  }

  template <class Column>
  __device__ auto load_factors(Column column, index_t end) const {
    if constexpr (!present<typename B::weight_t>) {
      return absent{};
    } else {
      Items<B> out = {};
      const auto pack = load_pack<B>(weight, column, end);
      for_each_item<B>(column, end, [&](auto at) { out.item[at.index] = factor(pack, at); });
      return out;
    }
  }

  template <class Column>
  __device__ auto load_bias(Column column, index_t end) const {
    return load_items<B>(bias, column, end);
  }
};

// k * r as the weight meets it.
template <class B>
__device__ inline Item<B> as_rounded(Item<B> k_r) {
  if constexpr (present<typename B::rounded_t>)
    return rounded_to<B, typename B::rounded_t>(k_r);
  else
    return k_r;
}

// n of k * r as rounded.
template <class B, class Factors, class Bias, class At>
__device__ inline Item<B> affine(Item<B> k_r, const Factors& factors, const Bias& bias, At at) {
  if constexpr (present<typename B::weight_t> && present<typename B::bias_t>)
    return fma(k_r, factors.item[at.index], bias.item[at.index]);
  else if constexpr (present<typename B::weight_t>)
    return k_r * factors.item[at.index];
  else if constexpr (present<typename B::bias_t>)
    return k_r + bias.item[at.index];
  else
    return k_r;
}
