// SPDX-License-Identifier: MIT
// What both directions of the row norms are compiled for, where rows lie, which of them a block
// has, and what weight and bias do to the normalised row:
//
//   n = k * r * (weight + weight_offset) + bias      k * r first rounded to rounded_t, if present
#pragma once
#include "activations.cuh"
#include "memory.cuh"

struct RowBuild {
  using compute_t = COMPUTE_T;
  using x_t = X_T;
  using gate_t = GATE_T;
  using weight_t = WEIGHT_T;
  using bias_t = BIAS_T;
  using activation = activations::GATE_ACTIVATION;
  using rounded_t = ROUNDED_T;  // of k * r before weight
  static constexpr bool pre_gate = PRE_GATE;
  static constexpr bool post_gate = present<gate_t> && !pre_gate;
  static constexpr bool center = CENTER;
  static constexpr bool weight_offset = WEIGHT_OFFSET;
  static constexpr index_t width = WIDTH;                  // 0: known only at run time
  static constexpr index_t groups = GROUPS;                // the same
  static constexpr int threads = THREADS;                  // of a block
  static constexpr int threads_per_row = THREADS_PER_ROW;  // more: a cluster's
  static constexpr int pack = PACK;                        // elements a thread handles at a time
  static constexpr int packs = PACKS;                      // packs that a thread holds at a time
  static constexpr int blocks_per_sm = BLOCKS_PER_SM;      // that registers must leave room for
  static constexpr int access = ACCESS;                    // elements in one access, by alignment
};

// Where an operand's rows are: up to three leading axes, strides in elements.
template <class T>
struct Rows {
  T* data;
  index_t inner, middle;  // sizes of the last two leading axes
  index_t outer_stride, middle_stride, inner_stride;

  __device__ T* at(index_t row) const {
    if constexpr (!present<T>) return data;
    if (row < inner) return data + row * inner_stride;
    const index_t rest = row / inner;
    return data + (rest / middle) * outer_stride + (rest % middle) * middle_stride +
           (row % inner) * inner_stride;
  }
};

template <template <class> class Arguments, class B>
__device__ inline index_t row_width(const Arguments<B>& arguments) {
  return B::width > 0 ? B::width : arguments.width;
}

template <template <class> class Arguments, class B>
__device__ inline index_t row_groups(const Arguments<B>& arguments) {
  return B::groups > 0 ? B::groups : arguments.groups;
}

// The group of columns that a block, or a cluster of them, has, and its place among the blocks, or
// clusters, that have the same.
//
// Where a row of x falls into groups with statistics of their own, each group's columns are rows
// for themselves: a `row` is always such a one. A block stays with one group, and so with one part
// of the weight.
struct BlockShare {
  index_t groups, group, block, blocks;

  __device__ BlockShare(index_t groups, int cluster)
      : groups(groups),
        group(blockIdx.x / cluster % groups),
        block(blockIdx.x / cluster / groups),
        blocks(gridDim.x / cluster / groups) {}

  // The number, among the rows of all groups, of a row of the block's group.
  __device__ index_t row_index(index_t row) const { return row * groups + group; }
};

// What multiplies k * r, of a pack of weight.
template <class B, class W, class At>
__device__ inline Item<B> factor(const W& weight, typename B::compute_t offset, At at) {
  auto w = read<B>(weight, at);
  if constexpr (B::weight_offset) w += offset;
  return w;
}

// k * r as the weight meets it.
template <class B>
__device__ inline Item<B> as_rounded(Item<B> k_r) {
  if constexpr (present<typename B::rounded_t>) k_r = rounded_to<B, typename B::rounded_t>(k_r);
  return k_r;
}

// n of k * r as rounded.
template <class B, class W, class Bias, class At>
__device__ inline Item<B> affine(Item<B> k_r, const W& weight, typename B::compute_t offset,
                                 const Bias& bias, At at) {
  if constexpr (present<typename B::weight_t> && present<typename B::bias_t>)
    return fma(k_r, factor<B>(weight, offset, at), read<B>(bias, at));
  else if constexpr (present<typename B::weight_t>)
    return k_r * factor<B>(weight, offset, at);
  else if constexpr (present<typename B::bias_t>)
    return k_r + read<B>(bias, at);
  else
    return k_r;
}
