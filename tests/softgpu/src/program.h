// SPDX-License-Identifier: MIT
// A loaded module and the decoded instructions of its kernels.
#pragma once
#include <cstring>

#include "softgpu.h"

namespace sg {

struct Warp;
struct Instruction;
struct Watched;
// Runs an instruction for those lanes of a warp that the mask `lanes` selects.
using Operation = void (*)(Warp&, const Instruction&, u32 lanes);

// How the schedule handles an instruction. An instruction of kind kNormal is simply run.
enum Kind : u8 {
  kNormal,
  kBranch,
  kExit,
  kWarpSync,
  kBlockBarrier,
  kClusterArrive,
  kClusterWait,
  kMbarrierWait
};
enum Space : u8 { kNoSpace, kGlobal, kShared, kSharedCluster, kParam, kConst };

// The bits of a shared address from this bit up are the rank of a block in the cluster, plus 1. If
// these bits are 0, the address is in the shared memory of the thread's own block.
constexpr u32 kRankShift = 24;

// Operands are rows of the warp's register file. Row 0 takes results that are not used.
struct Instruction {
  Operation run = nullptr;
  Operation rounded = nullptr;  // if set, `run` calls it in another rounding mode
  Kind kind = kNormal;
  Space space = kNoSpace;
  u8 elements = 1, bytes = 4;  // elements of a vector; bytes of an element
  u8 sources = 0;
  u8 variant = 0;  // the operation defines its meaning
  bool ftz = false, saturate = false, integral = false;
  bool negate_guard = false;
  int guard = -1;  // the row of the instruction's predicate, or -1
  int dest[4] = {}, source[6] = {};
  int members = 0;  // which source is the mask of participating lanes
  int target = 0, line = 0;
  int64_t offset = 0;  // added to the address
  // A cache: the allocation that was accessed last, and its entry for counters and races.
  mutable u64 begin = 0, end = 0, epoch = 0, watch = 0;
  mutable Watched* watched = nullptr;
};

// An instruction's name, split at its dots: setp.lt.f32 has the base setp and the type f32.
struct Opcode {
  std::vector<std::string> parts;
  explicit Opcode(const std::string& name);
  bool has(const char* part) const;
  bool has_result() const;  // false: all operands are sources
  // The parts between base and type, each with a dot before it, except the parts in `without`.
  std::string middle(std::initializer_list<const char*> without = {}) const;
  const std::string& base() const { return parts.front(); }
  const std::string& type() const { return parts.back(); }
};
// Sets the operation of a decoded instruction. Returns false if it is not supported.
bool choose_operation(Instruction&, const Opcode&);
// The compute capability from which on ptxas takes an instruction. 0: it is not checked.
int least_capability(const Opcode&);

struct Param {
  std::string name;
  size_t offset, size;
};
// A special register, such as %tid.x.
struct Special {
  u64 (*value)(const Warp&, int lane);
  int row;
};
bool find_special(const std::string& name, Special& out);  // false: no such register

struct Function {
  Module* module = nullptr;
  std::string name;
  std::vector<Param> params;
  size_t params_size = 0;
  std::vector<Instruction> code;
  int rows = 1;
  std::vector<std::pair<int, u64>> constants;  // row and value
  std::vector<Special> specials;
  int shared = 0, max_dynamic = 0, max_threads = 0;
  unsigned cluster = 1;  // blocks of a cluster
  int nonportable = 0;
  size_t first_token = 0;  // the first token of the body
};

struct Variable {
  u64 address;
  size_t bytes;
  // Stands for the address of dynamic shared memory until the kernel's static memory is placed.
  static constexpr u64 kDynamic = 0xdd00dd00dd00dd00;
};
struct Token {
  enum Type : u8 { kName, kNumber, kFloat, kDouble, kPunctuation, kString, kEnd } type;
  std::string text;
  u64 value;  // the bits, for a floating-point number
  int line;
};
struct Module {
  int device = 0;
  int capability = 0;  // for which it was compiled
  std::string text;
  std::vector<Token> tokens;
  std::map<std::string, Variable> variables;
  std::map<std::string, std::unique_ptr<Function>> kernels;
  std::string line(int number) const;  // a line of the text
};

// The part of a declaration after the state space: .align n, .ptr and so on, type, name, and sizes.
struct Declaration {
  std::string name;
  size_t align = 0, element = 0, bytes = 0;
};
// Reads the tokens of a module in turn.
struct Reader {
  Module& m;
  size_t at = 0;

  const Token& now() const { return m.tokens[at]; }
  bool is(const char* text) const { return now().text == text && now().type != Token::kString; }
  bool take(const char* text);  // skips `text` if it is next
  void need(const char* text);  // fails if `text` is not next
  std::string name();
  u64 number();
  void skip_to(const char* text);  // skips `text` and all that precedes it
  void skip_line();
  void skip_braces();
  Declaration declaration();
  [[noreturn]] void fail(const std::string& what) const;
};
void decode(Function&);

inline size_t round_up(size_t n, size_t to) { return to ? (n + to - 1) / to * to : n; }

}  // namespace sg
