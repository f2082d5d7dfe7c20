// SPDX-License-Identifier: MIT
// What lanes of a warp do together, once all that take part are there.
#include "lanes.h"

namespace sg {
namespace {

enum Shuffle : u8 { kUp, kDown, kButterfly, kIndex };

// Where a lane's value comes from; ok says whether that lies in the lane's own segment.
int shuffle_source(u8 how, int lane, u32 by, u32 clamp_and_segment, bool& ok) {
  const int bound = int(clamp_and_segment & 31), segment = int(clamp_and_segment >> 8 & 31);
  const int last = (lane & segment) | (bound & ~segment), first = lane & segment;
  const int b = int(by & 31);
  const int from = how == kUp          ? lane - b
                   : how == kDown      ? lane + b
                   : how == kButterfly ? lane ^ b
                                       : first | (b & ~segment);
  ok = how == kUp ? from >= last : from <= last;
  return ok ? from : lane;
}

void shuffle(Warp& w, const Instruction& i, u32 lanes) {
  u64 given[32];
  memcpy(given, w.row(i.source[0]), sizeof given);
  const u64 *const by = w.row(i.source[1]), *const clamp = w.row(i.source[2]);
  u64 *const dest = w.row(i.dest[0]), *const inside = w.row(i.dest[1]);
  for_lanes(lanes, [&](int lane) {
    bool ok;
    const int from = shuffle_source(i.variant, lane, u32(by[lane]), u32(clamp[lane]), ok);
    dest[lane] = lanes >> from & 1 ? u32(given[from]) : 0xffbadbad;  // not defined
    inside[lane] = ok;
  });
}

enum Vote : u8 { kAll, kAny, kUniform, kBallot };

void vote(Warp& w, const Instruction& i, u32 lanes) {
  const u64* const votes = w.row(i.source[0]);
  u32 yes = 0;
  for_lanes(lanes, [&](int lane) { yes |= u32(votes[lane] & 1) << lane; });
  const u32 result = i.variant == kAll       ? yes == lanes
                     : i.variant == kAny     ? yes != 0
                     : i.variant == kUniform ? yes == lanes || yes == 0
                                             : yes;
  for_lanes(lanes, [&](int lane) { w.row(i.dest[0])[lane] = result; });
}

// match.any: the lanes that have the same value; match.all: all lanes, if they have, or none.
void match(Warp& w, const Instruction& i, u32 lanes) {
  const u64 keep = i.bytes == 4 ? 0xffffffff : ~0ull;
  u64 v[32];
  memcpy(v, w.row(i.source[0]), sizeof v);
  for_lanes(lanes, [&](int lane) {
    u32 same = 0;
    for_lanes(lanes, [&](int other) { same |= u32(((v[other] ^ v[lane]) & keep) == 0) << other; });
    w.row(i.dest[0])[lane] = i.variant == kAny || same == lanes ? same : 0;
    w.row(i.dest[1])[lane] = same == lanes;
  });
}

void elect(Warp& w, const Instruction& i, u32 lanes) {
  const int leader = __builtin_ctz(lanes);
  for_lanes(lanes, [&](int lane) {
    w.row(i.dest[0])[lane] = u64(leader);
    w.row(i.dest[1])[lane] = lane == leader;
  });
}

void active_mask(Warp& w, const Instruction& i, u32 lanes) {
  for_lanes(lanes, [&](int lane) { w.row(i.dest[0])[lane] = lanes; });
}

u8 variant_of(const Opcode& op, std::initializer_list<const char*> names) {
  u8 k = 0;
  for (const char* name : names) {
    if (op.has(name)) break;
    ++k;
  }
  return k;
}

}  // namespace

bool choose_warp_operation(Instruction& i, const Opcode& op) {
  if (op.base() == "activemask") {
    i.run = active_mask;
    return true;
  }
  if (!op.has("sync")) return false;
  if (op.base() == "redux") return choose_lane_reduction(i, op);
  i.kind = kWarpSync;
  i.members = op.base() == "shfl" ? 3 : op.base() == "elect" ? 0 : 1;
  if (op.base() == "shfl") {
    i.variant = variant_of(op, {"up", "down", "bfly", "idx"});
    i.run = shuffle;
  } else if (op.base() == "vote") {
    i.variant = variant_of(op, {"all", "any", "uni", "ballot"});
    i.run = vote;
  } else if (op.base() == "match") {
    i.variant = op.has("any") ? kAny : kAll;
    i.bytes = op.type() == "b64" ? 8 : 4;
    i.run = match;
  } else {
    i.run = elect;
  }
  return true;
}

}  // namespace sg
