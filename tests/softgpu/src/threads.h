// SPDX-License-Identifier: MIT
// The state of running threads: clusters of blocks of warps of 32 lanes.
#pragma once
#include <deque>

#include "program.h"
#include "watch.h"

namespace sg {

enum class State : u8 { kRuns, kAtBarrier, kAtWarpSync, kAtCluster, kAtMbarrier, kEnded };

struct AsyncCopy {
  u64 to, from;
  u32 bytes;
  const Instruction* instruction;
};
struct AsyncCopies {
  std::vector<AsyncCopy> open;
  std::deque<std::vector<AsyncCopy>> groups;
};

// An asynchronous store in a phase of an mbarrier that has not ended.
struct Message {
  u8* to;
  u32 bytes;
  u64 value;
};
// A barrier in shared memory. Its phase ends when `pending` and the expected `bytes` are 0.
struct Mbarrier {
  int count = 0, pending = 0, bytes = 0;
  u64 phase = 0;              // the number of ended phases
  bool is_waited_for = true;  // whether a thread has waited for the last message
  std::vector<Message> messages;
  SyncPoint sync;
  Clock clock;  // at the end of the last phase
};

// A register is a row of 32 values, one for each lane. Bits above a value's width are undefined. A
// predicate is the lowest bit. Constants and special registers are rows too.
struct Warp {
  Block* block = nullptr;
  Function* function = nullptr;
  int first_thread = 0;
  std::vector<u64> registers;
  u32 lanes = 0, live = 0;
  int pc[32];  // program counters
  State state[32];
  u64 cluster_phase[32];  // Cluster::phase after the barrier at which a lane arrived last, or 0
  Mbarrier* mbarrier[32];
  u32 waited = 0;       // lanes that have waited for the previous launch
  u32 published = 0;    // lanes whose mbarriers become visible at the cluster's next barrier
  bool rotate = false;  // whether lanes run in reverse order: changes when a turn ends
  AsyncCopies copies[32];
  ThreadClock clock[32];  // only if races are checked

  u64* row(int i) { return &registers[size_t(i) * 32]; }
};

struct Block {
  Cluster* cluster = nullptr;
  unsigned id, rank = 0;
  std::deque<Warp> warps;
  int live = 0, arrived = 0;  // threads; those at the block's barrier
  SyncPoint sync;
  std::map<u64, Mbarrier> mbarriers;  // by the offset in shared memory
  std::vector<u8> storage;
  u8* shared = nullptr;  // points into storage, aligned
  size_t shared_bytes = 0;
  std::unique_ptr<Watched> watched;  // the shared memory
};

struct Cluster {
  std::deque<Block> blocks;
  u64 number = 0;
  int live = 0, arrived = 0;
  u64 phase = 0;
  SyncPoint sync;
  Clock clock;  // at the end of the last barrier
};

// The running launch.
struct Running {
  Function* function;
  Launch launch;
  const u8* params;
  bool async_early = false;
  u64 random = 1;
  u64 issued = 0;          // instructions of warps
  Watch* watch = nullptr;  // for counters and races, or null
};
extern thread_local Running* running;

Error error_at(const Warp&, const Instruction&, int lane, int code, const std::string& what);
[[noreturn]] void fail(const Warp&, const Instruction&, int lane, int code,
                       const std::string& what);
std::string place_of(const Warp&, int lane);

// Resolves the addresses of lanes to pointers. A wrong address ends the launch.
struct Pointers {
  u8* at[32];
};
void locate(Warp&, const Instruction&, u32 lanes, const u64* addresses, int64_t offset, u32 bytes,
            Space, AccessKind, Pointers&);

// Barriers: the waiting threads are released once all threads have arrived.
void arrive_at_block_barrier(Warp&, const Instruction&, u32 lanes);
void arrive_at_cluster_barrier(Warp&, const Instruction&, u32 lanes);
void wait_at_cluster_barrier(Warp&, const Instruction&, u32 lanes);
bool try_warp_sync(Warp&, const Instruction&, u32 lanes);  // whether all members have arrived
bool release_waiting_lanes(Warp&);  // releases lanes if all lanes of their mask have arrived
void end_threads(Warp&, const Instruction&, u32 lanes);
void wait_at_mbarrier(Warp&, const Instruction&, u32 lanes);
void check_messages(Warp&, const Instruction&, u32 lanes);  // at the end of a block
u32 lanes_in(const Warp&, State);

// A thread of a dependent launch must run griddepcontrol.wait before it touches an array or ends.
void need_waited(Warp&, const Instruction&, u32 lanes, u8* const* at);
void check_waited(Warp&, const Instruction&, u32 lanes);

// Runs the blocks of a cluster until their threads have ended.
void run_cluster(Cluster&);

// Calls f(lane) for the lanes in a mask.
template <class F>
inline void for_lanes(u32 lanes, F f) {
  for (u32 left = lanes; left; left &= left - 1) f(__builtin_ctz(left));
}

}  // namespace sg
