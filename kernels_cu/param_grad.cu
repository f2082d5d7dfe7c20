// SPDX-License-Identifier: MIT
// Adds up rows of partial sums (called parts here) for dweight and dbias, in a fixed order, and
// rounds once. Two or more parts are added up in float64, because there may be thousands.
//
// A gradient has a row for each segment of its parameter, which is the sum of some of the parts.
//
// A block takes some columns of one of the two gradients. Its threads form part_threads rows of
// column_threads threads. A thread adds every part_threads-th part of its columns; then the first
// row of threads adds the sums of the other rows, in order.
#include "memory.cuh"
#include "ptx.cuh"

#ifndef SEGMENTED
#define SEGMENTED false
#define DGATE_T absent
#define SCALAR_GATE false
#endif

struct Build {
  using sums_t = COMPUTE_T;
  using compute_t = TOTAL_T;
  using dweight_t = DWEIGHT_T;
  using dbias_t = DBIAS_T;
  using dgate_t = DGATE_T;
  static constexpr bool segmented = SEGMENTED;      // not: one segment, which has all parts
  static constexpr bool scalar_gate = SCALAR_GATE;  // dgate has one element for each segment
  static constexpr bool accumulate = ACCUMULATE;    // add to what dweight and dbias hold
  static constexpr int column_threads = COLUMN_THREADS;
  static constexpr int part_threads = PART_THREADS;
  static constexpr int pack = PACK;  // columns per thread
  static constexpr int access = 1;
  static constexpr bool can_pair = false;
  struct Scratch {
    compute_t sums[part_threads][column_threads][pack];
  };
};

// The parts of a gradient: `first` has the first part of each segment, `rest` the segment's parts,
// counted from the first.
struct Parts {
  index_t segments, parts;
  AxesMap first, rest;
};
template <class B>
struct SegmentedArguments {
  Parts dweight_parts, dbias_parts, dgate_parts;
  const typename B::sums_t* dgate_sums;
  typename B::dgate_t* dgate;
};

template <class B>
struct Arguments : either<B::segmented, SegmentedArguments<B>, absent> {
  const typename B::sums_t *dweight_sums, *dbias_sums;  // part p begins at p * stride
  typename B::dweight_t* dweight;
  typename B::dbias_t* dbias;
  index_t parts, stride, width;
};

// `block` is the block's index among the blocks of this gradient; part i begins at part_at(i).
template <class B, bool accumulate, class T, class PartAt>
__device__ inline void add_parts(const Arguments<B>& arguments, index_t parts, PartAt part_at,
                                 T* gradient, index_t block, typename B::Scratch& scratch) {
  const int column_thread = threadIdx.x % B::column_threads,
            part_thread = threadIdx.x / B::column_threads;
  const index_t column = (block * B::column_threads + column_thread) * B::pack;

  for_each_part<B>(column, arguments.width, [&](auto at) {
    Items<B> sum = {};
#pragma unroll 8
    for (index_t part = part_thread; part < parts; part += B::part_threads) {
      const auto found = load_pack<B>(part_at(part), column, arguments.width);
      for_each_item<B>(at, [&](auto item) { sum.item[item.index] += read<B>(found, item); });
    }

    if constexpr (B::part_threads > 1) {
      for (int i = 0; i < B::pack; ++i) scratch.sums[part_thread][column_thread][i] = sum.item[i];
      __syncthreads();
      if (part_thread > 0) return;
      for (int other = 1; other < B::part_threads; ++other)
        for (int i = 0; i < B::pack; ++i) sum.item[i] += scratch.sums[other][column_thread][i];
    }
    if constexpr (accumulate) {
      const auto before = load_pack<B, T>(gradient, column, arguments.width);
      for_each_item<B>(at, [&](auto item) { sum.item[item.index] += read<B>(before, item); });
    }
    OutputPack<B, T> output(gradient);
    for_each_item<B>(at, [&](auto item) { write(output, item, sum.item[item.index]); });
    output.store(at);
  });
}

