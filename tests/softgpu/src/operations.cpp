// SPDX-License-Identifier: MIT
// Finds the family of an opcode. Runs moves, shuffles, votes, and instructions on addresses.
#include <algorithm>

#include "lanes.h"

namespace sg {

Opcode::Opcode(const std::string& name) {
  for (size_t from = 0; from <= name.size();) {
    const size_t dot = std::min(name.find('.', from), name.size());
    parts.push_back(name.substr(from, dot - from));
    from = dot + 1;
  }
}

bool Opcode::has(const char* wanted) const {
  return std::find(parts.begin(), parts.end(), wanted) != parts.end();
}

bool Opcode::has_result() const {
  if (base() == "bar" || base() == "barrier") return has("red");
  if (base() == "mbarrier") return !has("init");
  for (const char* without : {"st", "red", "membar", "fence", "cp", "prefetch"})
    if (base() == without) return false;
  return true;
}

std::string Opcode::middle(std::initializer_list<const char*> without) const {
  std::string out;
  for (size_t k = 1; k + 1 < parts.size(); ++k)
    if (std::find(without.begin(), without.end(), parts[k]) == without.end()) out += "." + parts[k];
  return out;
}

namespace {

// The values of special registers, by name, for a lane of a warp and an axis.
const std::map<std::string, SpecialValue> specials = {
    {"%tid",
     [](const Warp& w, int lane, int axis) -> u64 {
       const unsigned t = unsigned(w.first_thread + lane), *const n = running->launch.block;
       return axis == 0 ? t % n[0] : axis == 1 ? t / n[0] % n[1] : t / n[0] / n[1];
     }},
    {"%ntid", [](const Warp&, int, int axis) -> u64 { return running->launch.block[axis]; }},
    {"%ctaid", [](const Warp& w, int, int axis) -> u64 { return w.block->id[axis]; }},
    {"%nctaid", [](const Warp&, int, int axis) -> u64 { return running->launch.grid[axis]; }},
    {"%laneid", [](const Warp&, int lane, int) -> u64 { return u64(lane); }},
    {"%cluster_ctarank", [](const Warp& w, int, int) -> u64 { return w.block->rank; }},
};

u64 ones(int bytes) { return bytes >= 8 ? ~0ull : (1ull << 8 * bytes) - 1; }

void pack(Warp& w, const Instruction& i, u32 lanes) {  // packs several registers into one
  for_lanes(lanes, [&](int lane) {
    u64 v = 0;
    for (int k = 0; k < i.sources; ++k)
      v |= (w.row(i.source[k])[lane] & ones(i.bytes)) << 8 * i.bytes * k;
    w.row(i.dest[0])[lane] = v;
  });
}
void unpack(Warp& w, const Instruction& i, u32 lanes) {
  for_lanes(lanes, [&](int lane) {
    const u64 v = w.row(i.source[0])[lane];
    for (int k = 0; k < i.elements; ++k)
      w.row(i.dest[k])[lane] = v >> 8 * i.bytes * k & ones(i.bytes);
  });
}
constexpr Operation move = each<[](u64 a) { return a; }, u64>;

bool choose_move(Instruction& i, const Opcode& op) {
  if (op.type() == "b128") return false;
  const int bytes = op.type() == "pred" ? 8 : atoi(op.type().c_str() + 1) / 8;
  i.run = i.elements > 1 && i.sources == 1 ? unpack : i.sources > 1 ? pack : move;
  i.bytes = u8(bytes / std::max<int>(i.elements > 1 ? i.elements : 1, i.sources));
  return true;
}

// A generic address of global or local memory is the address itself. Generic addresses of shared
// memory are not supported.
bool choose_address(Instruction& i, const Opcode& op) {
  i.run = move;
  return op.has("global") || op.has("local");
}

void map_address(Warp& w, const Instruction& i, u32 lanes) {
  const size_t blocks = w.block->cluster->blocks.size();
  for_lanes(lanes, [&](int lane) {
    const u64 offset = w.row(i.source[0])[lane] & ((1u << kRankShift) - 1);
    const u32 rank = u32(w.row(i.source[1])[lane]);
    if (rank >= blocks) fail(w, i, lane, 700, format("block %u of a cluster of %zu", rank, blocks));
    w.row(i.dest[0])[lane] = offset | u64(rank + 1) << kRankShift;
  });
}
bool choose_cluster_address(Instruction& i, const Opcode& op) {
  i.run = map_address;
  return op.type() == "u32";
}

// Returns the lane from which a value comes. Sets `ok` to whether both lanes are in one segment.
int shuffle_source(char how, int lane, u32 by, u32 clamp_and_segment, bool& ok) {
  const int bound = int(clamp_and_segment & 31), segment = int(clamp_and_segment >> 8 & 31);
  const int last = (lane & segment) | (bound & ~segment), first = lane & segment;
  const int b = int(by & 31);
  const int from = how == 'u'   ? lane - b
                   : how == 'd' ? lane + b
                   : how == 'b' ? lane ^ b
                                : first | (b & ~segment);
  ok = how == 'u' ? from >= last : from <= last;
  return ok ? from : lane;
}

void shuffle(Warp& w, const Instruction& i, u32 lanes) {
  u64 values[32];
  memcpy(values, w.row(i.source[0]), sizeof values);
  const u64 *const by = w.row(i.source[1]), *const clamp = w.row(i.source[2]);
  u64 *const dest = w.row(i.dest[0]), *const inside = w.row(i.dest[1]);
  for_lanes(lanes, [&](int lane) {
    bool ok;
    const int from = shuffle_source(char(i.variant), lane, u32(by[lane]), u32(clamp[lane]), ok);
    dest[lane] = lanes >> from & 1 ? u32(values[from]) : 0xffbadbad;  // not defined
    inside[lane] = ok;
  });
}

bool choose_shuffle(Instruction& i, const Opcode& op) {
  if (op.parts.size() != 4 || op.parts[1] != "sync") return false;
  i.kind = kWarpSync;
  i.members = 3;
  i.variant = u8(op.parts[2][0]);  // the first letter of up, down, bfly or idx
  i.run = shuffle;
  return true;
}

template <auto f>
void vote(Warp& w, const Instruction& i, u32 lanes) {
  const u64* const votes = w.row(i.source[0]);
  u32 yes = 0;
  for_lanes(lanes, [&](int lane) { yes |= u32(votes[lane] & 1) << lane; });
  for_lanes(lanes, [&](int lane) { w.row(i.dest[0])[lane] = f(yes, lanes); });
}
const std::map<std::string, Operation> votes = {
    {".all.pred", vote<[](u32 yes, u32 lanes) { return u32(yes == lanes); }>},
    {".any.pred", vote<[](u32 yes, u32) { return u32(yes != 0); }>},
    {".uni.pred", vote<[](u32 yes, u32 lanes) { return u32(yes == lanes || yes == 0); }>},
    {".ballot.b32", vote<[](u32 yes, u32) { return yes; }>},
};
bool choose_vote(Instruction& i, const Opcode& op) {
  const auto found = votes.find(op.middle({"sync"}) + "." + op.type());
  i.kind = kWarpSync;
  i.members = 1;
  i.run = found == votes.end() || !op.has("sync") ? nullptr : found->second;
  return i.run != nullptr;
}
bool choose_active_mask(Instruction& i, const Opcode&) {
  i.run = [](Warp& w, const Instruction& i, u32 lanes) {
    for_lanes(lanes, [&](int lane) { w.row(i.dest[0])[lane] = lanes; });
  };
  return true;
}

using Family = bool (*)(Instruction&, const Opcode&);
Family family_of(const std::string& base) {
  static const std::map<std::string, Family> families = [] {
    std::map<std::string, Family> out;
    const auto add = [&](Family family, std::initializer_list<const char*> bases) {
      for (const char* known : bases) out[known] = family;
    };
    add(choose_arithmetic,
        {"add",   "sub",  "mul", "mad",  "fma",  "div", "rem",   "min", "max", "neg",  "abs",
         "and",   "or",   "xor", "not",  "shl",  "shr", "bfi",   "rcp", "ex2", "sqrt", "copysign",
         "bfind", "popc", "clz", "brev", "prmt", "shf", "rsqrt", "lg2", "tanh"});
    add(choose_comparison, {"setp", "selp"});
    add(choose_conversion, {"cvt"});
    add(choose_move, {"mov"});
    add(choose_address, {"cvta"});
    add(choose_cluster_address, {"mapa"});
    add(choose_memory, {"ld", "st"});
    add(choose_atomic, {"atom", "red"});
    add(choose_async_copy, {"cp"});
    add(choose_prefetch, {"prefetch"});
    add(choose_shuffle, {"shfl"});
    add(choose_vote, {"vote"});
    add(choose_active_mask, {"activemask"});
    add(choose_barrier, {"bar", "barrier"});
    add(choose_mbarrier, {"mbarrier"});
    add(choose_fence, {"membar", "fence"});
    add(choose_grid_control, {"griddepcontrol"});
    return out;
  }();
  const auto found = families.find(base);
  return found == families.end() ? nullptr : found->second;
}

}  // namespace

bool find_special(const std::string& name, Special& out) {
  const size_t dot = std::min(name.find('.'), name.size());
  const auto found = specials.find(name.substr(0, dot));
  if (found == specials.end()) return false;
  const char axis = dot + 1 < name.size() ? name[dot + 1] : 'x';
  out = {found->second, axis == 'y' ? 1 : axis == 'z' ? 2 : 0, 0};
  return true;
}

bool choose_operation(Instruction& i, const Opcode& op) {
  i.ftz = op.has("ftz"), i.saturate = op.has("sat");
  for (const char* mode : {"rni", "rzi", "rmi", "rpi"}) i.integral |= op.has(mode);
  i.rounding = op.has("rz") || op.has("rzi")   ? 1
               : op.has("rm") || op.has("rmi") ? 2
               : op.has("rp") || op.has("rpi") ? 3
                                               : 0;
  const Family family = family_of(op.base());
  return family && family(i, op);
}

}  // namespace sg
