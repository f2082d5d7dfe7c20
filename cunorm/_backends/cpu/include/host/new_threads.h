// SPDX-License-Identifier: MIT
// Finds how many threads the system lets a process start. GCC's OpenMP runtime ends the process if
// it cannot start a thread, for lack of memory or at the limit of threads.
#pragma once
#include "shared.h"
#ifdef _OPENMP
#include <pthread.h>

#include <vector>

namespace new_threads {

inline void* pass(void* gate) {
  pthread_mutex_lock(static_cast<pthread_mutex_t*>(gate));
  pthread_mutex_unlock(static_cast<pthread_mutex_t*>(gate));
  return nullptr;
}

// Starts up to `count` threads that are all alive at once, ends them, and returns their number.
inline int started(int count) {
  std::vector<pthread_t> threads(count);
  pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&gate);
  int found = 0;
  while (found < count && pthread_create(&threads[found], nullptr, pass, &gate) == 0) ++found;
  pthread_mutex_unlock(&gate);
  for (int i = 0; i < found; ++i) pthread_join(threads[i], nullptr);
  pthread_mutex_destroy(&gate);
  return found;
}

}  // namespace new_threads

SHARED { inline thread_local int last_threads = 1; }

// Returns how many threads, including the caller, the caller's next parallel region can have. The
// threads of its last region need no trial: OpenMP keeps them, and ends only the threads that a
// smaller region does not use.
inline int threads_that_start(int wanted) {
  if (wanted == 1) return 1;
  if (wanted > last_threads) wanted = last_threads + new_threads::started(wanted - last_threads);
  return last_threads = wanted;
}
#else
inline int threads_that_start(int) { return 1; }
#endif
