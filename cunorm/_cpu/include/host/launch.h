// SPDX-License-Identifier: MIT
// Runs the kernel KERNEL, and lists of kernels, on several cores. Appended to the kernel's source.
#ifdef _OPENMP
#include <omp.h>
#endif

// The blocks of the grid from the first to before the last.
extern "C" void cunorm_blocks(long long grid, long long first, long long last,
                              const void* arguments) {
  const auto& typed = *static_cast<const Arguments<Build>*>(arguments);
  gridDim.x = static_cast<unsigned>(grid);
  for (long long block = first; block < last; ++block) {
    blockIdx.x = static_cast<unsigned>(block);
    KERNEL(typed);
  }
  simd::finish_non_temporal_stores();
}

// A kernel to run: cunorm_blocks of its library, how many blocks, and where in the list its
// arguments begin.
struct Task {
  decltype(&cunorm_blocks) blocks;
  long long grid, arguments;
};

// One of several threads' share of each kernel; `wait` returns when all have done theirs. What is
// too little to share is the first thread's, which calls.
template <class Wait>
inline void run_share(const char* list, int count, int thread, int threads, const Wait& wait) {
  const Task* const tasks = reinterpret_cast<const Task*>(list);
  for (int i = 0; i < count; ++i) {
    const long long grid = tasks[i].grid, first = (grid * thread + threads - 1) / threads;
    const long long last = (grid * (thread + 1) + threads - 1) / threads;
    if (i > 0) wait();
    if (first < last) tasks[i].blocks(grid, first, last, list + tasks[i].arguments);
  }
}

// Runs kernels of any libraries one after the other. `list` begins with their tasks.
extern "C" void cunorm_run(const char* list, int count, int threads) {
#ifdef _OPENMP
  // Even a parallel region of one thread would cost more than a small kernel.
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    run_share(list, count, omp_get_thread_num(), omp_get_num_threads(), [] {
#pragma omp barrier
    });
    return;
  }
#endif
  run_share(list, count, 0, 1, [] {});
}
