// SPDX-License-Identifier: MIT
// Counts accesses and finds races. If neither is wanted, each access costs one test.
#pragma once
#include "softgpu.h"

namespace sg {

struct Warp;
struct Block;
struct Cluster;
struct Instruction;

// An asynchronous copy reads and writes at any time between its start and the wait for it.
enum class AccessKind : u8 {
  kRead,
  kWrite,
  kCopyBegins,
  kCopyEnds,
  kCopyReads,
  kSynchronizes  // an operation on an mbarrier
};

// A vector clock: for each thread of the cluster, the last epoch whose accesses are visible. A
// thread's epoch ends where its accesses become visible to others, as at a barrier.
using Clock = std::shared_ptr<const std::vector<u32>>;
struct ThreadClock {
  u32 epoch = 1;
  Clock seen;
};
// A synchronization: accesses of the threads that arrive become visible to the threads that leave.
struct SyncPoint {
  std::vector<Clock> seen;
  std::vector<std::pair<u32, u32>> arrived;  // thread and epoch
  void arrive(Warp&, int lane);
  Clock end();
};
void set_clock(Warp&, int lane, const Clock& clock);
void join_clock(Warp&, int lane, const Clock& clock);  // adds to what the lane has seen

// The last access to a cell.
struct Access {
  u32 epoch = 0;  // 0: none
  u32 line = 0, cluster = 0;
  u16 thread = 0;  // index in the cluster
  bool atomic = false, copying = false;
};
// Bytes that are always accessed together.
struct Cell {
  Access write, read;
  Access foreign_read;  // by another cluster
  u32 readers = 0;      // the index of its readers in Watch::readers, or 0
};
struct Page {
  static constexpr u32 kBytes = 1024;
  u32 cell_bytes = 0;  // bytes of the smallest access so far
  u32 cluster = 0;     // the cluster that uses it, for shared memory
  std::vector<Cell> cells;
};

// A live allocation, or a block's shared memory.
struct Watched {
  u64 begin = 0, end = 0;
  bool shared = false;
  // Bytes of all accesses of threads, and sectors of 32 bytes of all accesses of warps.
  u64 loaded = 0, stored = 0, load_sectors = 0, store_sectors = 0;
  std::vector<u64> loaded_bits, stored_bits;  // one bit for each byte
  std::vector<std::unique_ptr<Page>> pages;
};

struct ReadBy {
  u32 epoch = 0, line = 0;
};

// Counters and races of one launch.
struct Watch {
  bool count = false, races = false;
  u64 number = 0;  // unique to the launch
  u32 cluster = 0, cluster_threads = 0;
  std::map<u64, Watched> ranges;
  std::vector<std::vector<ReadBy>> readers;  // by Cell::readers and thread; readers[0] is unused
  size_t readers_used = 1;
  Error unwritten = {0, ""};  // a read before any write, thrown unless the cluster has a race
};
std::unique_ptr<Watch> start_watch(u32 cluster_threads);  // null if neither is on
void watch_cluster(Watch&, Cluster&);                     // at the start of a cluster
void keep_counts(const Watch&);                           // at the end of a launch

// Records an access of a warp.
void observe(Warp&, const Instruction&, u32 lanes, u8* const* at, u32 bytes, AccessKind);
// The memory of an address, or null if no other thread can access it.
Watched* watched_at(Warp&, const Instruction&, u64 address);
void count_access(Warp&, const Instruction&, u32 lanes, u8* const* at, u32 bytes, bool store);
void check_races(Warp&, const Instruction&, int lane, Watched&, u64 address, u32 bytes, AccessKind);
void end_message(Watched&, u64 address, u32 bytes);  // when a message's data have arrived

}  // namespace sg
