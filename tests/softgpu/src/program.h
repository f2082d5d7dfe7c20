// SPDX-License-Identifier: MIT
// A module as it was loaded, and the decoded instructions of its kernels.
#pragma once
#include <cstring>

#include "softgpu.h"

namespace sg {

struct Warp;
struct Instruction;
struct Watched;
// Does an instruction for those lanes of a warp that are set in the mask.
using Operation = void (*)(Warp&, const Instruction&, u32 lanes);

// How the schedule takes an instruction; of kNormal ones it knows nothing.
enum Kind : u8 {
  kNormal,
  kBranch,
  kIndexedBranch,
  kExit,
  kTrap,
  kWarpSync,
  kBlockBarrier,
  kClusterArrive,
  kClusterWait
};
enum Space : u8 { kGeneric, kGlobal, kShared, kSharedCluster, kLocal, kParam, kConst };

// The upper byte of a generic address says which window it lies in; global memory has 0.
constexpr u64 kSharedWindow = 1ull << 56, kLocalWindow = 2ull << 56, kParamWindow = 3ull << 56;
constexpr u64 kWindowBits = 0xffull << 56;
// An address in a cluster's shared memory has the block's rank + 1 here, or 0: the own block.
constexpr u32 kRankShift = 24;

// Operands are rows of the warp's register file. Row 0 takes what nobody wants.
struct Instruction {
  Operation run = nullptr;
  Operation rounded = nullptr;  // what `run` does under another rounding mode
  Kind kind = kNormal;
  Space space = kGeneric;
  u8 elements = 1, bytes = 4;  // of a vector; of an element
  u8 sources = 0;
  u8 variant = 0;   // of operations that have several: see there
  u8 rounding = 0;  // 0 to nearest, 1 to zero, 2 down, 3 up
  bool ftz = false, saturate = false, relu = false, integral = false;
  bool atomic = false, negate_guard = false;
  int guard = -1;  // the row of its predicate
  int dest[8] = {}, source[9] = {};
  int members = 0;  // which source is the mask of lanes that take part
  int target = 0, line = 0;
  int64_t offset = 0;  // added to the address
  const std::vector<int>* table = nullptr;
  // The allocation that was hit last, and the same for counters and races.
  mutable u64 begin = 0, end = 0, epoch = 0, watch = 0;
  mutable Watched* watched = nullptr;
};

// An instruction's name in parts: setp.lt.f32 has the base setp and the type f32.
struct Opcode {
  std::vector<std::string> parts;
  explicit Opcode(const std::string& name);
  bool has(const char* part) const;
  const std::string& base() const { return parts.front(); }
  const std::string& type() const { return parts.back(); }
};
// Sets what a decoded instruction does; false if it is not known.
bool choose_operation(Instruction&, const Opcode&);

struct Param {
  std::string name;
  size_t offset, size;
};
using SpecialValue = u64 (*)(const Warp&, int lane, int axis);
struct Special {
  SpecialValue value;
  int axis, row;
};
struct Function {
  Module* module = nullptr;
  std::string name;
  std::vector<Param> params, results;
  size_t params_size = 0;
  std::vector<Instruction> code;
  std::vector<std::unique_ptr<std::vector<int>>> tables;
  int rows = 1;
  std::vector<std::pair<int, u64>> constants;  // row and value
  std::vector<Special> specials;
  int static_shared = 0, local = 0, max_threads = 0;
  unsigned required[3] = {0, 0, 0}, cluster[3] = {0, 0, 0};  // 0: not said
  int max_dynamic = kStaticShared, nonportable = 0;
  size_t first_token = 0;  // of the body
};

struct Token {
  enum Type : u8 { kName, kNumber, kFloat, kDouble, kPunctuation, kString, kEnd } type;
  std::string text;
  u64 value;  // of a floating-point number: its bits
  int line;
};
std::vector<Token> tokens_of(const std::string& text);

struct Variable {
  Space space;
  u64 address;  // of shared memory that the launch sizes: kDynamic
  size_t bytes;
  static constexpr u64 kDynamic = ~0ull;
};
struct Module {
  int device = 0;
  std::string text;
  std::vector<Token> tokens;
  std::map<std::string, Variable> variables;
  std::map<std::string, std::unique_ptr<Function>> kernels, functions;
  std::vector<u64> allocated;
  size_t constant_bytes = 0;
  int shared = 0;
  ~Module();
  std::string line(int number) const;  // of its text
};
void decode(Function&);

inline size_t round_up(size_t n, size_t to) { return to ? (n + to - 1) / to * to : n; }

}  // namespace sg
