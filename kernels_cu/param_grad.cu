// SPDX-License-Identifier: MIT
// Adds up rows of partial sums (called parts here) for dweight and dbias, in a fixed order, and
// rounds once. Two or more parts are added up in float64, because there may be thousands.
//
// A block takes some columns of one of the two gradients. Its threads form part_threads rows of
// column_threads threads. A thread adds every part_threads-th part of its columns; then the first
// row of threads adds the sums of the other rows, in order.
#include "memory.cuh"
#include "ptx.cuh"

struct Build {
  using sums_t = COMPUTE_T;
  using compute_t = TOTAL_T;
  using dweight_t = DWEIGHT_T;
  using dbias_t = DBIAS_T;
  static constexpr bool accumulate = ACCUMULATE;  // add to what dweight and dbias hold
  static constexpr int column_threads = COLUMN_THREADS;
  static constexpr int part_threads = PART_THREADS;
  static constexpr int pack = PACK;  // columns per thread
  static constexpr int access = 1;
  struct Scratch {
    compute_t sums[part_threads][column_threads][pack];
  };
};

template <class B>
struct Arguments {
  const typename B::sums_t *dweight_sums, *dbias_sums;  // part p begins at p * stride
  typename B::dweight_t* dweight;
  typename B::dbias_t* dbias;
  index_t parts, stride, width;
};

// `block` is the block's index among the blocks of this gradient.
template <class B, class T>
__device__ inline void add_parts(const Arguments<B>& arguments, const typename B::sums_t* sums,
                                 T* gradient, index_t block, typename B::Scratch& scratch) {
  const int column_thread = threadIdx.x % B::column_threads,
            part_thread = threadIdx.x / B::column_threads;
  const index_t column = (block * B::column_threads + column_thread) * B::pack;

  for_each_part<B>(column, arguments.width, [&](auto at) {
    Items<B> sum = {};
#pragma unroll 8
    for (index_t part = part_thread; part < arguments.parts; part += B::part_threads) {
      const auto found = load_pack<B>(sums + part * arguments.stride, column, arguments.width);
      for_each_item<B>(at, [&](auto item) { sum.item[item.index] += read<B>(found, item); });
    }

    if constexpr (B::part_threads > 1) {
      for (int i = 0; i < B::pack; ++i) scratch.sums[part_thread][column_thread][i] = sum.item[i];
      __syncthreads();
      if (part_thread > 0) return;
      for (int other = 1; other < B::part_threads; ++other)
        for (int i = 0; i < B::pack; ++i) sum.item[i] += scratch.sums[other][column_thread][i];
    }
    if constexpr (B::accumulate) {
      const auto before = load_pack<B, T>(gradient, column, arguments.width);
      for_each_item<B>(at, [&](auto item) { sum.item[item.index] += read<B>(before, item); });
    }
    OutputPack<B, T> output(gradient);
    for_each_item<B>(at, [&](auto item) { write(output, item, sum.item[item.index]); });
    output.store(at);
  });
}

extern "C" __global__ void __launch_bounds__(Build::column_threads* Build::part_threads, 1)
    param_grad(const Arguments<Build> arguments) {
  using B = Build;
  __shared__ B::Scratch scratch;
  constexpr bool both = present<B::dweight_t> && present<B::dbias_t>;
  const index_t block = blockIdx.x / (both ? 2 : 1);
  wait_for_prerequisites();
  if constexpr (present<B::dweight_t>)
    if (!both || blockIdx.x % 2 == 0)
      add_parts<B>(arguments, arguments.dweight_sums, arguments.dweight, block, scratch);
  if constexpr (present<B::dbias_t>)
    if (!both || blockIdx.x % 2 == 1)
      add_parts<B>(arguments, arguments.dbias_sums, arguments.dbias, block, scratch);
}
