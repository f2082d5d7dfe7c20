// SPDX-License-Identifier: MIT
// Runs the blocks of a kernel one after the other, every CUDA thread a fiber.
//
// A warp advances in steps: each lane in turn runs until it waits at a shuffle or barrier, or ends,
// and then all lanes must wait for the same thing. A block advances from barrier to barrier, which
// all of its warps must reach. Anything else is a divergence and ends the launch with a report, as
// do an access outside the arrays and a signal such as SIGSEGV: the fibers are left as they are and
// the next launch starts them anew, so that the process lives on. One launch at a time.
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "emulation.h"
#include "fiber.h"
#include "signal_guard.h"

namespace {

constexpr int warp_size = 32, max_threads = Stacks::count;

// The enumerations are repeated in emulator.py.
enum Order : long long { forward, reversed, random_order };
enum Problem : long long {
  none,
  lanes_diverge,
  warps_diverge,
  partial_mask,
  bad_distance,
  misaligned,
  outside_arrays,
  stack_overflow,
  signalled,
  no_memory,
};
enum State : long long { at_start, at_shuffle, at_warp_barrier, at_block_barrier, at_end };

// Passed from and to Python: all fields are 8 bytes wide.
struct Range {
  const char* begin;
  long long bytes;
  unsigned char* touched;  // one flag for each of the bytes
  long long loaded, stored;
};
struct Report {
  Problem problem = none;
  long long block = 0, thread = 0, other_thread = 0;
  State state = at_start, other_state = at_start;
  unsigned long long address = 0;
  long long bytes = 0;  // of the access
  long long is_store = 0, signal = 0;
};
struct Launch {
  const EmulationKernel* kernel;
  const void* arguments;
  long long grid, block;
  Order order;
  unsigned long long seed;
  Range* ranges;
  long long range_count;
  Report report;
};

struct Fiber {
  Context context;
  State state;
  unsigned detail;  // what the state's meeting must agree on
  int turn;         // which half of the exchange this fiber uses next
};

Stacks stacks;
Fiber fibers[max_threads];
Context host;      // the thread that called emulation_run
Launch* launch;    // null outside a launch
int running = -1;  // the fiber that runs; -1 on the host

// What lanes hand over in a shuffle. Two halves used in turn: a lane may write its next value while
// another has not read the last one, so that one meeting a shuffle is enough.
unsigned long long exchange[2][max_threads];

unsigned long long random_state;
unsigned random_below(unsigned bound) {  // splitmix64
  unsigned long long z = random_state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<unsigned>(((z ^ (z >> 31)) >> 32) * bound >> 32);
}
template <class T>
void shuffle(T* items, int count) {
  for (int i = count - 1; i > 0; --i) std::swap(items[i], items[random_below(i + 1)]);
}
template <class T>
void arrange(T* items, int count, Order order) {
  std::iota(items, items + count, T(0));
  if (order == reversed)
    for (int i = 0; i < count / 2; ++i) std::swap(items[i], items[count - 1 - i]);
  if (order == random_order) shuffle(items, count);
}

bool failed() { return launch->report.problem != none; }

// The first problem ends the launch; from a fiber, without return.
void fail(Report report) {
  report.block = launch->kernel->block_index->x;
  if (running >= 0) report.thread = running;
  launch->report = report;
  if (running >= 0) switch_context(fibers[std::exchange(running, -1)].context, host);
}

// Back to the scheduler, until it resumes this fiber.
void wait(State state, unsigned detail = 0) {
  Fiber& self = fibers[running];
  self.state = state;
  self.detail = detail;
  switch_context(self.context, host);
}

void resume(int thread) {
  launch->kernel->thread_index->x = static_cast<unsigned>(thread);
  running = thread;
  switch_context(host, fibers[thread].context);
  running = -1;
}

void run_fiber() {
  for (;;) {  // a turn for each block
    launch->kernel->run_thread(launch->arguments);
    wait(at_end);
  }
}

void expect_same_state(Problem problem, int first, int other) {
  const Fiber &a = fibers[first], &b = fibers[other];
  if (a.state == b.state && a.detail == b.detail) return;
  Report report = {problem, 0, first, other, a.state, b.state};
  fail(report);
}

// Lets each lane of the warp run to its next meeting, which must be the same for all.
State step_warp(int warp) {
  static int lanes[warp_size];
  const int first = warp * warp_size;
  arrange(lanes, warp_size, launch->order);
  for (int lane : lanes) {
    resume(first + lane);
    if (failed()) return at_end;
  }
  for (int lane = 1; lane < warp_size && !failed(); ++lane)
    expect_same_state(lanes_diverge, first, first + lane);
  return fibers[first].state;
}

// Runs every warp up to the next block barrier or its end: one after the other, or in random order
// in turns of a step.
void advance_warps() {
  int warps[max_threads / warp_size];
  int left = static_cast<int>(launch->block / warp_size);
  arrange(warps, left, launch->order);
  while (left > 0) {
    const int turn = launch->order == random_order ? static_cast<int>(random_below(left)) : 0;
    const State state = step_warp(warps[turn]);
    if (failed()) return;
    if (state != at_block_barrier && state != at_end) continue;
    std::memmove(warps + turn, warps + turn + 1, (--left - turn) * sizeof(int));
  }
}

void run_block(long long block) {
  const EmulationKernel& kernel = *launch->kernel;
  kernel.block_index->x = static_cast<unsigned>(block);
  if (kernel.shared_begin != nullptr)
    std::memset(kernel.shared_begin, 0xff, kernel.shared_end - kernel.shared_begin);
  do {
    advance_warps();
    for (int other = warp_size; other < launch->block && !failed(); other += warp_size)
      expect_same_state(warps_diverge, 0, other);
  } while (!failed() && fibers[0].state != at_end);
}

void run_grid() {
  *launch->kernel->grid_dim = {static_cast<unsigned>(launch->grid), 1, 1};
  *launch->kernel->block_dim = {static_cast<unsigned>(launch->block), 1, 1};
  for (int i = 0; i < launch->block; ++i) {
    fibers[i].turn = 0;
    start_context(fibers[i].context, stacks[i], Stacks::size, run_fiber);
  }
  std::vector<long long> blocks(launch->grid);
  arrange(blocks.data(), static_cast<int>(blocks.size()), launch->order);
  for (long long block : blocks) {
    run_block(block);
    if (failed()) return;
  }
}

void claim_signal(int signal, void* address) {
  if (running < 0) return;
  Report report = {stacks.in_guard_page(address) ? stack_overflow : signalled};
  report.address = reinterpret_cast<unsigned long long>(address);
  report.signal = signal;
  fail(report);
}

void meet(unsigned mask, State state, unsigned detail) {
  if (mask != 0xffffffffu) fail({partial_mask});
  wait(state, detail);
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void emulation_run(Launch* request) {
  launch = request;
  if (stacks.map()) {
    random_state = launch->seed;
    SignalGuard guard(claim_signal);
    run_grid();
  } else {
    launch->report = {no_memory};
  }
  launch = nullptr;
}

void emulation_block_barrier() { wait(at_block_barrier); }

void emulation_warp_barrier(unsigned mask) { meet(mask, at_warp_barrier, 0); }

unsigned long long emulation_shuffle_xor(unsigned mask, unsigned long long bits, unsigned distance,
                                         unsigned size) {
  if (distance >= warp_size) fail({bad_distance});
  Fiber& self = fibers[running];
  auto& values = exchange[self.turn];
  self.turn ^= 1;
  values[running] = bits;
  meet(mask, at_shuffle, distance * 16 + size);
  return values[running ^ distance];
}

void emulation_access(const void* address, unsigned size, unsigned alignment, bool is_store) {
  Report report = {};
  report.address = reinterpret_cast<unsigned long long>(address);
  report.bytes = size;
  report.is_store = is_store;
  if (report.address % alignment != 0) {
    report.problem = misaligned;
    fail(report);
  }
  for (Range* range = launch->ranges; range != launch->ranges + launch->range_count; ++range) {
    const auto offset = static_cast<const char*>(address) - range->begin;
    if (offset < 0 || offset + size > range->bytes) continue;
    (is_store ? range->stored : range->loaded) += size;
    std::memset(range->touched + offset, 1, size);
    return;
  }
  if (launch->range_count > 0) {
    report.problem = outside_arrays;
    fail(report);
  }
}
}
