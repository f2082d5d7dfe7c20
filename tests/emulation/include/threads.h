// SPDX-License-Identifier: MIT
// The CUDA threads of a cluster, each a fiber, of which one runs at a time.
#pragma once
#include <utility>

#include "fiber.h"
#include "launch.h"

struct Fiber {
  Context context;
  State state;
  unsigned detail;  // what the state's meeting must agree on
  int turn;         // which half of the exchange this fiber uses next
};

inline Stacks stacks;
inline Fiber fibers[Stacks::max_count];  // block by block
inline Context host;                     // the thread that called emulation_run
inline Launch* launch;                   // null outside a launch
inline int running = -1;                 // the fiber that runs; -1 on the host
inline long long first_block;            // of the cluster
inline int first_fiber;                  // of the block that has its turn

inline bool failed() { return launch->report.problem != none; }

// The first problem ends the launch; from a fiber, without return. Threads are given as fibers.
inline void fail(Report report) {
  if (running >= 0) report.thread = running;
  report.block = first_block + report.thread / launch->block;
  report.thread %= launch->block;
  report.other_block = first_block + report.other_thread / launch->block;
  report.other_thread %= launch->block;
  launch->report = report;
  if (running >= 0) switch_context(fibers[std::exchange(running, -1)].context, host);
}

// Back to the scheduler, until it resumes this fiber.
inline void wait(State state, unsigned detail = 0) {
  Fiber& self = fibers[running];
  self.state = state;
  self.detail = detail;
  switch_context(self.context, host);
}

inline void resume(int fiber) {
  launch->kernel->thread_index->x = static_cast<unsigned>(fiber - first_fiber);
  running = fiber;
  switch_context(host, fibers[fiber].context);
  running = -1;
}
