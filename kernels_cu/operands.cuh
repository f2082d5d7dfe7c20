// SPDX-License-Identifier: MIT
// Shared by the forward and the backward of row norms: the macros of a build, and where rows lie.
#pragma once
#include "activations.cuh"
#include "memory.cuh"
#include "segments.cuh"

// The defaults are those of builds without a gate on the branch.
#ifndef BRANCH_GATE
#define BRANCH_GATE false
#define SCALAR_GATE false
#define GATE_AXES ROW_AXES
#endif

struct RowBuild {
  using compute_t = COMPUTE_T;
  using x_t = X_T;
  using gate_t = GATE_T;
  using weight_t = WEIGHT_T;
  using bias_t = BIAS_T;
  using activation = activations::GATE_ACTIVATION;
  using rounded_t = ROUNDED_T;  // k * r is rounded to this type before it is multiplied by weight
  static constexpr bool pre_gate = PRE_GATE;
  static constexpr bool branch_gate = BRANCH_GATE;  // multiplies what is added to the stream
  static constexpr bool scalar_gate = SCALAR_GATE;  // a row's gate is one number
  static constexpr bool post_gate = present<gate_t> && !pre_gate && !branch_gate;
  static constexpr bool center = CENTER;
  static constexpr bool weight_offset = WEIGHT_OFFSET;
  static constexpr index_t width = WIDTH;                  // 0: known only at run time
  static constexpr index_t groups = GROUPS;                // 0: known only at run time
  static constexpr int threads = THREADS;                  // per block
  static constexpr int threads_per_row = THREADS_PER_ROW;  // exceeds `threads` in a cluster
  static constexpr int pack = PACK;                    // elements that a thread handles together
  static constexpr int packs = PACKS;                  // packs that a thread holds at a time
  static constexpr int blocks_per_sm = BLOCKS_PER_SM;  // minimum, for __launch_bounds__
  static constexpr int access = ACCESS;                // elements per memory access
  static constexpr bool can_pair = strided_rows && pack == 2;  // whether an item may be a pair
};

// The largest number of leading axes of an operand. With one axis, finding a row needs no division.
#ifndef ROW_AXES
#define ROW_AXES 3
#endif

// The same for weight and bias. With 0, all rows share one row of each.
#ifndef PARAMETER_AXES
#define PARAMETER_AXES 0
#endif

// Where an operand's rows are; strides are in elements.
template <class T, int axes = ROW_AXES>
struct Rows {
  T* data;
  index_t inner, middle;  // sizes of the last two leading axes
  index_t outer_stride, middle_stride, inner_stride;

  __device__ T* at(index_t row) const {
    if constexpr (!present<T>) return data;
    if (axes == 1 || row < inner) return data + row * inner_stride;
    const index_t rest = row / inner;
    if constexpr (axes == 2)
      return data + rest * middle_stride + (row - rest * inner) * inner_stride;
    return data + (rest / middle) * outer_stride + (rest % middle) * middle_stride +
           (row % inner) * inner_stride;
  }
};

// The rows of x, and of an operand like x.
template <class T, int axes>
struct SteppedRows : Rows<T, axes> {
  index_t step;  // from column to column
};
template <class T, int axes = ROW_AXES>
using RowsLikeX = either<strided_rows, SteppedRows<T, axes>, Rows<T, axes>>;

template <class T>
using GateRows = RowsLikeX<T, GATE_AXES>;

// Where a parameter is: one row, or a row for each row of x, several of which may be the same.
template <class T>
using Parameter = either<PARAMETER_AXES == 0, T*, Rows<T, PARAMETER_AXES>>;

template <template <class> class Arguments, class B>
__device__ inline index_t row_width(const Arguments<B>& arguments) {
  return B::width > 0 ? B::width : arguments.width;
}

template <template <class> class Arguments, class B>
__device__ inline index_t row_groups(const Arguments<B>& arguments) {
  return B::groups > 0 ? B::groups : arguments.groups;
}

// Returns a pack of an operand's row, if it is needed.
template <bool needed, class Packs, class At>
__device__ inline auto pack_if(const Packs& packs, At at) {
  if constexpr (needed)
    return packs[at];
  else
    return absent{};
}

// A pack of which all items are equal.
template <class B>
struct EqualItems {
  Item<B> item;
};
template <class B, class At>
__device__ inline Item<B> read(const EqualItems<B>& items, At) {
  return items.item;
}

template <class B, class Arguments>
__device__ inline typename B::compute_t* dgate_sums_of(const Arguments& arguments) {
  if constexpr (B::dgate_sums) return arguments.dgate_sums;
  return nullptr;
}
