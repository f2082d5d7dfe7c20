// SPDX-License-Identifier: MIT
// Counts what launches access, for Python to read: see counters.py.
#include <algorithm>

#include "threads.h"

namespace sg {
namespace {

struct CountedRange {
  u64 begin, end;
  u64 loaded, stored, distinct_loaded, distinct_stored, load_sectors, store_sectors;
};
struct CountedLaunch {
  const char* kernel;
  unsigned grid[3], block[3], cluster[3], dynamic_shared;
  u64 issued, executed;
  SharedCounts shared_loads, shared_stores;
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
  // An access is aligned, so that it lies within 64 bytes.
  bits[(address >> 6) - (r.begin >> 6)] |= ((1ull << bytes) - 1) << (address & 63);
}
u64 bits_set(const std::vector<u64>& bits) {
  u64 n = 0;
  for (u64 word : bits) n += u64(__builtin_popcountll(word));
  return n;
}

// How often shared memory is busy: for each of its 32 banks, with the words that lanes want from
// it. Of 8 bytes a lane, half a warp is served at a time; of 16, a quarter.
u64 wavefronts(const u64* addresses, int lanes, u32 bytes) {
  u64 words[64];
  int n = 0;
  for (int k = 0; k < lanes; ++k)
    for (u32 at = 0; at < std::max(bytes, 4u); at += 4) words[n++] = addresses[k] / 4 + at / 4;
  std::sort(words, words + n);
  n = int(std::unique(words, words + n) - words);
  u64 of_bank[32] = {};
  for (int k = 0; k < n; ++k) ++of_bank[words[k] % 32];
  return *std::max_element(of_bank, of_bank + 32);
}

void count_shared(u32 lanes, u8* const* at, u32 bytes, SharedCounts& counts) {
  ++counts.accesses;
  const int together = bytes <= 4 ? 32 : int(128 / bytes);
  for (int first = 0; first < 32; first += together) {
    u64 addresses[32];
    int n = 0;
    for (int lane = first; lane < first + together; ++lane)
      if (lanes >> lane & 1) addresses[n++] = reinterpret_cast<u64>(at[lane]);
    if (!n) continue;
    ++counts.ideal;
    counts.wavefronts += wavefronts(addresses, n, bytes);
  }
}

void count_global(Warp& w, const Instruction& i, u32 lanes, u8* const* at, u32 bytes, bool store) {
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

}  // namespace

void count_access(Warp& w, const Instruction& i, u32 lanes, u8* const* at, u32 bytes, bool store) {
  Watch& watch = *running->watch;
  u32 shared = 0;
  for_lanes(lanes, [&](int lane) {
    const Watched* const r = watched_at(w, i, reinterpret_cast<u64>(at[lane]));
    shared |= u32(r && r->shared) << lane;
  });
  if (shared) count_shared(shared, at, bytes, store ? watch.shared_stores : watch.shared_loads);
  if (lanes & ~shared) count_global(w, i, lanes & ~shared, at, bytes, store);
}

void keep_counts(const Watch& watch) {
  if (!watch.count) return;
  Kept& k = kept.emplace_back();
  k.kernel = running->function->name;
  for (const auto& [begin, r] : watch.ranges)
    k.ranges.push_back({r.begin, r.end, r.loaded, r.stored, bits_set(r.loaded_bits),
                        bits_set(r.stored_bits), r.load_sectors, r.store_sectors});
  CountedLaunch& l = k.launch;
  const Launch& given = running->launch;
  l.kernel = k.kernel.c_str();
  std::copy(given.grid, given.grid + 3, l.grid);
  std::copy(given.block, given.block + 3, l.block);
  std::copy(running->cluster, running->cluster + 3, l.cluster);
  l.dynamic_shared = given.dynamic_shared;
  l.issued = running->issued, l.executed = running->executed;
  l.shared_loads = watch.shared_loads, l.shared_stores = watch.shared_stores;
  l.ranges = k.ranges.size(), l.range = k.ranges.data();
}

}  // namespace sg

extern "C" {
void softgpu_forget_launches() { sg::kept.clear(); }
// A launch that was counted, or nullptr where there are fewer.
const void* softgpu_launch(u64 index) {
  return index < sg::kept.size() ? &sg::kept[index].launch : nullptr;
}
}
