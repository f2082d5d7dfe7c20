// SPDX-License-Identifier: MIT
// Atomic operations on memory, lane after lane, and sums over the lanes of a warp.
#include "floats.h"
#include "lanes.h"

namespace sg {
namespace {

template <auto f, class T>
void update(Warp& w, const Instruction& i, u32 lanes) {
  Pointers p;
  locate(w, i, lanes, w.row(i.source[0]), i.offset, u32(i.elements * sizeof(T)), i.space,
         AccessKind::kUpdate, p);
  for_lanes(lanes, [&](int lane) {
    for (int k = 0; k < i.elements; ++k) {
      u8* const at = p.at[lane] + k * sizeof(T);
      T old;
      memcpy(&old, at, sizeof(T));
      const T next = f(old, from_bits<T>(w.row(i.source[1 + k])[lane]),
                       from_bits<T>(w.row(i.source[2])[lane]));
      memcpy(at, &next, sizeof(T));
      w.row(i.dest[k])[lane] = to_bits(old);
    }
  });
}

template <auto f, class T>
void reduce_lanes(Warp& w, const Instruction& i, u32 lanes) {
  const u64* const source = w.row(i.source[0]);
  T v = from_bits<T>(source[__builtin_ctz(lanes)]);
  for_lanes(lanes & (lanes - 1), [&](int lane) { v = f(v, from_bits<T>(source[lane]), T()); });
  for_lanes(lanes, [&](int lane) { w.row(i.dest[0])[lane] = to_bits(v); });
}

template <class H>
H half_sum(H a, H b) {
  if constexpr (std::is_same_v<H, Half>)
    return rounded_half(value_of(a) + value_of(b), 0);
  else
    return rounded_bfloat(value_of(a) + value_of(b), 0);
}
template <class H>
struct Pair {
  H low, high;
};
constexpr auto half_add = []<class H>(H a, H b, H) { return half_sum(a, b); };
constexpr auto pair_add = []<class H>(Pair<H> a, Pair<H> b, Pair<H>) {
  return Pair<H>{half_sum(a.low, b.low), half_sum(a.high, b.high)};
};

struct Atomic {
  ByType in_memory, in_warp;
  Operation f32 = nullptr, f64 = nullptr;
};
template <auto f>
constexpr Atomic whole() {
  return {{update<f, u16>, nullptr, update<f, u32>, update<f, int32_t>, update<f, u64>,
           update<f, int64_t>},
          {nullptr, nullptr, reduce_lanes<f, u32>, reduce_lanes<f, int32_t>}};
}
template <auto f>
constexpr Atomic real() {
  Atomic out = whole<f>();
  out.f32 = update<f, float>, out.f64 = update<f, double>;
  return out;
}

const std::map<std::string, Atomic> table = {
    {"add", real<[]<class T>(T a, T b, T) { return T(a + b); }>()},
    {"inc", whole<[]<class T>(T a, T b, T) { return a >= b ? T(0) : T(a + 1); }>()},
    {"dec", whole<[]<class T>(T a, T b, T) { return (a == 0 || (a > b)) ? b : T(a - 1); }>()},
    {"min", whole<[]<class T>(T a, T b, T) { return b < a ? b : a; }>()},
    {"max", whole<[]<class T>(T a, T b, T) { return a < b ? b : a; }>()},
    {"and", whole<[]<class T>(T a, T b, T) { return T(a & b); }>()},
    {"or", whole<[]<class T>(T a, T b, T) { return T(a | b); }>()},
    {"xor", whole<[]<class T>(T a, T b, T) { return T(a ^ b); }>()},
    {"exch", whole<[]<class T>(T, T b, T) { return b; }>()},
    {"cas", whole<[]<class T>(T a, T b, T c) { return a == b ? c : a; }>()},
};
const std::map<std::string, Operation> half_adds = {{"f16", update<half_add, Half>},
                                                    {"bf16", update<half_add, Bfloat>},
                                                    {"f16x2", update<pair_add, Pair<Half>>},
                                                    {"bf16x2", update<pair_add, Pair<Bfloat>>}};

const Atomic* atomic_named(const Opcode& op) {
  for (size_t k = 1; k < op.parts.size(); ++k) {
    const auto found = table.find(op.parts[k]);
    if (found != table.end()) return &found->second;
  }
  return nullptr;
}

}  // namespace

bool choose_atomic(Instruction& i, const Opcode& op) {
  i.space = op.has("global")                            ? kGlobal
            : op.has("shared::cluster")                 ? kSharedCluster
            : op.has("shared") || op.has("shared::cta") ? kShared
                                                        : kGeneric;
  i.atomic = true;
  const Atomic* a = atomic_named(op);
  if (!a || op.has("async")) return false;
  const auto half = half_adds.find(op.type());
  i.run = half != half_adds.end() ? (op.has("add") ? half->second : nullptr)
          : op.type() == "f32"    ? a->f32
          : op.type() == "f64"    ? a->f64
                                  : a->in_memory.of(op.type());
  return i.run != nullptr;
}

// redux.sync
bool choose_lane_reduction(Instruction& i, const Opcode& op) {
  const Atomic* a = atomic_named(op);
  i.kind = kWarpSync;
  i.members = 1;
  i.run = a ? a->in_warp.of(op.type()) : nullptr;
  return i.run != nullptr;
}

}  // namespace sg