// Every block takes columns of one gradient. Blocks of dweight and of dbias take turns.
template <class B>
__device__ inline void add_all(const Arguments<B>& arguments, typename B::Scratch& scratch) {
  constexpr bool both = present<typename B::dweight_t> && present<typename B::dbias_t>;
  const index_t block = blockIdx.x / (both ? 2 : 1);
  const auto add = [&](const typename B::sums_t* sums, auto* gradient) {
    add_parts<B, B::accumulate>(
        arguments, arguments.parts, [&](index_t part) { return sums + part * arguments.stride; },
        gradient, block, scratch);
  };
  if constexpr (present<typename B::dweight_t>)
    if (!both || blockIdx.x % 2 == 0) add(arguments.dweight_sums, arguments.dweight);
  if constexpr (present<typename B::dbias_t>)
    if (!both || blockIdx.x % 2 == 1) add(arguments.dbias_sums, arguments.dbias);
}

// Adds up all columns of all parts: the gradient has one element.
template <class B, class T, class PartAt>
__device__ inline void add_columns(const Arguments<B>& arguments, index_t parts, PartAt part_at,
                                   T* gradient, typename B::Scratch& scratch) {
  const int threads = B::column_threads * B::part_threads;
  typename B::compute_t sum = 0;
  for (index_t part = 0; part < parts; ++part)
    for (index_t column = threadIdx.x; column < arguments.width; column += threads)
      sum += convert<typename B::compute_t>(part_at(part)[column]);
  const int column_thread = threadIdx.x % B::column_threads,
            part_thread = threadIdx.x / B::column_threads;
  scratch.sums[part_thread][column_thread][0] = sum;
  if constexpr (B::part_threads > 1) __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < threads; ++i)
    sum += scratch.sums[i / B::column_threads][i % B::column_threads][0];
  *gradient = convert<T>(sum);
}

// Every block takes columns of a segment of one gradient: first come the blocks of dweight, then
// those of dbias and dgate.
template <class B>
__device__ inline void add_segments(const Arguments<B>& arguments, typename B::Scratch& scratch) {
  constexpr index_t columns = B::column_threads * B::pack;
  const index_t row_blocks = (arguments.width + columns - 1) / columns;
  index_t block = blockIdx.x;
  // Calls visit(segment, block of the segment, part_at) if the block is one of the next gradient's.
  const auto next = [&](const Parts& parts, const typename B::sums_t* sums, index_t blocks,
                        const auto& visit) {
    const index_t segment = block / blocks;
    if (block >= 0 && segment < parts.segments)
      visit(segment, block % blocks, [&](index_t part) {
        return sums + (parts.first.at<2>(segment) + parts.rest.at<2>(part)) * arguments.stride;
      });
    block -= parts.segments * blocks;
  };
  const auto add = [&](const Parts& parts, const typename B::sums_t* sums, auto* gradient) {
    next(parts, sums, row_blocks, [&](index_t segment, index_t of_segment, const auto& part_at) {
      add_parts<B, B::accumulate>(arguments, parts.parts, part_at,
                                  gradient + segment * arguments.width, of_segment, scratch);
    });
  };
  if constexpr (present<typename B::dweight_t>)
    add(arguments.dweight_parts, arguments.dweight_sums, arguments.dweight);
  if constexpr (present<typename B::dbias_t>)
    add(arguments.dbias_parts, arguments.dbias_sums, arguments.dbias);
  if constexpr (present<typename B::dgate_t>) {
    const Parts& parts = arguments.dgate_parts;
    next(parts, arguments.dgate_sums, B::scalar_gate ? 1 : row_blocks,
         [&](index_t segment, index_t of_segment, const auto& part_at) {
           auto* const gradient = arguments.dgate;
           if constexpr (B::scalar_gate)
             add_columns<B>(arguments, parts.parts, part_at, gradient + segment, scratch);
           else
             add_parts<B, false>(arguments, parts.parts, part_at,
                                 gradient + segment * arguments.width, of_segment, scratch);
         });
  }
}

extern "C" __global__ void __launch_bounds__(Build::column_threads* Build::part_threads, 1)
    param_grad(const Arguments<Build> arguments) {
  using B = Build;
  __shared__ B::Scratch scratch;
  wait_for_prerequisites();
  if constexpr (B::segmented)
    add_segments(arguments, scratch);
  else
    add_all(arguments, scratch);
}
