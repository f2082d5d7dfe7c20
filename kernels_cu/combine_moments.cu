// SPDX-License-Identifier: MIT
// Combines the moments of the parts into which rows are split, in the order of the parts, by Chan's
// formula (T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating formulae and a pairwise algorithm
// for computing sample variances", 1979):
//
//   delta = mean of the part - mean                 mean of the parts before
//   mean += delta * share                           share = count of the part / count with it
//   m2   += m2 of the part + delta * delta * count before * share
//   rstd  = 1 / sqrt(m2 / count + eps)
//
// Without means, m2 is a sum of squares, and the parts' sums are added. All is computed in double;
// a mean is a sum of two numbers, the rounded mean and a correction. A thread has some rows.
#include "memory.cuh"

struct Build {
  using compute_t = COMPUTE_T;
  static constexpr bool center = CENTER;
  static constexpr int threads = THREADS;
  static constexpr int rows = ROWS;  // of a thread
};

// Part p of an operand begins at data + p * stride.
template <class T>
struct Parts {
  const T* data;
  index_t stride;

  __device__ T at(index_t part, index_t row) const {
    return data == nullptr ? T(0) : data[part * stride + row];
  }
};

template <class B>
struct Arguments {
  using C = typename B::compute_t;
  Parts<C> m2, mean, correction;
  Parts<C> counts;  // null if all parts have `count` elements
  C *mean_out, *rstd, *correction_out;
  index_t parts, rows;
  Number<double> eps, count;
};

// A part of a row.
template <class B>
struct Part {
  using C = typename B::compute_t;
  C count = 0, m2 = 0, mean = 0, correction = 0;

  __device__ void load(const Arguments<B>& arguments, index_t part, index_t row) {
    count = arguments.counts.at(part, 0);
    m2 = arguments.m2.at(part, row);
    if constexpr (B::center) {
      mean = arguments.mean.at(part, row);
      correction = arguments.correction.at(part, row);
    }
  }
};

// A number as the sum of two doubles, of which the second is small.
struct DoublePair {
  double high = 0, low = 0;

  __device__ void add(double v) {
    const double sum = high + v, added = sum - high;
    low += (high - (sum - added)) + (v - added);
    high = sum;
  }
};

// The parts of a row that came before.
template <class B>
struct Combined {
  DoublePair mean;
  double count = 0, m2 = 0;

  __device__ void add(const Part<B>& part, double of_part) {
    const double before = count;
    count += of_part;
    m2 += part.m2;
    if constexpr (B::center) {
      const double share = of_part / count;
      const double high = part.mean - mean.high, low = part.correction - mean.low;
      mean.add(high * share);
      mean.add(low * share);
      m2 += (high + low) * (high + low) * (before * share);
    }
  }
};

template <class B>
__device__ inline void combine(const Arguments<B>& arguments, index_t row) {
  using C = typename B::compute_t;
  constexpr int together = 8;  // parts whose loads begin at once
  const bool are_equal = arguments.counts.data == nullptr;
  Combined<B> found;
  for (index_t first = 0; first < arguments.parts; first += together) {
    Part<B> parts[together];
    unrolled<together>([&](int i) {
      if (first + i < arguments.parts) parts[i].load(arguments, first + i, row);
    });
    unrolled<together>([&](int i) {
      if (first + i < arguments.parts)
        found.add(parts[i], are_equal ? double(arguments.count) : double(parts[i].count));
    });
  }
  arguments.rstd[row] = C(1.0 / sqrt(found.m2 / found.count + arguments.eps));
  if constexpr (B::center) {
    const C rounded = C(found.mean.high + found.mean.low);
    arguments.mean_out[row] = rounded;
    arguments.correction_out[row] = C((found.mean.high - double(rounded)) + found.mean.low);
  }
}

extern "C" __global__ void __launch_bounds__(Build::threads, 1)
    combine_moments(const Arguments<Build> arguments) {
  const index_t first = (index_t(blockIdx.x) * Build::threads + threadIdx.x) * Build::rows;
  for (index_t row = first; row < first + Build::rows && row < arguments.rows; ++row)
    combine(arguments, row);
}
