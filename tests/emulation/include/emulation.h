// SPDX-License-Identifier: MIT
// Where a compiled kernel and the scheduler meet.
//
// The scheduler is compiled once; a kernel is compiled against this file and linked to it, so that
// a kernel costs little more than its own code. extern "C" throughout, as Python calls both.
#pragma once

#pragma GCC visibility push(default)
extern "C" {

struct EmulationIndex {
  unsigned x = 0, y = 0, z = 0;
};

// What a compiled kernel tells the scheduler.
struct EmulationKernel {
  void (*run_thread)(const void* arguments);
  long long argument_bytes;
  EmulationIndex *thread_index, *block_index, *block_dim, *grid_dim;
  char *shared_begin, *shared_end;  // all __shared__ arrays; null where there are none
};

// What the running CUDA thread asks of the scheduler. A call that finds a fault does not return.
void emulation_block_barrier();
void emulation_warp_barrier(unsigned mask);
// The bits that lane ^ distance handed over; `size` is the size of the type they came from.
unsigned long long emulation_shuffle_xor(unsigned mask, unsigned long long bits, unsigned distance,
                                         unsigned size);
// Checks and counts an access to global memory that is about to happen.
void emulation_access(const void* address, unsigned size, unsigned alignment, bool is_store);
int emulation_cluster_rank();
void emulation_cluster_barrier();
// Reads a __shared__ variable as the block of that rank has it.
void emulation_cluster_load(void* value, const void* address, unsigned size, int rank);
// Copies of `size` bytes, checked and counted when they are made, that arrive at a wait.
void emulation_async_copy(void* shared, const void* global, unsigned size);
void emulation_async_commit();
void emulation_async_wait(unsigned pending);
}
#pragma GCC visibility pop
