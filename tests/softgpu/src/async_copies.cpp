// SPDX-License-Identifier: MIT
// Asynchronous copies to shared memory: made when they are waited for, in the order in which they
// were asked for, or, if the settings say so, at once.
#include "lanes.h"

namespace sg {
namespace {

// Where so many bytes of one lane lie, in parts whose size is a power of two.
template <class F>
void each_part(Warp& w, const AsyncCopy& c, int lane, u64 address, u32 bytes, Space space,
               AccessKind kind, F f) {
  const u32 part = bytes & (0 - bytes);
  for (u32 at = 0; at < bytes; at += part) {
    u64 addresses[32];
    addresses[lane] = address + at;
    Pointers p;
    locate(w, *c.instruction, 1u << lane, addresses, 0, part, space, kind, p);
    f(p.at[lane], at, part);
  }
}

void make(Warp& w, int lane, const AsyncCopy& c) {
  u8 bytes[16] = {};
  each_part(w, c, lane, c.from, c.from_bytes, kGlobal, AccessKind::kCopyReads,
            [&](u8* from, u32 at, u32 part) { memcpy(bytes + at, from, part); });
  each_part(w, c, lane, c.to, c.bytes, kShared, AccessKind::kCopyEnds,
            [&](u8* to, u32 at, u32 part) {
              if (!running->async_early) memcpy(to, bytes + at, part);
            });
}

// Checks the addresses and takes note; lanes that copy whole pieces do so together.
void begin_copies(Warp& w, const Instruction& i, u32 lanes) {
  const u32 bytes = u32(w.row(i.source[2])[0]);
  const u64* const from = w.row(i.source[1]);
  AsyncCopy asked[32];
  u32 whole = 0;
  for_lanes(lanes, [&](int lane) {
    const u32 from_bytes = i.sources > 3 ? u32(w.row(i.source[3])[lane]) : bytes;
    asked[lane] = {w.row(i.source[0])[lane] + u64(i.offset), from[lane], bytes, from_bytes, &i};
    if (from_bytes > bytes)
      fail(w, i, lane, 719, format("%u bytes copied into %u", from_bytes, bytes));
    if (from[lane] % bytes)
      fail(w, i, lane, 716,
           format("a copy from 0x%llx, which is not a multiple of %u",
                  (unsigned long long)from[lane], bytes));
    whole |= u32(from_bytes == bytes) << lane;
  });
  Pointers p;
  if (whole) locate(w, i, whole, from, 0, bytes, kGlobal, AccessKind::kRead, p);
  for_lanes(lanes & ~whole, [&](int lane) {
    each_part(w, asked[lane], lane, from[lane], asked[lane].from_bytes, kGlobal, AccessKind::kRead,
              [](u8*, u32, u32) {});
  });
  locate(w, i, lanes, w.row(i.source[0]), i.offset, bytes, kShared, AccessKind::kCopyBegins, p);
  for_lanes(lanes, [&](int lane) {
    w.copies[lane].open.push_back(asked[lane]);
    // The data come early; that they are there is not known before the wait.
    if (!running->async_early) return;
    memset(p.at[lane], 0, bytes);
    memcpy(p.at[lane], reinterpret_cast<u8*>(from[lane]), asked[lane].from_bytes);
  });
}

void commit_copies(Warp& w, const Instruction&, u32 lanes) {
  for_lanes(lanes, [&](int lane) {
    AsyncCopies& c = w.copies[lane];
    c.groups.push_back(std::move(c.open));
    c.open.clear();
  });
}

void wait_for_copies(Warp& w, u32 lanes, size_t pending) {
  for_lanes(lanes, [&](int lane) {
    AsyncCopies& c = w.copies[lane];
    for (; c.groups.size() > pending; c.groups.pop_front())
      for (const AsyncCopy& copy : c.groups.front()) make(w, lane, copy);
  });
}
void wait_for_groups(Warp& w, const Instruction& i, u32 lanes) {
  wait_for_copies(w, lanes, size_t(w.row(i.source[0])[0]));
}
void wait_for_all(Warp& w, const Instruction& i, u32 lanes) {
  commit_copies(w, i, lanes);
  wait_for_copies(w, lanes, 0);
}

}  // namespace

bool choose_async_copy(Instruction& i, const Opcode& op) {
  if (!op.has("async") || op.has("bulk") || op.has("mbarrier")) return false;
  if (op.has("L2::cache_hint")) --i.sources;
  i.run = op.has("commit_group") ? commit_copies
          : op.has("wait_group") ? wait_for_groups
          : op.has("wait_all")   ? wait_for_all
          : op.has("global")     ? begin_copies
                                 : nullptr;
  return i.run != nullptr;
}

}  // namespace sg
