// SPDX-License-Identifier: MIT
// Which memory an access that is watched lies in.
#include "watch.h"

#include "threads.h"

namespace sg {

std::unique_ptr<Watch> start_watch(u32 cluster_threads) {
  static u64 number = 0;
  const Settings& s = settings();
  if (!s.counters && !s.races) return nullptr;
  auto watch = std::make_unique<Watch>();
  watch->count = s.counters, watch->races = s.races;
  watch->number = ++number;
  watch->cluster_threads = cluster_threads;
  watch->readers.resize(1);
  return watch;
}

void watch_cluster(Watch& watch, Cluster& c) {
  watch.cluster = u32(c.number) + 1;
  watch.readers_used = 1;
  for (Block& b : c.blocks) {
    if (b.watched) continue;
    b.watched = std::make_unique<Watched>();
    b.watched->begin = reinterpret_cast<u64>(b.shared);
    b.watched->end = b.watched->begin + b.shared_bytes;
    b.watched->shared = true;
  }
}

static Watched* find_watched(Warp& w, u64 address) {
  for (Block& b : w.block->cluster->blocks)
    if (address - b.watched->begin < b.shared_bytes) return b.watched.get();
  const Range* range = range_of(address);
  if (!range) return nullptr;
  Watched& found = running->watch->ranges[range->begin];
  found.begin = range->begin, found.end = range->end;
  return &found;
}

// An instruction mostly hits what it hit before.
Watched* watched_at(Warp& w, const Instruction& i, u64 address) {
  const bool same = i.watch == running->watch->number && i.watched;
  if (same && address - i.watched->begin < i.watched->end - i.watched->begin) return i.watched;
  i.watch = running->watch->number;
  return i.watched = find_watched(w, address);
}

void observe(Warp& w, const Instruction& i, u32 lanes, u8* const* at, u32 bytes, AccessKind kind) {
  const Watch& watch = *running->watch;
  if (i.space == kLocal || i.space == kParam) return;
  const bool loads = kind == AccessKind::kRead || kind == AccessKind::kUpdate;
  const bool stores =
      kind == AccessKind::kWrite || kind == AccessKind::kUpdate || kind == AccessKind::kCopyBegins;
  if (watch.count && loads) count_access(w, i, lanes, at, bytes, false);
  if (watch.count && stores) count_access(w, i, lanes, at, bytes, true);
  if (!watch.races) return;
  for_lanes(lanes, [&](int lane) {
    const u64 address = reinterpret_cast<u64>(at[lane]);
    if (Watched* const r = watched_at(w, i, address))
      check_races(w, i, lane, *r, address, bytes, kind);
  });
}

}  // namespace sg
