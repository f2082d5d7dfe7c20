// SPDX-License-Identifier: MIT
// Runs the threads of a launch: warps in turn, each until all its lanes wait or have ended.
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "machine.h"

namespace sg {

thread_local Running* running = nullptr;

static std::string place_of(Warp& w, int lane) {
  const Launch& l = *running->launch;
  const unsigned t = unsigned(w.first_thread + lane);
  const Block& b = *w.block;
  return format("kernel %s, block (%u,%u,%u) of (%u,%u,%u), thread (%u,%u,%u) of (%u,%u,%u)",
                running->function->name.c_str(), b.id[0], b.id[1], b.id[2], l.grid[0], l.grid[1],
                l.grid[2], t % l.block[0], t / l.block[0] % l.block[1], t / l.block[0] / l.block[1],
                l.block[0], l.block[1], l.block[2]);
}
void fail(Warp& w, const Ins& i, int lane, int code, const std::string& what) {
  throw Error{code, format("%s: %s\n  PTX line %d: %s", place_of(w, lane).c_str(), what.c_str(),
                           i.line, running->function->module->line(i.line).c_str())};
}

// A race: two accesses to a byte of which one writes, with nothing between that orders them. A
// barrier of the block orders its threads, one of the cluster those of its blocks, and what lanes
// do together those of the warp. Nothing orders other blocks.
static bool ordered(const Touch& then, const Touch& now) {
  if (then.line == 0 || (then.block == now.block && then.thread == now.thread)) return true;
  if (then.atomic && now.atomic) return true;
  if (then.phase != now.phase) {
    const unsigned n = unsigned(running->blocks_in_cluster);
    if (then.block / n == now.block / n) return true;
  }
  if (then.block != now.block) return false;
  return then.barriers != now.barriers ||
         (then.thread / 32 == now.thread / 32 && then.syncs != now.syncs);
}
static void race(Warp& w, const Ins& i, int lane, const Touch& then, bool wrote) {
  fail(w, i, lane, 719,
       format("a race with thread %u of block %llu, which %s there at PTX line %u: %s", then.thread,
              (unsigned long long)then.block, wrote ? "wrote" : "read", then.line,
              running->function->module->line(int(then.line)).c_str()));
}
static void touch(Warp& w, const Ins& i, int lane, Byte* at, u32 bytes, bool write) {
  const Touch now{u32(w.first_thread + lane),
                  w.barriers_passed[lane],
                  w.syncs_passed[lane],
                  u32(w.block->cluster->phase),
                  u32(i.line),
                  w.block->number,
                  i.atomic};
  for (u32 k = 0; k < bytes; ++k) {
    Byte& b = at[k];
    if (!ordered(b.write, now)) race(w, i, lane, b.write, true);
    if (write) {
      for (const Touch& r : b.reads)
        if (!ordered(r, now)) race(w, i, lane, r, false);
      b.write = now;
      b.reads[0] = b.reads[1] = Touch{};
    } else {
      b.reads[ordered(b.reads[0], now) ? 0 : 1] = now;
    }
  }
}
static void touch_global(Warp& w, const Ins& i, int lane, u64 address, u32 bytes, bool write) {
  auto& page = running->bytes[address >> 12];
  if (!page) page.reset(new Byte[4096]);
  touch(w, i, lane, &page[address & 4095], bytes, write);
}

static u8* shared_at(Warp& w, const Ins& i, int lane, u64 address, u32 bytes, Space space,
                     bool write) {
  const u32 rank = u32(address >> kRankShift) & 0xff;
  const u64 offset = address & ((1u << kRankShift) - 1);
  Block* b = w.block;
  if (rank) {
    if (space == kShared && rank - 1 != b->rank)
      fail(w, i, lane, 700, "another block's shared memory is not reached by .shared");
    b = &w.block->cluster->blocks[rank - 1];
    if (b->live == 0)
      fail(w, i, lane, 700,
           format("the shared memory of block %u of the cluster, which has ended", rank - 1));
  }
  if (offset < u64(kReservedShared) || offset + bytes > b->shared.size() + kReservedShared ||
      address >> 32 & 0xffffff)
    fail(w, i, lane, 700,
         format("shared address 0x%llx and %u bytes lie outside of the block's %zu bytes",
                (unsigned long long)(address), bytes, b->shared.size()));
  if (offset % bytes)
    fail(
        w, i, lane, 716,
        format("shared address 0x%llx is not a multiple of %u", (unsigned long long)offset, bytes));
  if (settings().races) {
    b->shared_bytes.resize(b->shared.size());
    touch(w, i, lane, &b->shared_bytes[offset - kReservedShared], bytes, write);
  }
  return b->shared.data() + (offset - kReservedShared);
}

u8* memory_at(Warp& w, const Ins& i, int lane, u64 address, u32 bytes, Space space, bool write) {
  if (space == kGlobal || space == kGeneric || space == kConst) {
    if (__builtin_expect(address - i.begin < i.end - i.begin && address + bytes <= i.end &&
                             i.epoch == ranges_epoch && address % bytes == 0,
                         1)) {
      if (__builtin_expect(settings().races, 0)) touch_global(w, i, lane, address, bytes, write);
      return reinterpret_cast<u8*>(address);
    }
    if (space == kGeneric) {
      const u64 window = address & kWindowBits;
      if (window == kSharedWindow)
        return shared_at(w, i, lane, address & ~kWindowBits, bytes, kSharedCluster, write);
      if (window == kLocalWindow)
        return memory_at(w, i, lane, address & ~kWindowBits, bytes, kLocal, write);
      if (window == kParamWindow) return memory_at(w, i, lane, address, bytes, kParam, write);
    }
    const Range* r = range_of(address);
    const char* what = write ? "write" : "read";
    if (!r || address + bytes > r->end) {
      std::string near;
      const Range* before = range_of(address - 1);
      for (u64 back = 1; !before && back < 65536; back *= 2) before = range_of(address - back);
      if (r)
        near = format("; the allocation at 0x%llx ends after %llu bytes",
                      (unsigned long long)r->begin, (unsigned long long)(r->end - r->begin));
      else if (before)
        near =
            format("; 0x%llx ends before it, after %llu bytes", (unsigned long long)before->begin,
                   (unsigned long long)(before->end - before->begin));
      fail(w, i, lane, 700,
           format("%s of %u bytes at 0x%llx, outside of any allocation%s", what, bytes,
                  (unsigned long long)address, near.c_str()));
    }
    if (write && r->kind == 2 && space == kConst)
      fail(w, i, lane, 700, "constant memory is written");
    if (r->kind == 0 && r->device != running->function->module->device)
      fail(w, i, lane, 700,
           format("%s of memory of device %d by a kernel on device %d", what, r->device,
                  running->function->module->device));
    if (address % bytes)
      fail(w, i, lane, 716,
           format("%s of %u bytes at 0x%llx, which is misaligned", what, bytes,
                  (unsigned long long)address));
    i.begin = r->begin, i.end = r->end, i.epoch = ranges_epoch;
    if (settings().races) touch_global(w, i, lane, address, bytes, write);
    return reinterpret_cast<u8*>(address);
  }
  if (space == kShared || space == kSharedCluster)
    return shared_at(w, i, lane, address & ~kWindowBits, bytes, space, write);
  if (space == kParam && (address & kWindowBits) == kParamWindow) {
    const u64 offset = address & ~kWindowBits;
    if (offset + bytes > running->params_size)
      fail(w, i, lane, 700, "outside of the kernel's parameters");
    if (write) fail(w, i, lane, 700, "a kernel's parameter is written");
    if (offset % bytes) fail(w, i, lane, 716, "a misaligned parameter");
    return const_cast<u8*>(running->params) + offset;
  }
  const u64 offset = address & ~kWindowBits;
  const u64 size = u64(running->function->local);
  if (offset + bytes > size)
    fail(w, i, lane, 700,
         format("local address 0x%llx lies outside of %llu bytes", (unsigned long long)offset,
                (unsigned long long)size));
  if (offset % bytes) fail(w, i, lane, 716, "a misaligned local address");
  return w.local.data() + size * u64(lane) + offset;
}

namespace {

u64 next_random() {
  u64& x = running->random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return x;
}

void ended(Warp& w, u32 mask) {
  w.live &= ~mask;
  const int n = __builtin_popcount(mask);
  w.block->live -= n;
  w.block->cluster->live -= n;
}

// Lets those go on whose barrier is complete.
void look_at_barriers(Block& b, const Ins* by, Warp* from) {
  for (int id = 0; id < 16; ++id) {
    auto& bar = b.barriers[id];
    if (bar.arrived == 0) continue;
    const int expected = bar.expected ? bar.expected : b.live;
    if (bar.arrived < expected) continue;
    (void)by, (void)from;
    int count = 0, all = 1, any = 0;
    for (Warp& w : b.warps)
      for (u32 q = w.live; q; q &= q - 1) {
        const int l = __builtin_ctz(q);
        if (w.state[l] != kAtBarrier || w.barrier[l] != id) continue;
        const Ins& i = running->function->code[size_t(w.pc[l]) - 1];
        if ((i.flags & 15) >= 2) {
          const int source = i.mode - 1;
          const int v = int(w.row(i.s[source])[l] & 1);
          count += v, all &= v, any |= v;
        }
      }
    for (Warp& w : b.warps) {
      int pc = -1;
      for (u32 q = w.live; q; q &= q - 1) {
        const int l = __builtin_ctz(q);
        if (w.state[l] != kAtBarrier || w.barrier[l] != id) continue;
        const Ins& i = running->function->code[size_t(w.pc[l]) - 1];
        if (pc < 0)
          pc = w.pc[l];
        else if (pc != w.pc[l] && (i.flags & 16))
          fail(w, i, l, 719, "lanes of a warp wait at different barriers");
        const int kind = i.flags & 15;
        if (kind >= 2) w.row(i.d[0])[l] = u64(kind == 2 ? all : kind == 3 ? any : count);
        w.state[l] = kRun;
        ++w.barriers_passed[l];
      }
    }
    bar.arrived = bar.expected = 0;
  }
}
void look_at_cluster(Cluster& c) {
  if (c.live == 0 || c.arrived < c.live) return;
  ++c.phase;
  c.arrived = 0;
  for (Block& b : c.blocks)
    for (Warp& w : b.warps)
      for (u32 q = w.live; q; q &= q - 1) {
        const int l = __builtin_ctz(q);
        if (w.state[l] == kAtCluster) w.state[l] = kRun;
      }
}

// Lets lanes go on that wait for each other within the warp and are all there.
bool look_at_lanes(Warp& w, const std::vector<Ins>& code) {
  bool moved = false;
  u32 waiting = 0;
  for (u32 q = w.live; q; q &= q - 1) {
    const int l = __builtin_ctz(q);
    if (w.state[l] == kAtWarpSync) waiting |= 1u << l;
  }
  while (waiting) {
    const int first = __builtin_ctz(waiting);
    const Ins& i = code[size_t(w.pc[first])];
    const u32 members = u32(w.row(i.s[i.target])[first]) & w.live;
    u32 here = 0;
    for (u32 q = waiting; q; q &= q - 1) {
      const int l = __builtin_ctz(q);
      if (w.pc[l] == w.pc[first] && (members >> l & 1) &&
          (u32(w.row(i.s[i.target])[l]) & w.live) == members)
        here |= 1u << l;
    }
    waiting &= ~here;
    if (here != members) continue;
    i.op(w, i, here);
    for (u32 q = here; q; q &= q - 1) {
      const int l = __builtin_ctz(q);
      w.state[l] = kRun;
      ++w.syncs_passed[l];
      ++w.pc[l];
    }
    moved = true;
  }
  return moved;
}

enum Schedule { kLockstep, kSerial, kReverse, kRandom } schedule;

// Runs a warp until no lane of it can; returns whether anything was done.
bool run_warp(Warp& w) {
  const std::vector<Ins>& code = w.function->code;
  bool done_something = false;
  int64_t budget = schedule == kRandom ? int64_t(next_random() % 400 + 1) : 2000000;
  for (;;) {
    u32 able = 0;
    for (u32 q = w.live; q; q &= q - 1) {
      const int l = __builtin_ctz(q);
      if (w.state[l] == kRun) able |= 1u << l;
    }
    if (!able) {
      if (look_at_lanes(w, code)) {
        done_something = true;
        continue;
      }
      return done_something;
    }
    if (budget <= 0) {
      w.rotate = !w.rotate;
      return true;
    }
    done_something = true;
    // The group of lanes that goes on, and the program counter at which it meets others.
    u32 mask = 0;
    int pc = 0, meet = INT32_MAX;
    if (schedule == kSerial || schedule == kReverse) {
      const int l =
          (schedule == kSerial) != w.rotate ? __builtin_ctz(able) : 31 - __builtin_clz(able);
      mask = 1u << l;
      pc = w.pc[l];
    } else {
      int chosen = -1;
      if (schedule == kRandom) {
        int k = int(next_random() % unsigned(__builtin_popcount(able)));
        u32 q = able;
        while (k--) q &= q - 1;
        chosen = w.pc[__builtin_ctz(q)];
      } else {
        for (u32 q = able; q; q &= q - 1) {
          const int p = w.pc[__builtin_ctz(q)];
          if (chosen < 0 || (w.rotate ? p > chosen : p < chosen)) chosen = p;
        }
      }
      pc = chosen;
      for (u32 q = able; q; q &= q - 1) {
        const int l = __builtin_ctz(q);
        if (w.pc[l] == pc)
          mask |= 1u << l;
        else if (w.pc[l] > pc)
          meet = std::min(meet, w.pc[l]);
      }
      if (schedule == kRandom && (next_random() & 1)) {
        const u32 part = mask & u32(next_random());
        if (part) mask = part;
      }
    }
    auto write_back = [&] {
      for (u32 q = mask; q; q &= q - 1) w.pc[__builtin_ctz(q)] = pc;
    };
    int64_t slice = schedule == kRandom ? int64_t(next_random() % 100 + 1) : budget;
    for (;;) {
      if (pc >= meet || --slice < 0 || --budget < 0) {
        write_back();
        break;
      }
      const Ins& i = code[size_t(pc)];
      u32 m = mask;
      if (i.guard >= 0) {
        const u64* g = w.row(i.guard);
        u32 yes = 0;
        for (int l = 0; l < 32; ++l) yes |= u32(g[l] & 1) << l;
        m &= i.negate ? ~yes : yes;
      }
      ++running->instructions;
      if (i.kind == kNormal) {
        if (m) i.op(w, i, m);
        ++pc;
        continue;
      }
      if (i.kind == kBranch) {
        if (m == mask) {
          pc = i.target;
          if (pc <= int(&i - code.data()) || meet != INT32_MAX) {
            // A loop: others may be before or after.
            if (meet != INT32_MAX) {
              write_back();
              break;
            }
          }
          continue;
        }
        if (!m) {
          ++pc;
          continue;
        }
        ++pc;
        write_back();
        for (u32 q = m; q; q &= q - 1) w.pc[__builtin_ctz(q)] = i.target;
        break;
      }
      if (i.kind == kIndexed) {
        for (u32 q = mask; q; q &= q - 1) {
          const int l = __builtin_ctz(q);
          const u32 k = u32(w.row(i.s[0])[l]);
          if (!(m >> l & 1))
            w.pc[l] = pc + 1;
          else if (k >= i.table->size())
            fail(w, i, l, 700, "a branch beyond its table");
          else
            w.pc[l] = (*i.table)[k];
        }
        break;
      }
      if (i.kind == kExit) {
        ++pc;
        write_back();
        if (m) {
          for (u32 q = m; q; q &= q - 1) w.state[__builtin_ctz(q)] = kDone;
          ended(w, m);
          look_at_barriers(*w.block, nullptr, nullptr);
          look_at_cluster(*w.block->cluster);
        }
        break;
      }
      if (i.kind == kTrap) {
        if (m) fail(w, i, __builtin_ctz(m), 719, "a trap");
        ++pc;
        continue;
      }
      if (i.kind == kWarpSync) {
        if (m == mask) {
          const u64* members = w.row(i.s[i.target]);
          const u32 first = u32(members[__builtin_ctz(m)]);
          bool same = true;
          for (u32 q = m; q; q &= q - 1) {
            const int l = __builtin_ctz(q);
            same &= u32(members[l]) == first;
            if (!(u32(members[l]) >> l & 1))
              fail(w, i, l, 719, format("the lane is not in its own mask 0x%08x", u32(members[l])));
          }
          if (same && (first & w.live) == m) {
            i.op(w, i, m);
            for (u32 q = m; q; q &= q - 1) ++w.syncs_passed[__builtin_ctz(q)];
            ++pc;
            continue;
          }
        }
        for (u32 q = mask; q; q &= q - 1) {
          const int l = __builtin_ctz(q);
          if (m >> l & 1) {
            if (!(u32(w.row(i.s[i.target])[l]) >> l & 1))
              fail(w, i, l, 719, "the lane is not in its own mask");
            w.pc[l] = pc;
            w.state[l] = kAtWarpSync;
          } else {
            w.pc[l] = pc + 1;
          }
        }
        look_at_lanes(w, code);
        break;
      }
      // Barriers of a block and of a cluster.
      ++pc;
      write_back();
      if (!m) continue;
      if (i.kind == kBarrier) {
        const bool red = (i.flags & 15) >= 2;
        const int numbers = i.mode - (red ? 1 : 0);
        for (u32 q = m; q; q &= q - 1) {
          const int l = __builtin_ctz(q);
          const u32 id = u32(w.row(i.s[0])[l]);
          const int count = numbers > 1 ? int(w.row(i.s[1])[l]) : 0;
          if (id > 15) fail(w, i, l, 719, format("barrier %u", id));
          auto& bar = w.block->barriers[id];
          if (bar.arrived && bar.expected != count)
            fail(w, i, l, 719, "threads wait at a barrier for different numbers");
          bar.expected = count;
          ++bar.arrived;
          if ((i.flags & 15) != 1) w.state[l] = kAtBarrier, w.barrier[l] = u8(id);
        }
        look_at_barriers(*w.block, &i, &w);
      } else if (i.kind == kClusterArrive) {
        Cluster& c = *w.block->cluster;
        for (u32 q = m; q; q &= q - 1) {
          const int l = __builtin_ctz(q);
          if (w.cluster_phase[l] == c.phase + 1)
            fail(w, i, l, 719, "a thread arrives twice at the cluster's barrier");
          w.cluster_phase[l] = c.phase + 1;
          ++c.arrived;
        }
        look_at_cluster(c);
        if (schedule == kLockstep && w.state[__builtin_ctz(m)] == kRun && m == mask) continue;
      } else {
        Cluster& c = *w.block->cluster;
        for (u32 q = m; q; q &= q - 1) {
          const int l = __builtin_ctz(q);
          if (w.cluster_phase[l] == 0)
            fail(w, i, l, 719, "a thread waits at the cluster's barrier and has not arrived");
          if (w.cluster_phase[l] > c.phase) w.state[l] = kAtCluster;
        }
      }
      break;
    }
  }
}

void stuck(Cluster& c) {
  std::string text = format("kernel %s: its threads wait for each other for ever:",
                            running->function->name.c_str());
  int told = 0;
  for (Block& b : c.blocks)
    for (Warp& w : b.warps)
      for (int l = 0; l < 32 && told < 6; ++l) {
        if (!(w.live >> l & 1)) continue;
        const Ins& i =
            running->function
                ->code[size_t(std::max(0, w.pc[l] - (w.state[l] == kAtWarpSync ? 0 : 1)))];
        text += format("\n  %s: PTX line %d: %s", place_of(w, l).c_str(), i.line,
                       running->function->module->line(i.line).c_str());
        ++told;
        l |= 30;
      }
  throw Error{719, text};
}

void set_up(Warp& w, const Launch& l, const unsigned cluster[3]) {
  Function& f = *w.function;
  const Block& b = *w.block;
  for (auto& [row, value] : f.constants)
    for (int lane = 0; lane < 32; ++lane) w.row(row)[lane] = value;
  for (auto& [name, row] : f.specials) {
    for (int lane = 0; lane < 32; ++lane) {
      const unsigned t = unsigned(w.first_thread + lane);
      const unsigned tid[3] = {t % l.block[0], t / l.block[0] % l.block[1],
                               t / l.block[0] / l.block[1]};
      u64 v = 0;
      const int axis = name.back() == 'y' ? 1 : name.back() == 'z' ? 2 : 0;
      auto starts = [&, &n = name](const char* with) {
        return n.compare(0, strlen(with), with) == 0;
      };
      if (starts("%tid"))
        v = tid[axis];
      else if (starts("%ntid"))
        v = l.block[axis];
      else if (starts("%ctaid"))
        v = b.id[axis];
      else if (starts("%nctaid"))
        v = l.grid[axis];
      else if (starts("%laneid"))
        v = u64(lane);
      else if (starts("%warpid"))
        v = u64(w.first_thread / 32);
      else if (starts("%nwarpid"))
        v = kThreadsPerSm / 32;
      else if (starts("%lanemask_eq"))
        v = 1u << lane;
      else if (starts("%lanemask_lt"))
        v = (1u << lane) - 1;
      else if (starts("%lanemask_le"))
        v = (2ull << lane) - 1;
      else if (starts("%lanemask_gt"))
        v = u32(~((2ull << lane) - 1));
      else if (starts("%lanemask_ge"))
        v = u32(~((1u << lane) - 1));
      else if (starts("%cluster_ctarank"))
        v = b.rank;
      else if (starts("%cluster_nctarank"))
        v = cluster[0] * cluster[1] * cluster[2];
      else if (starts("%cluster_ctaid"))
        v = b.id[axis] % cluster[axis];
      else if (starts("%cluster_nctaid"))
        v = cluster[axis];
      else if (starts("%clusterid"))
        v = b.id[axis] / cluster[axis];
      else if (starts("%nclusterid"))
        v = l.grid[axis] / cluster[axis];
      else if (starts("%is_explicit_cluster"))
        v = cluster[0] * cluster[1] * cluster[2] > 1;
      else if (starts("%dynamic_smem_size"))
        v = l.dynamic_shared;
      else if (starts("%total_smem_size"))
        v = b.shared.size();
      else if (starts("%nsmid"))
        v = u64(settings().sms);
      else if (starts("%smid"))
        v = (b.id[0] + b.id[1] + b.id[2]) % unsigned(settings().sms);
      else if (starts("%clock") || starts("%globaltimer"))
        v = running->instructions;
      w.row(row)[lane] = v;
    }
  }
}

}  // namespace

void launch(Function* f, const Launch& given, const u8* params, size_t size) {
  Launch l = given;
  const std::string& n = f->name;
  const u64 threads = u64(l.block[0]) * l.block[1] * l.block[2];
  const u64 blocks = u64(l.grid[0]) * l.grid[1] * l.grid[2];
  if (blocks == 0 || l.grid[0] > 0x7fffffffu || l.grid[1] > 65535 || l.grid[2] > 65535)
    throw Error{
        1, format("%s: a grid of %u, %u, %u blocks", n.c_str(), l.grid[0], l.grid[1], l.grid[2])};
  if (threads == 0 || threads > kThreadsPerBlock || l.block[2] > 64)
    throw Error{1, format("%s: a block of %u, %u, %u threads", n.c_str(), l.block[0], l.block[1],
                          l.block[2])};
  if (f->required[0] && (l.block[0] != f->required[0] || l.block[1] != f->required[1] ||
                         l.block[2] != f->required[2]))
    throw Error{1, format("%s: a block of %llu threads, another number is required", n.c_str(),
                          (unsigned long long)threads)};
  if (f->max_threads && threads > u64(f->max_threads))
    throw Error{1, format("%s: a block of %llu threads, compiled for at most %d", n.c_str(),
                          (unsigned long long)threads, f->max_threads)};
  if (int64_t(l.dynamic_shared) > f->max_dynamic ||
      f->static_shared + int64_t(l.dynamic_shared) >
          (f->max_dynamic > kStaticShared ? kOptinShared : std::max(f->max_dynamic, kStaticShared)))
    throw Error{1, format("%s: %u bytes of dynamic and %d of static shared memory", n.c_str(),
                          l.dynamic_shared, f->static_shared)};
  unsigned cluster[3] = {1, 1, 1};
  for (int k = 0; k < 3; ++k) {
    if (f->cluster[0]) cluster[k] = f->cluster[k];
    if (l.cluster[k]) {
      if (f->cluster[0] && l.cluster[k] != f->cluster[k])
        throw Error{1, n + ": another cluster than the kernel's"};
      cluster[k] = l.cluster[k];
    }
    if (l.grid[k] % cluster[k])
      throw Error{1, format("%s: a grid of %u blocks, in clusters of %u", n.c_str(), l.grid[k],
                            cluster[k])};
  }
  const unsigned in_cluster = cluster[0] * cluster[1] * cluster[2];
  if (in_cluster > (f->nonportable ? 16u : 8u))
    throw Error{912, format("%s: clusters of %u blocks", n.c_str(), in_cluster)};
  if (l.cooperative && blocks > 1) throw Error{801, n + ": a cooperative launch"};

  const std::string& s = settings().schedule;
  schedule = s == "serial"    ? kSerial
             : s == "reverse" ? kReverse
             : s == "random"  ? kRandom
                              : kLockstep;
  timespec begun;
  clock_gettime(CLOCK_MONOTONIC, &begun);
  Running now{f, &l, params, size, settings().seed * 0x9E3779B97F4A7C15ull | 1};
  now.blocks_in_cluster = in_cluster;
  running = &now;
  // The blocks of a cluster live together; clusters run one after the other.
  Cluster c;
  const int warps = int((threads + 31) / 32);
  for (unsigned k = 0; k < in_cluster; ++k) {
    c.blocks.emplace_back();
    Block& b = c.blocks.back();
    b.cluster = &c;
    for (int v = 0; v < warps; ++v) {
      b.warps.emplace_back();
      Warp& w = b.warps.back();
      w.block = &b;
      w.function = f;
      w.first_thread = v * 32;
      w.lanes = threads - u64(v) * 32 >= 32 ? 0xffffffffu : (1u << (threads % 32)) - 1;
      w.regs.assign(size_t(f->rows) * 32, 0xfff7dead7ff7deadull);
      w.local.resize(size_t(f->local) * 32);
    }
  }
  const u64 clusters = blocks / in_cluster;
  const unsigned cg[3] = {l.grid[0] / cluster[0], l.grid[1] / cluster[1], l.grid[2] / cluster[2]};
  std::vector<Warp*> all;
  for (Block& b : c.blocks)
    for (Warp& w : b.warps) all.push_back(&w);
  for (u64 k = 0; k < clusters; ++k) {
    const u64 at = schedule == kReverse ? clusters - 1 - k : k;
    const unsigned id[3] = {unsigned(at % cg[0]), unsigned(at / cg[0] % cg[1]),
                            unsigned(at / cg[0] / cg[1])};
    c.live = int(threads * in_cluster), c.arrived = 0, c.phase = 0;
    unsigned rank = 0;
    for (Block& b : c.blocks) {
      b.rank = rank;
      b.id[0] = id[0] * cluster[0] + rank % cluster[0];
      b.id[1] = id[1] * cluster[1] + rank / cluster[0] % cluster[1];
      b.id[2] = id[2] * cluster[2] + rank / cluster[0] / cluster[1];
      b.number = at * in_cluster + rank;
      b.shared_bytes.clear();
      ++rank;
      b.live = b.threads = int(threads);
      b.shared.assign((size_t(f->static_shared) + 15) / 16 * 16 + l.dynamic_shared, 0xff);
      if (!l.dynamic_shared) b.shared.resize(size_t(f->static_shared));
      for (auto& bar : b.barriers) bar = {};
      for (Warp& w : b.warps) {
        w.live = w.lanes;
        w.rotate = false;
        std::fill(w.local.begin(), w.local.end(), 0xff);
        for (int lane = 0; lane < 32; ++lane) {
          w.pc[lane] = 0;
          w.state[lane] = w.lanes >> lane & 1 ? kRun : kDone;
          w.cluster_phase[lane] = 0;
          w.barriers_passed[lane] = w.syncs_passed[lane] = 0;
          w.open[lane].clear();
          w.committed[lane].clear();
        }
        set_up(w, l, cluster);
      }
    }
    while (c.live) {
      bool moved = false;
      if (schedule == kRandom) {
        for (size_t v = 0; v < all.size(); ++v) moved |= run_warp(*all[next_random() % all.size()]);
        if (!moved)
          for (Warp* w : all) moved |= run_warp(*w);
      } else if (schedule == kReverse) {
        for (size_t v = all.size(); v-- > 0;) moved |= run_warp(*all[v]);
      } else {
        for (Warp* w : all) moved |= run_warp(*w);
      }
      if (!moved && c.live) stuck(c);
    }
  }
  running = nullptr;
  if (settings().stats) {
    timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    say("%s: %llu blocks of %llu threads, %d registers, %llu warp instructions, %.3f s", n.c_str(),
        (unsigned long long)blocks, (unsigned long long)threads, f->rows,
        (unsigned long long)now.instructions,
        double(end.tv_sec - begun.tv_sec) + 1e-9 * double(end.tv_nsec - begun.tv_nsec));
  }
}

}  // namespace sg
