// SPDX-License-Identifier: MIT
// A gang: threads that share blocks because rows are few and long, or because samples are few. Each
// thread has its own parts of every row, or its own strips. launch.h numbers the threads.
#pragma once
#include <algorithm>

#include "shared.h"

// Whether several threads share a row.
#ifdef SHARED_ROWS
inline constexpr bool shared_rows = true;
#else
inline constexpr bool shared_rows = false;
#endif

struct Gang {
  int thread = 0, threads = 1;
  void (*wait)() = nullptr;  // returns when all threads have called it
  double* sums = nullptr;    // `rings` rows with one sum for each part
  long long parts = 1;       // parts of a row, or shares of samples
  long long part = 0;        // the thread's current part; negative: none
  // A thread takes this many neighbouring parts at a time: long sequential reads are quicker.
  long long run = std::max(parts / (8 * threads), 1LL);
  int next_ring = 0;

  // Twice the reductions of a row, of which there are at most six.
  static constexpr int rings = 16;

  // Returns memory for one reduction: a value for each part, 0 for the thread's own parts. The
  // memory is reused only after the thread has waited at least twice.
  template <class C>
  C* ring() {
    C* const found = reinterpret_cast<C*>(sums + next_ring++ % rings * parts);
    for_each_part([&](long long i) { found[i] = 0; });
    return found;
  }

  // Calls f(part) for the thread's parts.
  template <class F>
  void for_each_part(const F& f) const {
    for (long long first = thread * run; first < parts; first += threads * run)
      for (long long i = first; i < std::min(first + run, parts); ++i) f(i);
  }
};

SHARED { inline thread_local Gang gang; }
