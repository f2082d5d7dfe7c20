// SPDX-License-Identifier: MIT
// Which group of columns, and which rows of it, a block of a row norm has.
#pragma once
#include "types.cuh"

// The largest number of axes that an index in `Segments` walks. With 0, there are no segments.
#ifndef SEGMENT_AXES
#define SEGMENT_AXES 0
#endif

// In a backward, the rows that share their parameters are a segment. A block has rows of one
// segment. `first` has the first row of each segment, `rows` its rows, counted from the first.
struct Segments {
  index_t count;
  AxesMap first, rows;
};

// A block's segment: its index, its first row, and its rows, counted from the first.
struct Segment {
  int index;
  index_t first;
  AxesMap rows;
};

// A row of x may have several groups of columns, each with its own statistics. Everywhere else in
// the kernels, a row is one group of a row of x. BlockShare has the group and the segment that a
// block takes, and the block's index among the blocks with that group and segment; a cluster counts
// as one block.
template <int segment_axes>
struct BlockShareIn : either<(segment_axes > 0), Segment, absent> {
  int groups, group, block, blocks;

  __device__ BlockShareIn(index_t all_groups, int cluster)
      : groups(int(all_groups)),
        group(int(blockIdx.x) / cluster % groups),
        block(int(blockIdx.x) / cluster / groups),
        blocks(int(gridDim.x) / cluster / groups) {}

  __device__ BlockShareIn(index_t all_groups, int cluster, const Segments& segments)
      : BlockShareIn(all_groups, cluster) {
    blocks /= int(segments.count);
    this->index = block / blocks;
    block %= blocks;
    this->first = segments.first.at<segment_axes>(this->index);
    this->rows = segments.rows;
  }

  // The index of a row of the block's group and segment among all rows of all groups.
  __device__ index_t row_index(index_t row) const {
    if constexpr (segment_axes > 0) row = this->first + this->rows.template at<segment_axes>(row);
    return row * groups + group;
  }
  // The index of the block's row of partial sums (param_sums.cuh).
  __device__ int part() const {
    if constexpr (segment_axes > 0) return this->index * blocks + block;
    return block;
  }
};
using BlockShare = BlockShareIn<SEGMENT_AXES>;
