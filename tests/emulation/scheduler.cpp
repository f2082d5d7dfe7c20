// SPDX-License-Identifier: MIT
// Runs the clusters of a kernel one after the other, every CUDA thread a fiber.
//
// A warp advances in steps: each lane in turn runs until it waits at a shuffle or barrier, or ends,
// and then all lanes must wait for the same thing. A block advances from barrier to barrier, which
// all of its warps must reach, and a cluster from cluster barrier to cluster barrier, which all of
// its blocks must reach. Anything else is a divergence and ends the launch with a report, as do an
// access outside the arrays and a signal such as SIGSEGV: the fibers are left as they are and the
// next launch starts them anew, so that the process lives on. One launch at a time.
#include <cstring>
#include <vector>

#include "copy_queue.h"
#include "shared_memory.h"
#include "signal_guard.h"
#include "threads.h"
#include "turns.h"

namespace {

constexpr int warp_size = 32, max_warps = 32, max_cluster = 16;

struct Block {
  int warps[max_warps];  // those that have yet to reach the block's next barrier or its end
  int left;              // how many they are
  bool started, ended;
};

CopyQueue copies[Stacks::max_count];  // by fiber; not in Fiber, which every step touches
Block blocks[max_cluster];
Turns turns;
SharedMemory shared;  // the block that has its turn is the one selected there

// What lanes hand over in a shuffle. Two halves used in turn: a lane may write its next value while
// another has not read the last one, so that one meeting a shuffle is enough.
unsigned long long exchange[2][Stacks::max_count];

void expect_nothing_under_way() {
  const CopyQueue::Copy* copy = copies[running].oldest();
  if (copy == nullptr) return;
  Report report = {never_waited_for};
  report.address = reinterpret_cast<unsigned long long>(copy->from);
  report.bytes = copy->bytes;
  fail(report);
}

void run_fiber() {
  for (;;) {  // a turn for each cluster
    launch->kernel->run_thread(launch->arguments);
    expect_nothing_under_way();
    wait(at_end);
  }
}

void expect_same_state(Problem problem, int first, int other) {
  const Fiber &a = fibers[first], &b = fibers[other];
  if (a.state == b.state && a.detail == b.detail) return;
  Report report = {problem};
  report.thread = first;
  report.other_thread = other;
  report.state = a.state;
  report.other_state = b.state;
  fail(report);
}

// Lets each lane of the warp run to its next meeting, which must be the same for all.
State step_warp(int first) {
  static int lanes[warp_size];
  turns.arrange(lanes, warp_size);
  for (int lane : lanes) {
    resume(first + lane);
    if (failed()) return at_end;
  }
  for (int lane = 1; lane < warp_size && !failed(); ++lane)
    expect_same_state(lanes_diverge, first, first + lane);
  return fibers[first].state;
}

void start_interval(Block& block) {
  block.left = static_cast<int>(launch->block / warp_size);
  turns.arrange(block.warps, block.left);
}

// Runs a warp of the block for a step.
void step_block(Block& block) {
  const int turn = turns.next(block.left);
  const State state = step_warp(first_fiber + block.warps[turn] * warp_size);
  if (failed()) return;
  if (state == at_block_barrier || state == at_cluster_barrier || state == at_end)
    remove(block.warps, block.left, turn);
}

void select_block(int rank) {
  shared.select(rank);
  first_fiber = rank * static_cast<int>(launch->block);
  launch->kernel->block_index->x = static_cast<unsigned>(first_block + rank);
}

// Runs a block up to the next cluster barrier or its end, one warp after the other; in random order
// warps take turns of a step, and so do the blocks of a cluster. Returns whether the block is
// there.
bool run_turn(int rank) {
  select_block(rank);
  Block& block = blocks[rank];
  block.started = true;
  do {
    step_block(block);
    if (failed()) return true;
    if (block.left > 0) continue;
    for (int other = warp_size; other < launch->block && !failed(); other += warp_size)
      expect_same_state(warps_diverge, first_fiber, first_fiber + other);
    const State state = fibers[first_fiber].state;
    block.ended = state == at_end;
    if (failed() || state != at_block_barrier) return true;
    start_interval(block);
  } while (!turns.interleaved() || launch->cluster == 1);
  return false;
}

// Runs every block up to the next cluster barrier or its end.
void advance_blocks() {
  int ranks[max_cluster];
  int left = static_cast<int>(launch->cluster);
  turns.arrange(ranks, left);
  for (int i = 0; i < left; ++i) start_interval(blocks[i]);
  while (left > 0) {
    const int turn = turns.next(left);
    if (run_turn(ranks[turn])) remove(ranks, left, turn);
    if (failed()) return;
  }
}

void run_cluster(long long cluster) {
  const int size = static_cast<int>(launch->cluster), threads = static_cast<int>(launch->block);
  first_block = cluster * size;
  for (int rank = 0; rank < size; ++rank) blocks[rank].started = blocks[rank].ended = false;
  shared.start(launch->kernel->shared_begin, launch->kernel->shared_end, size);
  do {
    advance_blocks();
    for (int rank = 1; rank < size && !failed(); ++rank)
      expect_same_state(blocks_diverge, 0, rank * threads);
  } while (!failed() && fibers[0].state != at_end);
}

void run_grid() {
  *launch->kernel->grid_dim = {static_cast<unsigned>(launch->grid), 1, 1};
  *launch->kernel->block_dim = {static_cast<unsigned>(launch->block), 1, 1};
  for (int i = 0; i < launch->cluster * launch->block; ++i) {
    fibers[i].turn = 0;
    copies[i].clear();
    start_context(fibers[i].context, stacks[i], Stacks::size, run_fiber);
  }
  std::vector<long long> clusters(launch->grid / launch->cluster);
  turns.arrange(clusters.data(), static_cast<int>(clusters.size()));
  for (long long cluster : clusters) {
    run_cluster(cluster);
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

Report report_of(Access access, const void* address, unsigned size) {
  Report report = {};
  report.access = access;
  report.address = reinterpret_cast<unsigned long long>(address);
  report.bytes = size;
  return report;
}

void expect_aligned(Report report, unsigned alignment) {
  if (report.address % alignment == 0) return;
  report.problem = misaligned;
  fail(report);
}

void expect_shared(Report report, const void* address) {
  if (shared.contains(address, report.bytes)) return;
  report.problem = outside_shared;
  fail(report);
}

void expect_running(int rank) {
  Report report = {};
  report.rank = rank;
  if (rank < 0 || rank >= launch->cluster) {
    report.problem = bad_rank;
    fail(report);
  }
  if (blocks[rank].started && !blocks[rank].ended) return;
  report.problem = not_running;
  report.other_thread = rank * launch->block;
  report.other_state = blocks[rank].ended ? at_end : at_start;
  fail(report);
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void emulation_run(Launch* request) {
  launch = request;
  if (stacks.map(static_cast<int>(launch->cluster * launch->block))) {
    turns = {launch->order, launch->seed};
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
  Report report = report_of(is_store ? store : load, address, size);
  expect_aligned(report, alignment);
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

int emulation_cluster_rank() { return shared.selected(); }

void emulation_cluster_barrier() { wait(at_cluster_barrier); }

void emulation_cluster_load(void* value, const void* address, unsigned size, int rank) {
  expect_running(rank);
  const Report report = report_of(load_from_block, address, size);
  expect_aligned(report, size);
  expect_shared(report, address);
  std::memcpy(value, shared.of_block(rank, address), size);
}

void emulation_async_copy(void* to, const void* from, unsigned size) {
  emulation_access(from, size, size, false);
  const Report report = report_of(copy_to_shared, to, size);
  expect_aligned(report, size);
  expect_shared(report, to);
  copies[running].add(to, from, size);
}

void emulation_async_commit() { copies[running].commit(); }

void emulation_async_wait(unsigned pending) {
  const CopyQueue::Copy* changed = copies[running].wait(pending);
  if (changed == nullptr) return;
  Report report = report_of(load, changed->from, changed->bytes);
  report.problem = source_changed;
  fail(report);
}
}
