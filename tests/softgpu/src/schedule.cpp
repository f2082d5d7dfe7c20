// SPDX-License-Identifier: MIT
// Schedules threads: runs each warp until all its lanes wait or have ended, or until its turn ends.
#include <algorithm>

#include "threads.h"

namespace sg {

namespace {

constexpr int kNobody = INT32_MAX;
constexpr int64_t kTurn = 2000000;  // the most instructions of a warp's turn

u64 next_random() {
  u64& x = running->random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return x;
}

// Lanes that run together from one pc, until the nearest later pc of other lanes.
struct Group {
  u32 lanes;
  int pc, reconvergence = kNobody;
};

void store_pcs(Warp& w, const Group& g) {
  for_lanes(g.lanes, [&](int lane) { w.pc[lane] = g.pc; });
}

int next_pc(const Warp& w, u32 runnable, Schedule schedule) {
  if (schedule == kRandom) {
    for (u64 skip = next_random() % u64(__builtin_popcount(runnable)); skip; --skip)
      runnable &= runnable - 1;
    return w.pc[__builtin_ctz(runnable)];
  }
  int chosen = w.pc[__builtin_ctz(runnable)];
  for_lanes(runnable, [&](int lane) {
    if (w.rotate ? w.pc[lane] > chosen : w.pc[lane] < chosen) chosen = w.pc[lane];
  });
  return chosen;
}

Group next_group(const Warp& w, u32 runnable, Schedule schedule) {
  if (schedule == kSerial || schedule == kReverse) {
    const bool first = (schedule == kSerial) != w.rotate;
    const int lane = first ? __builtin_ctz(runnable) : 31 - __builtin_clz(runnable);
    return {1u << lane, w.pc[lane]};
  }
  Group g{0, next_pc(w, runnable, schedule)};
  for_lanes(runnable, [&](int lane) {
    if (w.pc[lane] == g.pc)
      g.lanes |= 1u << lane;
    else if (w.pc[lane] > g.pc)
      g.reconvergence = std::min(g.reconvergence, w.pc[lane]);
  });
  if (schedule == kRandom && (next_random() & 1)) {
    const u32 part = g.lanes & u32(next_random());
    if (part) g.lanes = part;
  }
  return g;
}

u32 guarded_lanes(Warp& w, const Instruction& i, u32 lanes) {
  if (i.guard < 0) return lanes;
  const u64* const guard = w.row(i.guard);
  u32 yes = 0;
  for (int lane = 0; lane < 32; ++lane) yes |= u32(guard[lane] & 1) << lane;
  return lanes & (i.negate_guard ? ~yes : yes);
}

// The next three functions return whether the group stays together; if not, they set the pcs.
bool branch(Warp& w, const Instruction& i, Group& g, u32 taken) {
  if (taken == g.lanes && g.reconvergence == kNobody) {
    g.pc = i.target;
    return true;
  }
  ++g.pc;
  if (!taken) return true;
  store_pcs(w, g);
  for_lanes(taken, [&](int lane) { w.pc[lane] = i.target; });
  return false;
}

bool sync_lanes(Warp& w, const Instruction& i, Group& g, u32 lanes) {
  ++g.pc;
  if (!lanes || try_warp_sync(w, i, lanes)) return true;
  store_pcs(w, g);
  for_lanes(lanes, [&](int lane) {
    --w.pc[lane];
    w.state[lane] = State::kAtWarpSync;
  });
  release_waiting_lanes(w);
  return false;
}

bool leave_straight_line(Warp& w, const Instruction& i, Group& g, u32 lanes) {
  if (i.kind == kBranch) return branch(w, i, g, lanes);
  if (i.kind == kWarpSync) return sync_lanes(w, i, g, lanes);
  ++g.pc;
  if (!lanes) return true;
  store_pcs(w, g);
  if (i.kind == kExit) end_threads(w, i, lanes);
  if (i.kind == kBlockBarrier) arrive_at_block_barrier(w, i, lanes);
  if (i.kind == kClusterArrive) arrive_at_cluster_barrier(w, i, lanes);
  if (i.kind == kClusterWait) wait_at_cluster_barrier(w, i, lanes);
  if (i.kind == kMbarrierWait) wait_at_mbarrier(w, i, lanes);
  return false;
}

void run_group(Warp& w, Group g, int64_t turn) {
  const Instruction* const code = w.function->code.data();
  for (; g.pc < g.reconvergence && turn > 0; --turn) {
    const Instruction& i = code[g.pc];
    const u32 lanes = guarded_lanes(w, i, g.lanes);
    ++running->issued;
    if (i.kind == kNormal) {
      if (lanes) i.run(w, i, lanes);
      ++g.pc;
    } else if (!leave_straight_line(w, i, g, lanes)) {
      return;
    }
  }
  store_pcs(w, g);
}

// Runs a warp until no lane is runnable or its turn ends. Returns whether anything ran.
bool run_warp(Warp& w, Schedule schedule) {
  const bool random = schedule == kRandom;
  const u64 end = running->issued + (random ? next_random() % 400 + 1 : u64(kTurn));
  bool moved = false;
  for (;;) {
    const u32 runnable = lanes_in(w, State::kRuns);
    if (!runnable) {
      if (!release_waiting_lanes(w)) return moved;
    } else if (running->issued >= end) {
      w.rotate = !w.rotate;
      return true;
    } else {
      const int64_t left = int64_t(end - running->issued);
      run_group(w, next_group(w, runnable, schedule),
                random ? std::min(left, int64_t(next_random() % 100 + 1)) : left);
    }
    moved = true;
  }
}

[[noreturn]] void stuck(Cluster& c) {
  std::string text = format("kernel %s: its threads wait for each other for ever:",
                            running->function->name.c_str());
  int listed = 0;
  for (Block& b : c.blocks)
    for (Warp& w : b.warps) {
      if (!w.live || listed++ == 6) continue;
      const int lane = __builtin_ctz(w.live);
      const int pc = w.pc[lane] - (w.state[lane] == State::kAtWarpSync ? 0 : 1);
      const Instruction& i = w.function->code[size_t(std::max(0, pc))];
      text += format("\n  %s: PTX line %d: %s", place_of(w, lane).c_str(), i.line,
                     w.function->module->line(i.line).c_str());
      if (w.state[lane] == State::kAtMbarrier)
        text += format(" %d arrivals and %d bytes are missing", w.mbarrier[lane]->pending,
                       w.mbarrier[lane]->bytes);
    }
  throw Error{719, text};
}

bool run_each_warp(const std::vector<Warp*>& warps, Schedule schedule) {
  bool moved = false;
  const size_t n = warps.size();
  if (schedule == kRandom)
    for (size_t k = 0; k < n; ++k) moved |= run_warp(*warps[next_random() % n], schedule);
  if (moved) return true;
  for (size_t k = 0; k < n; ++k) {
    Warp& w = *warps[schedule == kReverse ? n - 1 - k : k];
    moved |= run_warp(w, schedule);
    const bool waits = !lanes_in(w, State::kRuns);  // else its turn has ended
    if (moved && waits && schedule != kLockstep)
      return true;  // begins again at the first warp: the first blocks run as far as they can
  }
  return moved;
}

}  // namespace

void run_cluster(Cluster& c) {
  std::vector<Warp*> warps;
  for (Block& b : c.blocks)
    for (Warp& w : b.warps) warps.push_back(&w);
  while (c.live)
    if (!run_each_warp(warps, Schedule(setting(kSchedule))) && c.live) stuck(c);
}

}  // namespace sg
