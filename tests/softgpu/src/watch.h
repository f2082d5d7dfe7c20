// SPDX-License-Identifier: MIT
// Counts accesses, and looks for races among them. Off, it costs a test for each access.
#pragma once
#include "softgpu.h"

namespace sg {

struct Warp;
struct Block;
struct Cluster;
struct Instruction;

// An asynchronous copy reads and writes from when it is asked for until it is waited for.
enum class AccessKind : u8 {
  kRead,
  kWrite,
  kUpdate,
  kCopyBegins,
  kCopyEnds,
  kCopyReads,
  kSynchronizes  // by means of an mbarrier
};

// What a thread has seen of the others of its cluster: of each, up to which of its epochs. A
// thread's epoch ends where it lets others see what it did, as at a barrier.
using Clock = std::shared_ptr<const std::vector<u32>>;
struct ThreadClock {
  u32 epoch = 1;
  Clock seen;
};
// Threads that meet: who has left sees what those have done who had arrived.
struct Meeting {
  std::vector<Clock> seen;
  std::vector<std::pair<u32, u32>> arrived;  // thread and epoch
  void arrive(Warp&, int lane);
  Clock end();
};
void leave(Warp&, int lane, const Clock& met);
void leave_later(Warp&, int lane, const Clock& met);  // other meetings may lie between

// Who touched memory.
struct Access {
  u32 epoch = 0;  // 0: nobody
  u32 line = 0, cluster = 0;
  u16 thread = 0;  // in the cluster
  bool atomic = false, copying = false;
};
// Some bytes that are only accessed together.
struct Cell {
  Access write, read;
  Access foreign_read;  // by another cluster
  u32 readers = 0;      // where reads by several threads are kept, or 0
};
struct Page {
  static constexpr u32 kBytes = 1024;
  u32 cell_bytes = 0;  // of the smallest access so far
  u32 cluster = 0;     // of shared memory: whose it is
  std::vector<Cell> cells;
};

// A live allocation, or a block's shared memory.
struct Watched {
  u64 begin = 0, end = 0;
  bool shared = false;
  // Bytes, each access with its own, and sectors of 32, for each access of a warp.
  u64 loaded = 0, stored = 0, load_sectors = 0, store_sectors = 0;
  std::vector<u64> loaded_bits, stored_bits;  // a bit for a byte
  std::vector<std::unique_ptr<Page>> pages;
};

struct ReadBy {
  u32 epoch = 0, line = 0;
};

// Accesses of warps to shared memory; how often it was busy, and would be without conflicts.
struct SharedCounts {
  u64 accesses = 0, wavefronts = 0, ideal = 0;
};

// Of one launch.
struct Watch {
  bool count = false, races = false;
  u64 number = 0;  // no two launches have the same
  u32 cluster = 0, cluster_threads = 0;
  std::map<u64, Watched> ranges;
  SharedCounts shared_loads, shared_stores;
  std::vector<std::vector<ReadBy>> readers;  // by thread; the first is not used
  size_t readers_used = 1;
  Error unwritten = {0, ""};  // a read of what nothing has written: a race, if that comes later
};
std::unique_ptr<Watch> start_watch(u32 cluster_threads);  // null where nothing is asked for
void watch_cluster(Watch&, Cluster&);                     // begins
void keep_counts(const Watch&);                           // at the end of a launch

// Takes note of an access of a warp.
void observe(Warp&, const Instruction&, u32 lanes, u8* const* at, u32 bytes, AccessKind);
// What an address lies in; null where nobody else gets to it.
Watched* watched_at(Warp&, const Instruction&, u64 address);
void count_access(Warp&, const Instruction&, u32 lanes, u8* const* at, u32 bytes, bool store);
void check_races(Warp&, const Instruction&, int lane, Watched&, u64 address, u32 bytes, AccessKind);
void end_message(Watched&, u64 address, u32 bytes);  // what was sent is there

}  // namespace sg
