// SPDX-License-Identifier: MIT
// A decoded kernel, and the state of the threads that run it.
#pragma once
#include <cstring>
#include <deque>
#include <unordered_map>

#include "softgpu.h"

namespace sg {

// A register is a row of 32 values, one for each lane of a warp. What lies above a value's own
// width is not defined. Predicates are 0 or 1. Constants and special registers are rows too.
struct Warp;
struct Ins;
typedef void (*Op)(Warp&, const Ins&, u32 mask);

enum Kind : u8 {
  kNormal,
  kBranch,
  kIndexed,
  kExit,
  kBarrier,
  kWarpSync,
  kClusterArrive,
  kClusterWait,
  kTrap
};
enum Space : u8 { kGeneric, kGlobal, kShared, kSharedCluster, kLocal, kParam, kConst };

// The upper byte of a generic address says which window it lies in; global memory has 0.
constexpr u64 kSharedWindow = 1ull << 56, kLocalWindow = 2ull << 56, kParamWindow = 3ull << 56;
constexpr u64 kWindowBits = 0xffull << 56;
constexpr u32 kRankShift = 24;  // of an address in a cluster's shared memory: rank + 1, or 0

struct Ins {
  Op op = nullptr;
  Kind kind = kNormal;
  Space space = kGeneric;
  u8 n = 1;      // elements of a vector
  u8 bytes = 4;  // of an element
  bool negate = false, atomic = false;
  u8 mode = 0, flags = 0;
  int guard = -1;
  int d[8], s[8];
  int target = 0;
  int line = 0;
  int64_t offset = 0;
  std::vector<int>* table = nullptr;
  mutable u64 begin = 0, end = 0, epoch = 0;  // the allocation that was hit last
  Ins() {
    for (int i = 0; i < 8; ++i) d[i] = s[i] = 0;
  }
};

struct Param {
  std::string name;
  size_t offset, size;
};

struct Special {
  std::string name;
  int row;
};

struct Function {
  Module* module = nullptr;
  std::string name;
  std::vector<Param> params;
  size_t params_size = 0;
  std::vector<Ins> code;
  int rows = 1;
  std::vector<std::pair<int, u64>> constants;
  std::vector<Special> specials;
  int static_shared = 0, local = 0;
  int max_threads = 0;
  unsigned required[3] = {0, 0, 0};
  unsigned cluster[3] = {0, 0, 0};
  int max_dynamic = kStaticShared, nonportable = 0;
  bool decoded = false;
  size_t first_token = 0;  // of the body
};

enum State : u8 { kRun, kAtBarrier, kAtWarpSync, kAtCluster, kDone };

struct Block;
struct Warp {
  Block* block = nullptr;
  Function* function = nullptr;
  int first_thread = 0;
  std::vector<u64> regs;
  std::vector<u8> local;
  u32 live = 0, lanes = 0;
  int pc[32];
  State state[32];
  u8 barrier[32];
  u64 cluster_phase[32];
  u32 barriers_passed[32], syncs_passed[32];  // of the block, and of the warp
  struct Copy {
    u64 to, from;
    u32 bytes, from_bytes;
    const Ins* ins;
  };
  struct Group {
    std::vector<Copy> copies;
  };
  std::vector<Copy> open[32];
  std::deque<std::vector<Copy>> committed[32];
  u64* row(int i) { return &regs[size_t(i) * 32]; }
  bool rotate = false;
};

// Who touched a byte last, where races are looked for.
struct Touch {
  u32 thread = 0, barriers = 0, syncs = 0, phase = 0;
  u32 line = 0;  // 0: nobody
  u64 block = 0;
  bool atomic = false;
};
struct Byte {
  Touch write, reads[2];
};

struct Cluster;
struct Block {
  Cluster* cluster = nullptr;
  unsigned id[3], rank = 0;
  std::vector<u8> shared;
  std::vector<Byte> shared_bytes;
  u64 number = 0;  // in the grid
  std::deque<Warp> warps;
  int live = 0, threads = 0;
  struct Barrier {
    int arrived = 0;
    int expected = 0;
  } barriers[16];
};

struct Cluster {
  std::deque<Block> blocks;
  int live = 0, arrived = 0;
  u64 phase = 0;
  unsigned id[3];
};

struct Running {
  Function* function;
  const Launch* launch;
  const u8* params;
  size_t params_size;
  u64 random;
  u64 instructions = 0;
  unsigned blocks_in_cluster = 1;
  std::unordered_map<u64, std::unique_ptr<Byte[]>> bytes;  // of global memory, by pages
};
extern thread_local Running* running;

[[noreturn]] void fail(Warp& w, const Ins& i, int lane, int code, const std::string& what);
u8* memory_at(Warp& w, const Ins& i, int lane, u64 address, u32 bytes, Space space, bool write);

// Decoding of one instruction: its name in parts, and what follows.
struct Parts {
  std::vector<std::string> part;
  bool has(const char* name) const {
    for (auto& p : part)
      if (p == name) return true;
    return false;
  }
  const std::string& base() const { return part[0]; }
  const std::string& last() const { return part.back(); }
};
// Sets op and mode of an instruction; false where it is not known.
bool choose(Ins& ins, const Parts& parts);

struct Variable {
  Space space;
  u64 address;
  size_t bytes;
};
struct Token {
  enum Type : u8 { kName, kNumber, kFloat, kDouble, kPunctuation, kString, kEnd } type;
  std::string text;
  u64 value;
  int line;
};
struct Module {
  int device = 0;
  std::string text;
  std::vector<Token> tokens;
  std::map<std::string, Variable> variables;
  std::map<std::string, Function*> entries;
  std::map<std::string, Function*> functions;
  std::vector<u64> allocated;
  size_t constant_bytes = 0;
  int shared = 0;
  std::string line(int number) const;
};
void decode(Function*);

}  // namespace sg
