// SPDX-License-Identifier: MIT
// Barriers of a block, of some of its threads, of the lanes of a warp, and of a cluster.
#include "lanes.h"

namespace sg {
namespace {

// The operation of an instruction at a block's barrier.
enum BarrierOp : u8 { kSync, kArrive, kAll, kAny, kCount };

u32 waiting(const Warp& w, size_t barrier) {
  u32 lanes = lanes_in(w, State::kAtBarrier);
  for_lanes(lanes, [&](int lane) { lanes &= ~(u32(w.barrier[lane] != barrier) << lane); });
  return lanes;
}

void release(Block& b, size_t barrier) {
  Barrier& bar = b.barriers[barrier];
  const Clock clock = running->watch ? bar.sync.end() : nullptr;
  for (Warp& w : b.warps) {
    const u32 lanes = waiting(w, barrier);
    int pc = -1;
    for_lanes(lanes, [&](int lane) {
      const Instruction& i = w.function->code[size_t(w.pc[lane]) - 1];
      if (i.aligned && (lanes != w.live || (pc >= 0 && pc != w.pc[lane])))
        fail(w, i, lane, 719, "lanes of a warp wait at different barriers");
      pc = w.pc[lane];
      w.state[lane] = State::kRuns;
      if (i.variant >= kAll)
        w.row(i.dest[0])[lane] = u64(i.variant == kCount ? bar.yes
                                     : i.variant == kAll ? bar.yes == bar.arrived
                                                         : bar.yes > 0);
      if (running->watch) set_clock(w, lane, clock);
    });
  }
  bar.arrived = bar.expected = bar.yes = 0;
}

// Releases the threads of a barrier once all expected threads have arrived. If an instruction gives
// no number of threads, all live threads are expected.
void check_block_barriers(Block& b) {
  for (size_t k = 0; k < std::size(b.barriers); ++k) {
    const Barrier& bar = b.barriers[k];
    if (bar.arrived && bar.arrived >= (bar.expected ? bar.expected : b.live)) release(b, k);
  }
}

void check_cluster_barrier(Cluster& c) {
  if (c.live == 0 || c.arrived < c.live) return;
  ++c.phase;
  c.arrived = 0;
  if (running->watch) c.clock = c.sync.end();
  for (Block& b : c.blocks)
    for (Warp& w : b.warps)
      for_lanes(lanes_in(w, State::kAtCluster), [&](int lane) {
        w.state[lane] = State::kRuns;
        if (running->watch && w.function->code[size_t(w.pc[lane]) - 1].variant)
          join_clock(w, lane, c.clock);
      });
}

// bar.warp.sync orders memory; shuffles do not.
void warp_sync(Warp& w, const Instruction&, u32 lanes) {
  if (!running->watch) return;
  SyncPoint sync;
  for_lanes(lanes, [&](int lane) { sync.arrive(w, lane); });
  const Clock clock = sync.end();
  for_lanes(lanes, [&](int lane) { set_clock(w, lane, clock); });
}

u32 members_of(Warp& w, const Instruction& i, int lane) {
  return u32(w.row(i.source[i.members])[lane]);
}

}  // namespace

u32 lanes_in(const Warp& w, State state) {
  u32 out = 0;
  for (int lane = 0; lane < 32; ++lane) out |= u32(w.state[lane] == state) << lane;
  return out & w.live;
}

void arrive_at_block_barrier(Warp& w, const Instruction& i, u32 lanes) {
  const bool reduces = i.variant >= kAll, counted = i.sources - reduces > 1;
  for_lanes(lanes, [&](int lane) {
    const u64 id = u32(w.row(i.source[0])[lane]);
    const int expected = counted ? int(w.row(i.source[1])[lane]) : 0;
    if (id >= std::size(w.block->barriers) || expected % 32)
      fail(w, i, lane, 719, format("barrier %d, of 0 to 15, for %d threads", int(id), expected));
    Barrier& bar = w.block->barriers[id];
    if (bar.arrived && bar.expected != expected)
      fail(w, i, lane, 719, "threads wait at a barrier for different numbers of threads");
    bar.expected = expected;
    ++bar.arrived;
    if (reduces) bar.yes += int(w.row(i.source[i.sources - 1])[lane] & 1);
    if (running->watch) bar.sync.arrive(w, lane);
    if (i.variant == kArrive) return;
    w.state[lane] = State::kAtBarrier;
    w.barrier[lane] = u8(id);
  });
  check_block_barriers(*w.block);
}

void arrive_at_cluster_barrier(Warp& w, const Instruction& i, u32 lanes) {
  Cluster& c = *w.block->cluster;
  for_lanes(lanes, [&](int lane) {
    if (w.cluster_phase[lane] == c.phase + 1)
      fail(w, i, lane, 719, "a thread arrives twice at the cluster's barrier");
    w.cluster_phase[lane] = c.phase + 1;
    ++c.arrived;
    const bool orders = i.variant || (w.published >> lane & 1);
    if (running->watch && orders) c.sync.arrive(w, lane);
    w.published &= ~(1u << lane);
  });
  check_cluster_barrier(c);
}

void wait_at_cluster_barrier(Warp& w, const Instruction& i, u32 lanes) {
  const Cluster& c = *w.block->cluster;
  for_lanes(lanes, [&](int lane) {
    if (w.cluster_phase[lane] == 0)
      fail(w, i, lane, 719, "a thread waits at the cluster's barrier and has not arrived");
    if (w.cluster_phase[lane] > c.phase)
      w.state[lane] = State::kAtCluster;
    else if (running->watch && i.variant)
      join_clock(w, lane, c.clock);
  });
}

bool try_warp_sync(Warp& w, const Instruction& i, u32 lanes) {
  const u32 first = members_of(w, i, __builtin_ctz(lanes));
  bool same = true;
  for_lanes(lanes, [&](int lane) {
    const u32 members = members_of(w, i, lane);
    if (!(members >> lane & 1))
      fail(w, i, lane, 719, format("the lane is not in its own mask 0x%08x", members));
    same &= members == first;
  });
  if (!same || (first & w.live) != lanes) return false;
  i.run(w, i, lanes);
  return true;
}

bool release_waiting_lanes(Warp& w) {
  bool moved = false;
  for (u32 waiting = lanes_in(w, State::kAtWarpSync); waiting;) {
    const int first = __builtin_ctz(waiting);
    const Instruction& i = w.function->code[size_t(w.pc[first])];
    const u32 members = members_of(w, i, first) & w.live;
    u32 here = 0;
    for_lanes(waiting & members, [&](int lane) {
      const bool meets = w.pc[lane] == w.pc[first] && (members_of(w, i, lane) & w.live) == members;
      here |= u32(meets) << lane;
    });
    waiting &= ~(here | 1u << first);
    if (here != members) continue;
    i.run(w, i, here);
    for_lanes(here, [&](int lane) {
      w.state[lane] = State::kRuns;
      ++w.pc[lane];
    });
    moved = true;
  }
  return moved;
}

void end_threads(Warp& w, const Instruction& i, u32 lanes) {
  check_waited(w, i, lanes);
  for_lanes(lanes, [&](int lane) { w.state[lane] = State::kEnded; });
  w.live &= ~lanes;
  w.block->live -= __builtin_popcount(lanes);
  w.block->cluster->live -= __builtin_popcount(lanes);
  if (w.block->live == 0) check_messages(w, i, lanes);
  check_block_barriers(*w.block);
  check_cluster_barrier(*w.block->cluster);
}

bool choose_barrier(Instruction& i, const Opcode& op) {
  i.run = warp_sync;
  if (op.has("warp")) {
    i.kind = kWarpSync;
    return true;
  }
  if (op.has("cluster")) {
    i.kind = op.has("arrive") ? kClusterArrive : kClusterWait;
    i.variant = !op.has("relaxed");  // orders memory
    return true;
  }
  i.kind = kBlockBarrier;
  i.aligned = op.base() == "bar" || op.has("aligned");  // all lanes of a warp arrive together
  i.variant = op.has("arrive") ? kArrive
              : !op.has("red") ? kSync
              : op.has("and")  ? kAll
              : op.has("or")   ? kAny
                               : kCount;
  return true;
}

}  // namespace sg
