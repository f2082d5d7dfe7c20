// SPDX-License-Identifier: MIT
// Shared by both directions of the row norms: the macros of a build, where rows lie, and which rows
// a block has.
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

// The most leading axes of an operand. With one axis, no division finds a row.
#ifndef ROW_AXES
#define ROW_AXES 3
#endif

// Where an operand's rows are; strides are in elements.
template <class T>
struct Rows {
  T* data;
  index_t inner, middle;  // sizes of the last two leading axes
  index_t outer_stride, middle_stride, inner_stride;

  __device__ T* at(index_t row) const {
    if constexpr (!present<T>) return data;
    if (ROW_AXES == 1 || row < inner) return data + row * inner_stride;
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

// The group of columns that a block or cluster has, and its number among the blocks or clusters of
// that group. If a row of x has several groups, each with its own statistics, `row` means one
// group's columns everywhere.
struct BlockShare {
  int groups, group, block, blocks;

  __device__ BlockShare(index_t all_groups, int cluster)
      : groups(int(all_groups)),
        group(int(blockIdx.x) / cluster % groups),
        block(int(blockIdx.x) / cluster / groups),
        blocks(int(gridDim.x) / cluster / groups) {}

  // The number, among the rows of all groups, of a row of the block's group.
  __device__ index_t row_index(index_t row) const { return row * groups + group; }
};
