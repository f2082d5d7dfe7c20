// SPDX-License-Identifier: MIT
// What Python asks of the scheduler, and its account of it. All fields are 8 bytes wide.
//
// The enumerations and structures are repeated in emulator.py and errors.py.
#pragma once
#include "emulation.h"

enum Order : long long { forward, reversed, random_order };
enum Problem : long long {
  none,
  lanes_diverge,
  warps_diverge,
  blocks_diverge,
  partial_mask,
  bad_distance,
  bad_rank,
  not_running,
  misaligned,
  outside_arrays,
  outside_shared,
  source_changed,
  never_waited_for,
  stack_overflow,
  signalled,
  no_memory,
};
enum State : long long {
  at_start,
  at_shuffle,
  at_warp_barrier,
  at_block_barrier,
  at_cluster_barrier,
  at_end,
};
enum Access : long long { load, store, load_from_block, copy_to_shared };

struct Range {
  const char* begin;
  long long bytes;
  unsigned char* touched;  // one flag for each of the bytes
  long long loaded, stored;
};
struct Report {
  Problem problem = none;
  long long block = 0, thread = 0, other_block = 0, other_thread = 0;
  State state = at_start, other_state = at_start;
  Access access = load;
  unsigned long long address = 0;
  long long bytes = 0;  // of the access
  long long rank = 0, signal = 0;
};
struct Launch {
  const EmulationKernel* kernel;
  const void* arguments;
  long long grid, block, cluster;
  Order order;
  unsigned long long seed;
  Range* ranges;
  long long range_count;
  Report report;
};
