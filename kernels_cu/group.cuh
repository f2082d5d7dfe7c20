// SPDX-License-Identifier: MIT
// Shared by the forward and the backward of group norm: the macros of a build, where a sample lies
// in memory, and the arithmetic of weight and bias. A line is contiguous in memory: with channels
// last it has the channels of a position, with channels first the positions of a channel.
#pragma once
#include "activations.cuh"
#include "memory.cuh"
#include "ptx.cuh"

struct GroupBuild {
  using compute_t = COMPUTE_T;
  using x_t = X_T;
  using weight_t = WEIGHT_T;
  using bias_t = BIAS_T;
  using activation = activations::ACTIVATION;
  static constexpr bool find = FIND;  // which of the three passes a launch makes
  static constexpr bool combine = COMBINE;
  static constexpr bool write = WRITE;
  static constexpr bool channels_last = CHANNELS_LAST;
  static constexpr index_t channels = CHANNELS;    // 0: known only at run time
  static constexpr index_t groups = GROUPS;        // 0: known only at run time
  static constexpr int unit_groups = UNIT_GROUPS;  // groups per tile
  static constexpr int cluster = CLUSTER;          // blocks that share a unit; 1: no cluster
  static constexpr int threads = THREADS;          // per block
  static constexpr bool can_pair = false;          // whether an item may be a pair
  static constexpr int channel_threads = CHANNEL_THREADS;
  static constexpr int position_threads = POSITION_THREADS;
  static constexpr int blocks_per_sm = BLOCKS_PER_SM;  // minimum, for __launch_bounds__
  static constexpr int pack = PACK;                    // elements that a thread handles together
  static constexpr int access = ACCESS;                // elements per memory access
  static constexpr bool async_copies = ASYNC_COPIES;
  static constexpr bool has_runs = HAS_RUNS;  // whether packs are summed in runs
};

// Whether the launch that finds sums also writes results.
template <class B>
inline constexpr bool one_launch = B::find && B::write;

// Call it before the first access to global memory. Another launch follows if this launch does not
// write, or if its partial sums for dweight and dbias (has_sums) must still be added up.
template <class B, bool has_sums>
__device__ inline void begin_launch() {
  if constexpr (!B::find) wait_for_prerequisites();
  if constexpr (!B::write || has_sums) launch_dependents();
}

// Where an operand's lines are; strides are in elements.
template <class T>
struct Lines {
  T* data;
  index_t sample_stride, line_stride;

  __device__ T* at(index_t sample, index_t line) const {
    return data + sample * sample_stride + line * line_stride;
  }
};

// Whether weight or bias may differ from sample to sample.
#ifndef SAMPLE_PARAMETERS
#define SAMPLE_PARAMETERS false
#endif

// Where a parameter is: a row of channels for all samples, or rows that are a stride apart.
template <class T>
struct SampleRows {
  T* data;
  index_t sample_stride;  // in elements; 0: all samples share one row
};
template <class T>
using Parameter = either<SAMPLE_PARAMETERS, SampleRows<T>, T*>;

// The row of a parameter that the sample of a strip has.
template <class T, class Strip>
__device__ inline T* row_of(T* parameter, const Strip&) {
  return parameter;
}
template <class T, class Strip>
__device__ inline T* row_of(const SampleRows<T>& parameter, const Strip& strip) {
  return parameter.data + strip.whole_sample() * parameter.sample_stride;
}
// Loads a parameter of a strip's channels.
template <class P, class Strip>
__device__ inline auto parameter_of(const P& parameter, const Strip& strip) {
  return strip.parameter(row_of(parameter, strip));
}

// The sizes of a sample, and the number of parts into which its positions are cut.
struct Sizes {
  index_t samples, first_sample;  // samples of the launch; index of the first
  index_t positions, channels, groups;
  index_t part_positions, parts;

  __device__ index_t positions_of(index_t part) const {
    return max(min(positions - part * part_positions, part_positions), index_t(0));
  }
};

// One value for each channel of a thread's packs.
template <class B>
using ChannelItems = either<B::channels_last, Items<B>, Pack<Item<B>, 1>>;

template <class B, class At>
__device__ inline Item<B> of_channel(const ChannelItems<B>& values, At at) {
  return values.item[B::channels_last ? at.index : 0];
}

// Returns f(i) for each channel i of a thread's packs.
template <class B, class F>
__device__ inline ChannelItems<B> for_channels(const F& f) {
  ChannelItems<B> out;
  unrolled<int(sizeof(out) / sizeof(out.item[0]))>([&](int i) { out.item[i] = f(i); });
  return out;
}

template <class B, class Weight>
__device__ inline ChannelItems<B> weighted(const ChannelItems<B>& values, const Weight& weight) {
  if constexpr (present<Weight>)
    return for_channels<B>([&](int i) { return values.item[i] * weight.item[i]; });
  else
    return values;
}

template <class B, class Bias>
__device__ inline Item<B> affine(Item<B> v, Item<B> factor, const Bias& bias, int i) {
  if constexpr (present<typename B::bias_t>)
    return fma(v, factor, bias.item[i]);
  else
    return v * factor;
}
