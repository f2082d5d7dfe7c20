// SPDX-License-Identifier: MIT
// Applies weight and bias to k * r, the normalised row of row_norm_forward.cu:
//
//   n = k * r * (weight + weight_offset) + bias      k * r first rounded to rounded_t, if present
#pragma once
#include "row.cuh"

// Returns where the parameter of a row begins. One row is for all rows of x, with all groups.
template <class T>
__device__ inline T* parameter_of(T* parameter, index_t first_column, index_t) {
  return parameter + first_column;
}
template <class T, int axes>
__device__ inline T* parameter_of(const Rows<T, axes>& parameter, index_t, index_t row) {
  return parameter.at(row);
}

// A thread's part of weight and bias.
template <class B>
struct Parameters {
  ParameterPacks<B, typename B::weight_t> weight;
  ParameterPacks<B, typename B::bias_t> bias;
  typename B::compute_t weight_offset;

  // `row` is the index of a row that has these parameters among the rows of all groups.
  template <class Arguments>
  __device__ Parameters(const Arguments& arguments, const BlockShare& share, index_t row)
      : weight(parameter_of(arguments.weight, share.group * row_width(arguments), row)),
        bias(parameter_of(arguments.bias, share.group * row_width(arguments), row)),
        weight_offset(arguments.weight_offset) {}

  template <class Chunk>
  __device__ void load(const Chunk& chunk) {
    weight.load(chunk);
    bias.load(chunk);
  }

  template <class At, class ItemAt>
  __device__ Item<B> factor(const At& at, ItemAt item) const {
    auto w = read<B>(weight[at], item);
    if constexpr (B::weight_offset) w += weight_offset;
    return w;
  }
  // Returns n, given the k * r that as_rounded returned.
  template <class At, class ItemAt>
  __device__ Item<B> affine(Item<B> k_r, const At& at, ItemAt item) const {
    constexpr bool has_weight = present<typename B::weight_t>;
    if constexpr (has_weight && present<typename B::bias_t>)
      return fma(k_r, factor(at, item), read<B>(bias[at], item));
    if constexpr (has_weight) k_r *= factor(at, item);
    if constexpr (present<typename B::bias_t>) k_r += read<B>(bias[at], item);
    return k_r;
  }
};

// Rounds k * r to rounded_t, if present.
template <class B>
__device__ inline Item<B> as_rounded(Item<B> k_r) {
  if constexpr (present<typename B::rounded_t>) k_r = rounded_to<B, typename B::rounded_t>(k_r);
  return k_r;
}
