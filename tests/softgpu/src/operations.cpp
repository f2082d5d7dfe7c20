// SPDX-License-Identifier: MIT
// Which family of instructions knows an opcode; moves, and what has nothing to do here.
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
  for (const std::string& part : parts)
    if (part == wanted) return true;
  return false;
}

namespace {

u64 ones(int bytes) { return bytes >= 8 ? ~0ull : (1ull << 8 * bytes) - 1; }

void pack(Warp& w, const Instruction& i, u32 lanes) {  // several registers into one
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

template <u64 window>
constexpr Operation to_window = each<[](u64 a) { return a | window; }, u64>;
constexpr Operation out_of_window = each<[](u64 a) { return a & ~kWindowBits; }, u64>;
template <u64 window>
constexpr Operation is_in_window = each<[](u64 a) { return (a & kWindowBits) == window; }, u64>;

bool is_shared(const Opcode& op) {
  return op.has("shared") || op.has("shared::cta") || op.has("shared::cluster");
}

bool choose_address(Instruction& i, const Opcode& op) {  // cvta, isspacep
  if (op.base() == "isspacep")
    i.run = is_shared(op)      ? is_in_window<kSharedWindow>
            : op.has("local")  ? is_in_window<kLocalWindow>
            : op.has("param")  ? is_in_window<kParamWindow>
            : op.has("global") ? is_in_window<0>
                               : nullptr;
  else if (is_shared(op) || op.has("local"))
    i.run = op.has("to")    ? out_of_window
            : is_shared(op) ? to_window<kSharedWindow>
                            : to_window<kLocalWindow>;
  else
    i.run = move;
  return i.run != nullptr;
}

// The same address in the shared memory of another block of the cluster.
void map_address(Warp& w, const Instruction& i, u32 lanes) {
  const size_t blocks = w.block->cluster->blocks.size();
  for_lanes(lanes, [&](int lane) {
    const u64 address = w.row(i.source[0])[lane];
    const u32 rank = u32(w.row(i.source[1])[lane]);
    if (rank >= blocks) fail(w, i, lane, 700, format("block %u of a cluster of %zu", rank, blocks));
    w.row(i.dest[0])[lane] = (address & kWindowBits) | (address & ((1u << kRankShift) - 1)) |
                             u64(rank + 1) << kRankShift;
  });
}
void rank_of_address(Warp& w, const Instruction& i, u32 lanes) {
  for_lanes(lanes, [&](int lane) {
    const u32 rank = u32(w.row(i.source[0])[lane] >> kRankShift) & 255;
    w.row(i.dest[0])[lane] = rank ? rank - 1 : w.block->rank;
  });
}
bool choose_cluster_address(Instruction& i, const Opcode& op) {
  i.run = op.base() == "mapa" ? map_address : rank_of_address;
  return true;
}

// Fences order what runs in order here anyway; hints about caches are no more than that.
bool choose_nothing(Instruction& i, const Opcode& op) {
  i.run = [](Warp&, const Instruction&, u32) {};
  return !op.has("mbarrier_init");
}

}  // namespace

bool choose_operation(Instruction& i, const Opcode& op) {
  using Family = bool (*)(Instruction&, const Opcode&);
  static const std::map<std::string, Family> families = [] {
    std::map<std::string, Family> out;
    const auto add = [&](Family family, std::initializer_list<const char*> bases) {
      for (const char* base : bases) out[base] = family;
    };
    add(choose_arithmetic,
        {"add", "sub",  "mul", "mad",   "fma", "div", "rem", "min", "max",  "neg",     "abs",
         "sad", "sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", "copysign"});
    add(choose_bits, {"and", "or", "xor", "not", "cnot", "shl", "shr", "shf", "bfe", "bfi", "bfind",
                      "popc", "clz", "brev", "lop3", "prmt"});
    add(choose_comparison, {"setp", "set", "selp", "slct"});
    add(choose_conversion, {"cvt"});
    add(choose_move, {"mov"});
    add(choose_address, {"cvta", "isspacep"});
    add(choose_cluster_address, {"mapa", "getctarank"});
    add(choose_memory, {"ld", "ldu", "st"});
    add(choose_atomic, {"atom", "red"});
    add(choose_async_copy, {"cp"});
    add(choose_warp_operation, {"shfl", "vote", "match", "redux", "elect", "activemask"});
    add(choose_barrier, {"bar", "barrier"});
    add(choose_nothing, {"membar", "fence", "prefetch", "prefetchu", "discard", "applypriority",
                         "nanosleep", "createpolicy", "griddepcontrol", "pmevent"});
    return out;
  }();
  i.ftz = op.has("ftz"), i.saturate = op.has("sat"), i.relu = op.has("relu");
  for (const char* mode : {"rni", "rzi", "rmi", "rpi"}) i.integral |= op.has(mode);
  i.rounding = op.has("rz") || op.has("rzi")   ? 1
               : op.has("rm") || op.has("rmi") ? 2
               : op.has("rp") || op.has("rpi") ? 3
                                               : 0;
  const auto family = families.find(op.base());
  return family != families.end() && !op.has("cc") && family->second(i, op);
}

}  // namespace sg
