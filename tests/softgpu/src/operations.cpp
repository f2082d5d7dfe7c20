// SPDX-License-Identifier: MIT
// Finds the family of an opcode. Runs moves, shuffles, and instructions on addresses.
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
  if (base() == "mbarrier") return !has("init");
  for (const char* without : {"st", "bar", "barrier", "fence", "cp", "prefetch"})
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

const std::map<std::string, u64 (*)(const Warp&, int)> specials = {
    {"%tid.x", [](const Warp& w, int lane) { return u64(w.first_thread + lane); }},
    {"%ntid.x", [](const Warp&, int) { return u64(running->launch.block); }},
    {"%ctaid.x", [](const Warp& w, int) { return u64(w.block->id); }},
    {"%nctaid.x", [](const Warp&, int) { return u64(running->launch.grid); }},
    {"%cluster_ctarank", [](const Warp& w, int) { return u64(w.block->rank); }},
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

// A generic address of global memory is the address itself.
bool choose_address(Instruction& i, const Opcode& op) {
  i.run = move;
  return op.has("global");
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

// Exchanges values between lanes whose numbers differ by the second source.
void shuffle(Warp& w, const Instruction& i, u32 lanes) {
  u64 values[32];
  memcpy(values, w.row(i.source[0]), sizeof values);
  const u64 *const by = w.row(i.source[1]), *const clamp = w.row(i.source[2]);
  u64 *const dest = w.row(i.dest[0]), *const inside = w.row(i.dest[1]);
  for_lanes(lanes, [&](int lane) {
    const u32 bound = u32(clamp[lane]) & 31, segment = u32(clamp[lane]) >> 8 & 31;
    const u32 from = u32(lane) ^ (u32(by[lane]) & 31);
    inside[lane] = from <= ((u32(lane) & segment) | (bound & ~segment));
    const u32 source = inside[lane] ? from : u32(lane);
    dest[lane] = lanes >> source & 1 ? u32(values[source]) : 0xffbadbad;  // not defined
  });
}

bool choose_shuffle(Instruction& i, const Opcode& op) {
  i.kind = kWarpSync;
  i.members = 3;
  i.run = shuffle;
  return op.has("sync") && op.has("bfly");
}

// Gives all lanes of a mask f of their values. Lanes that have ended have none.
template <auto f, class T>
void reduce(Warp& w, const Instruction& i, u32 lanes) {
  const u64* const values = w.row(i.source[0]);
  T all = T(values[__builtin_ctz(lanes)]);
  for_lanes(lanes & (lanes - 1), [&](int lane) { all = f(all, T(values[lane])); });
  u64* const dest = w.row(i.dest[0]);
  for_lanes(lanes, [&](int lane) { dest[lane] = to_bits(all); });
}
constexpr auto sum = [](u32 a, u32 b) { return a + b; };
constexpr auto lesser_integer = []<class T>(T a, T b) { return std::min(a, b); };
constexpr auto larger_integer = []<class T>(T a, T b) { return std::max(a, b); };
const std::map<std::string, Operation> reductions = {
    {".sync.add.u32", reduce<sum, u32>},
    {".sync.add.s32", reduce<sum, u32>},
    {".sync.min.u32", reduce<lesser_integer, u32>},
    {".sync.min.s32", reduce<lesser_integer, int32_t>},
    {".sync.max.u32", reduce<larger_integer, u32>},
    {".sync.max.s32", reduce<larger_integer, int32_t>},
    {".sync.and.b32", reduce<[](u32 a, u32 b) { return a & b; }, u32>},
    {".sync.or.b32", reduce<[](u32 a, u32 b) { return a | b; }, u32>},
    {".sync.xor.b32", reduce<[](u32 a, u32 b) { return a ^ b; }, u32>},
};

bool choose_reduction(Instruction& i, const Opcode& op) {
  i.kind = kWarpSync;
  i.members = 1;
  const auto found = reductions.find(op.middle() + "." + op.type());
  i.run = found == reductions.end() ? nullptr : found->second;
  return i.run != nullptr;
}

using Family = bool (*)(Instruction&, const Opcode&);
Family family_of(const std::string& base) {
  static const std::map<std::string, Family> families = {
      {"setp", choose_comparison},
      {"selp", choose_comparison},
      {"cvt", choose_conversion},
      {"mov", choose_move},
      {"cvta", choose_address},
      {"mapa", choose_cluster_address},
      {"ld", choose_memory},
      {"st", choose_memory},
      {"cp", choose_async_copy},
      {"prefetch", choose_prefetch},
      {"shfl", choose_shuffle},
      {"redux", choose_reduction},
      {"bar", choose_barrier},
      {"barrier", choose_barrier},
      {"fence", choose_fence},
      {"mbarrier", choose_mbarrier},
      {"griddepcontrol", choose_grid_control},
  };
  const auto found = families.find(base);
  return found == families.end() ? choose_arithmetic : found->second;
}

}  // namespace

bool find_special(const std::string& name, Special& out) {
  const auto found = specials.find(name);
  if (found == specials.end()) return false;
  out.value = found->second;
  return true;
}

bool choose_operation(Instruction& i, const Opcode& op) {
  i.ftz = op.has("ftz"), i.saturate = op.has("sat");
  return family_of(op.base())(i, op);
}

int least_capability(const Opcode& op) {
  if (op.type() == "f32x2") return 100;
  return op.base() == "redux" ? 80 : 0;
}

}  // namespace sg
