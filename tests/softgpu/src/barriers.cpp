// SPDX-License-Identifier: MIT
// Barriers of a block, of the lanes of a warp, and of a cluster.
#include "lanes.h"

namespace sg {
namespace {

// Releases the threads at the block's barrier once all live threads have arrived.
void check_block_barrier(Block& b) {
  if (!b.arrived || b.arrived < b.live) return;
  b.arrived = 0;
  const Clock clock = running->watch ? b.sync.end() : nullptr;
  for (Warp& w : b.warps) {
    const u32 lanes = lanes_in(w, State::kAtBarrier);
    int pc = -1;
    for_lanes(lanes, [&](int lane) {
      if (pc >= 0 && pc != w.pc[lane])
        fail(w, w.function->code[size_t(w.pc[lane]) - 1], lane, 719,
             "lanes of a warp wait at different barriers");
      pc = w.pc[lane];
      w.state[lane] = State::kRuns;
      if (running->watch) set_clock(w, lane, clock);
    });
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
  Block& b = *w.block;
  for_lanes(lanes, [&](int lane) {
    if (w.row(i.source[0])[lane]) fail(w, i, lane, 719, "only barrier 0 is supported");
    ++b.arrived;
    if (running->watch) b.sync.arrive(w, lane);
    w.state[lane] = State::kAtBarrier;
  });
  check_block_barrier(b);
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
  check_block_barrier(*w.block);
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
  // Only __syncthreads() is supported: the barrier 0 of all threads.
  return op.base() == "bar" && op.has("sync") && i.sources == 1;
}

// --- dependent launches ----------------------------------------------------------------------

// Launches that may begin while the launch before them runs. Each thread must wait for that launch
// before it touches an array. Here that launch has always ended, but a missing wait is still found.

// Variables of modules are not checked: only tests add them, and may touch them before the wait.
void need_waited(Warp& w, const Instruction& i, u32 lanes, u8* const* at) {
  if (__builtin_expect(!running->launch.dependent, 1)) return;
  for_lanes(lanes & ~w.waited, [&](int lane) {
    const Range* const range = range_of(reinterpret_cast<u64>(at[lane]));
    if (range && range->is_array)
      fail(w, i, lane, 719, "a thread touches an array before griddepcontrol.wait");
  });
}

void check_waited(Warp& w, const Instruction& i, u32 lanes) {
  if (!running->launch.dependent) return;
  for_lanes(lanes & ~w.waited, [&](int lane) {
    fail(w, i, lane, 719, "a thread of a dependent launch ends without griddepcontrol.wait");
  });
}

bool choose_grid_control(Instruction& i, const Opcode& op) {
  i.run = [](Warp&, const Instruction&, u32) {};
  if (op.has("wait")) i.run = [](Warp& w, const Instruction&, u32 lanes) { w.waited |= lanes; };
  return op.has("wait") || op.has("launch_dependents");
}

}  // namespace sg
