// SPDX-License-Identifier: MIT
// Comparisons, and choices by what came of them.
#include "floats.h"
#include "lanes.h"

namespace sg {
namespace {

// What a predicate is combined with.
enum Combined : u8 { kAlone, kAnd, kOr, kXor };

template <class T>
auto comparable(T v) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, Bfloat>)
    return value_of(v);
  else
    return v;
}

// d|e = a compared with b, and the contrary; each combined with c.
template <auto compare, class T, bool ftz>
void set_predicate(Warp& w, const Instruction& i, u32 lanes) {
  const u64 *const a = w.row(i.source[0]), *const b = w.row(i.source[1]);
  u64 *const d = w.row(i.dest[0]), *const e = w.row(i.dest[1]);
  const auto result = [=](int lane) {
    const auto x = comparable(from_bits<T>(a[lane])), y = comparable(from_bits<T>(b[lane]));
    if constexpr (ftz)
      return compare(flushed(x), flushed(y));
    else
      return compare(x, y);
  };
  if (i.variant == kAlone && i.dest[1] == 0) {
    each_lane(lanes, [=](int lane) { d[lane] = result(lane); });
    return;
  }
  const u64* const c = w.row(i.source[2]);
  const auto combined = [&](bool r, int lane) {
    const bool with = c[lane] & 1;
    return i.variant == kAlone ? r
           : i.variant == kAnd ? r && with
           : i.variant == kOr  ? r || with
                               : r != with;
  };
  for_lanes(lanes, [&](int lane) {
    const bool r = result(lane), yes = combined(r, lane), no = combined(!r, lane);
    d[lane] = yes;
    e[lane] = no;
  });
}

struct Comparison {
  ByType integer;
  Operation f16, bf16, f32, f32_ftz, f64;
};
template <auto compare>
constexpr Comparison comparison() {
  return {{set_predicate<compare, u16, false>, set_predicate<compare, int16_t, false>,
           set_predicate<compare, u32, false>, set_predicate<compare, int32_t, false>,
           set_predicate<compare, u64, false>, set_predicate<compare, int64_t, false>},
          set_predicate<compare, Half, false>,
          set_predicate<compare, Bfloat, false>,
          set_predicate<compare, float, false>,
          set_predicate<compare, float, true>,
          set_predicate<compare, double, false>};
}
constexpr auto less = []<class T>(T a, T b) { return a < b; };
constexpr auto less_equal = []<class T>(T a, T b) { return a <= b; };
constexpr auto greater = []<class T>(T a, T b) { return a > b; };
constexpr auto greater_equal = []<class T>(T a, T b) { return a >= b; };

// Those with a u at the end hold for NaN, too.
const std::map<std::string, Comparison> table = {
    {"eq", comparison<[]<class T>(T a, T b) { return a == b; }>()},
    {"ne", comparison<[]<class T>(T a, T b) { return (a < b) || (a > b); }>()},
    {"lt", comparison<less>()},
    {"le", comparison<less_equal>()},
    {"gt", comparison<greater>()},
    {"ge", comparison<greater_equal>()},
    {"lo", comparison<less>()},
    {"ls", comparison<less_equal>()},
    {"hi", comparison<greater>()},
    {"hs", comparison<greater_equal>()},
    {"equ", comparison<[]<class T>(T a, T b) { return !(a < b) && !(a > b); }>()},
    {"neu", comparison<[]<class T>(T a, T b) { return a != b; }>()},
    {"ltu", comparison<[]<class T>(T a, T b) { return !(a >= b); }>()},
    {"leu", comparison<[]<class T>(T a, T b) { return !(a > b); }>()},
    {"gtu", comparison<[]<class T>(T a, T b) { return !(a <= b); }>()},
    {"geu", comparison<[]<class T>(T a, T b) { return !(a < b); }>()},
    {"num", comparison<[]<class T>(T a, T b) { return a == a && b == b; }>()},
    {"nan", comparison<[]<class T>(T a, T b) { return a != a || b != b; }>()},
};

bool choose_set_predicate(Instruction& i, const Opcode& op) {
  const auto found = table.find(op.parts[1]);
  if (found == table.end()) return false;
  const Comparison& c = found->second;
  i.variant = op.has("and") ? kAnd : op.has("or") ? kOr : op.has("xor") ? kXor : kAlone;
  const std::string& type = op.type();
  i.run = type == "f32"    ? (i.ftz ? c.f32_ftz : c.f32)
          : type == "f64"  ? c.f64
          : type == "f16"  ? c.f16
          : type == "bf16" ? c.bf16
                           : c.integer.of(type);
  return i.run != nullptr;
}

// set: a comparison's result as 1.0 or all ones.
void set_number(Warp& w, const Instruction& i, u32 lanes) {
  i.rounded(w, i, lanes);
  u64* const d = w.row(i.dest[0]);
  const u64 yes = i.bytes == 4 ? to_bits(1.0f) : 0xffffffff;
  for_lanes(lanes, [=](int lane) { d[lane] = d[lane] & 1 ? yes : 0; });
}

template <class T>
constexpr Operation choice_by_sign =
    each<[](u64 a, u64 b, T c) { return c >= 0 ? a : b; }, u64, u64, T>;

}  // namespace

bool choose_comparison(Instruction& i, const Opcode& op) {
  if (op.base() == "selp") {
    i.run = each<[](u64 a, u64 b, bool c) { return c ? a : b; }, u64, u64, bool>;
    return true;
  }
  if (op.base() == "slct") {
    i.run = op.type() == "f32" ? choice_by_sign<float> : choice_by_sign<int32_t>;
    return true;
  }
  if (op.parts.size() < 3 || !choose_set_predicate(i, op)) return false;
  if (op.base() == "setp") return true;
  const std::string& result = op.parts[op.parts.size() - 2];
  if (result != "f32" && result != "u32" && result != "s32") return false;
  i.bytes = result == "f32" ? 4 : 0;
  i.rounded = i.run;
  i.run = set_number;
  return true;
}

}  // namespace sg
