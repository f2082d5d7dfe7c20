// SPDX-License-Identifier: MIT
// Finds the allocation or the block's shared memory that an access to be checked or counted is in,
// and counts what launches access. counters.py reads the counts.
#include <algorithm>

#include "threads.h"

namespace sg {

std::unique_ptr<Watch> start_watch(u32 cluster_threads) {
  static u64 number = 0;
  if (!setting(kCounters) && !setting(kRaces)) return nullptr;
  auto watch = std::make_unique<Watch>();
  watch->count = setting(kCounters), watch->races = setting(kRaces);
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

// Looks first in the memory that the instruction accessed last.
Watched* watched_at(Warp& w, const Instruction& i, u64 address) {
  const bool same = i.watch == running->watch->number && i.watched;
  if (same && address - i.watched->begin < i.watched->end - i.watched->begin) return i.watched;
  i.watch = running->watch->number;
  return i.watched = find_watched(w, address);
}

void observe(Warp& w, const Instruction& i, u32 lanes, u8* const* at, u32 bytes, AccessKind kind) {
  const Watch& watch = *running->watch;
  if (i.space == kParam) return;
  if (watch.count && kind == AccessKind::kRead) count_access(w, i, lanes, at, bytes, false);
  if (watch.count && kind == AccessKind::kWrite) count_access(w, i, lanes, at, bytes, true);
  if (!watch.races) return;
  for_lanes(lanes, [&](int lane) {
    const u64 address = reinterpret_cast<u64>(at[lane]);
    if (Watched* const r = watched_at(w, i, address))
      check_races(w, i, lane, *r, address, bytes, kind);
  });
}

namespace {

struct CountedRange {
  u64 begin, end;
  u64 loaded, stored, distinct_loaded, distinct_stored, load_sectors, store_sectors;
};
struct CountedLaunch {
  const char* kernel;
  u64 ranges;
  const CountedRange* range;
};
struct Kept {
  std::string kernel;
  std::vector<CountedRange> ranges;
  CountedLaunch launch;
};
std::deque<Kept>& kept = *new std::deque<Kept>;  // never destroyed

void set_bits(std::vector<u64>& bits, const Watched& r, u64 address, u32 bytes) {
  if (bits.empty()) bits.resize((r.end >> 6) - (r.begin >> 6) + 1);
  // An access is aligned, so it does not cross a multiple of 64 bytes.
  bits[(address >> 6) - (r.begin >> 6)] |= ((1ull << bytes) - 1) << (address & 63);
}
u64 bits_set(const std::vector<u64>& bits) {
  u64 n = 0;
  for (u64 word : bits) n += u64(__builtin_popcountll(word));
  return n;
}

}  // namespace

void count_access(Warp& w, const Instruction& i, u32 lanes, u8* const* at, u32 bytes, bool store) {
  std::pair<u64, Watched*> sectors[32];
  int n = 0;
  for_lanes(lanes, [&](int lane) {
    const u64 address = reinterpret_cast<u64>(at[lane]);
    Watched* const r = watched_at(w, i, address);
    if (!r || r->shared) return;
    (store ? r->stored : r->loaded) += bytes;
    set_bits(store ? r->stored_bits : r->loaded_bits, *r, address, bytes);
    sectors[n++] = {address / 32, r};
  });
  std::sort(sectors, sectors + n);
  const auto end = std::unique(sectors, sectors + n);
  for (auto* sector = sectors; sector != end; ++sector)
    ++(store ? sector->second->store_sectors : sector->second->load_sectors);
}

void keep_counts(const Watch& watch) {
  if (!watch.count) return;
  Kept& k = kept.emplace_back();
  k.kernel = running->function->name;
  for (const auto& [begin, r] : watch.ranges)
    k.ranges.push_back({r.begin, r.end, r.loaded, r.stored, bits_set(r.loaded_bits),
                        bits_set(r.stored_bits), r.load_sectors, r.store_sectors});
  k.launch = {k.kernel.c_str(), k.ranges.size(), k.ranges.data()};
}

}  // namespace sg

extern "C" {
void softgpu_clear_launches() { sg::kept.clear(); }
// The counts of one launch, or nullptr if there are fewer launches.
const void* softgpu_launch(u64 index) {
  return index < sg::kept.size() ? &sg::kept[index].launch : nullptr;
}
}
