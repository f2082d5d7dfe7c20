// SPDX-License-Identifier: MIT
// Runs the kernel KERNEL, and lists of kernels, on several cores. Appended to the kernel's source.
#include <algorithm>
#include <memory>
#include <new>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "new_threads.h"

#define ENTRY_POINT extern "C" __attribute__((visibility("default")))

// The blocks of the grid from the first to before the last; all threads of a gang run the same.
ENTRY_POINT void cunorm_blocks(long long grid, long long first, long long last,
                               const void* arguments, const Gang* threads) {
  gang = *threads;
  const auto& typed = *static_cast<const Arguments<Build>*>(arguments);
  gridDim.x = static_cast<unsigned>(grid);
  for (long long block = first; block < last; ++block) {
    blockIdx.x = static_cast<unsigned>(block);
    KERNEL(typed);
  }
  simd::finish_non_temporal_stores();
}

// A list of kernels to run one after the other: how many tasks, places and words; then these. The
// words are the arguments of all tasks, but for the addresses of arrays.
struct List {
  long long tasks, places, words;
};
// A kernel: cunorm_blocks of its library, how many blocks, at which word its arguments begin, and,
// where threads share blocks, into how many parts a row is cut, or shares of samples there are.
struct Task {
  decltype(&cunorm_blocks) blocks;
  long long grid, arguments, parts;
};
// The word to which the address of an array is added.
struct Place {
  long long word, array;
};

// One of several threads' share of each kernel; `wait` returns when all have done theirs. What is
// too little to share is the first thread's, which calls. Threads share blocks only where there are
// not as many for each; `sums` is memory for sums of parts, of each thread's own and of all.
inline void run_share(const Task* tasks, long long count, const long long* words, double* sums,
                      long long sums_size, int thread, int threads, void (*wait)()) {
  for (long long i = 0; i < count; ++i) {
    const Task& task = tasks[i];
    const bool together = task.parts > 0 && task.grid % threads != 0;
    const Gang gang = together ? Gang{thread, threads, wait, sums, task.parts}
                               : Gang{0, 1, [] {}, sums + (thread + 1) * sums_size, task.parts};
    const long long first = together ? 0 : (task.grid * thread + threads - 1) / threads;
    const long long last =
        together ? task.grid : (task.grid * (thread + 1) + threads - 1) / threads;
    if (i > 0) wait();
    if (first < last) task.blocks(task.grid, first, last, words + task.arguments, &gang);
  }
}

// Runs kernels of any libraries on arrays at these addresses. Returns 0, or 1 where there is no
// memory for that, and nothing was run: no exception may reach the caller, which is no C++.
ENTRY_POINT int cunorm_run(const List* list, const long long* addresses, int threads) try {
  const Task* const tasks = reinterpret_cast<const Task*>(list + 1);
  const Place* const places = reinterpret_cast<const Place*>(tasks + list->tasks);
  const long long* const first = reinterpret_cast<const long long*>(places + list->places);
  std::vector<long long> words(first, first + list->words);
  for (long long i = 0; i < list->places; ++i) words[places[i].word] += addresses[places[i].array];
  long long parts = 0;
  for (long long i = 0; i < list->tasks; ++i) parts = std::max(parts, tasks[i].parts);
  threads = threads_that_start(threads);
  const long long sums_size = Gang::rings * parts;
  const std::unique_ptr<double[]> sums(new double[sums_size * (threads + 1)]);
#ifdef _OPENMP
  // Even a parallel region of one thread would cost more than a small kernel.
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    run_share(tasks, list->tasks, words.data(), sums.get(), sums_size, omp_get_thread_num(),
              omp_get_num_threads(), [] {
#pragma omp barrier
              });
    return 0;
  }
#endif
  run_share(tasks, list->tasks, words.data(), sums.get(), sums_size, 0, 1, [] {});
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}
