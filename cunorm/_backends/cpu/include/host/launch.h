// SPDX-License-Identifier: MIT
// Runs KERNEL, and lists of kernels, on several cores. This file is appended to KERNEL's source.
#include <algorithm>
#include <new>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "new_threads.h"

#define ENTRY_POINT extern "C" __attribute__((visibility("default")))

// Runs blocks `first` to `last` - 1 of the grid. All threads of a gang run the same blocks.
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

// The head of a list of kernels to run one after the other. The tasks, slots and words follow. The
// words are the arguments of all tasks, without the addresses of arrays.
struct List {
  long long tasks, slots, words;
};
// A kernel to run: cunorm_blocks of its library, its number of blocks, and the word at which its
// arguments begin. `parts` is the number of parts of a row or of shares of samples; 0: not shared.
struct Task {
  decltype(&cunorm_blocks) blocks;
  long long grid, arguments, parts;
};
// The address of array number `array` is added to word number `word`.
struct Slot {
  long long word, array;
};

// Runs a thread's share of each kernel. `wait` returns when all threads have called it. Threads
// share a kernel's blocks only if they cannot divide the blocks evenly. `sums` is memory for sums
// of parts: first for shared blocks, then for each thread's own blocks. If a kernel has one block
// that is not shared, thread 0, which is the caller, runs it. Returns whether there was memory for
// all tiles (row_tiles.cuh).
inline bool run_share(const Task* tasks, long long count, const long long* words, double* sums,
                      long long sums_size, int thread, int threads, void (*wait)()) {
  bool is_done = true;
  for (long long i = 0; i < count; ++i) {
    const Task& task = tasks[i];
    const bool is_shared = task.parts > 0 && task.grid % threads != 0;
    const Gang gang = is_shared ? Gang{thread, threads, wait, sums, task.parts}
                                : Gang{0, 1, [] {}, sums + (thread + 1) * sums_size, task.parts};
    const long long first = is_shared ? 0 : (task.grid * thread + threads - 1) / threads;
    const long long last =
        is_shared ? task.grid : (task.grid * (thread + 1) + threads - 1) / threads;
    if (i > 0) wait();
    try {
      if (first < last) task.blocks(task.grid, first, last, words + task.arguments, &gang);
    } catch (const std::bad_alloc&) {
      is_done = false;
    }
  }
  return is_done;
}

// Runs kernels of any libraries on arrays at these addresses. Returns 0, or 1 if memory ran out: no
// exception may reach the caller, which is not C++.
ENTRY_POINT int cunorm_run(const List* list, const long long* addresses, int threads) try {
  const Task* const tasks = reinterpret_cast<const Task*>(list + 1);
  const Slot* const slots = reinterpret_cast<const Slot*>(tasks + list->tasks);
  const long long* const first = reinterpret_cast<const long long*>(slots + list->slots);
  std::vector<long long> words(first, first + list->words);
  for (long long i = 0; i < list->slots; ++i) words[slots[i].word] += addresses[slots[i].array];
  long long parts = 0;
  for (long long i = 0; i < list->tasks; ++i) parts = std::max(parts, tasks[i].parts);
  threads = threads_that_start(threads);
  const long long sums_size = Gang::rings * parts;
  std::vector<double> sums(sums_size * (threads + 1));
#ifdef _OPENMP
  // Even a parallel region of one thread would cost more than a small kernel.
  if (threads > 1) {
    bool is_done = true;
#pragma omp parallel num_threads(threads) reduction(&& : is_done)
    is_done = run_share(tasks, list->tasks, words.data(), sums.data(), sums_size,
                        omp_get_thread_num(), omp_get_num_threads(), [] {
#pragma omp barrier
                        });
    return is_done ? 0 : 1;
  }
#endif
  return run_share(tasks, list->tasks, words.data(), sums.data(), sums_size, 0, 1, [] {}) ? 0 : 1;
} catch (const std::bad_alloc&) {
  return 1;
}
