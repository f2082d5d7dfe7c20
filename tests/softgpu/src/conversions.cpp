// SPDX-License-Identifier: MIT
// cvt: one number's type to another's.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <tuple>

#include "floats.h"
#include "lanes.h"

namespace sg {
namespace {

template <class T>
constexpr bool kIsHalf = std::is_same_v<T, Half> || std::is_same_v<T, Bfloat>;

template <class To, class From>
To clamped(From v) {
  using Limits = std::numeric_limits<To>;
  if (std::is_signed_v<From> && v < 0 &&
      (!std::is_signed_v<To> || int64_t(v) < int64_t(Limits::min())))
    return Limits::min();
  if (v > 0 && u64(v) > u64(Limits::max())) return Limits::max();
  return To(v);
}

double rounded_to_integer(double v, int rounding) {
  switch (rounding) {
    case 0:
      return std::nearbyint(v);
    case 1:
      return std::trunc(v);
    case 2:
      return std::floor(v);
    default:
      return std::ceil(v);
  }
}

// A NaN is 0, but the upper bit alone where either type has 64 bits; too large is the limit.
template <class To, class From>
To integer_of(double v, int rounding) {
  using Limits = std::numeric_limits<To>;
  if (std::isnan(v))
    return sizeof(To) == 8 || sizeof(From) == 8 ? To(u64(1) << (8 * sizeof(To) - 1)) : To(0);
  v = rounded_to_integer(v, rounding);
  if (v <= double(Limits::min())) return Limits::min();
  if (v >= double(Limits::max())) return Limits::max();
  return To(v);
}

// To a floating-point type, under the rounding mode that is set.
template <class To, class From>
To floating_of(From v, const Instruction& i) {
  if constexpr (std::is_same_v<To, Half>)
    return rounded_half(double(v), i.rounding);
  else if constexpr (std::is_same_v<To, Bfloat>)
    return rounded_bfloat(double(v), i.rounding);
  else
    return To(v);
}

template <class To, class From>
To converted(From given, const Instruction& i) {
  if constexpr (std::is_integral_v<From>) {
    if constexpr (std::is_integral_v<To>)
      return i.saturate ? clamped<To>(given) : To(given);
    else
      return floating_of<To>(given, i);
  } else if constexpr (kIsHalf<From>) {
    if constexpr (std::is_integral_v<To>)
      return integer_of<To, From>(value_of(given), i.rounding);
    else
      return floating_of<To>(i.saturate ? saturated(value_of(given)) : value_of(given), i);
  } else {
    const From v = i.ftz ? flushed(given) : given;
    if constexpr (std::is_integral_v<To>) {
      return integer_of<To, From>(v, i.rounding);
    } else {
      double wide = i.integral ? rounded_to_integer(v, i.rounding) : v;
      if (i.saturate) wide = saturated(wide);
      if (i.relu && wide < 0) wide = 0;
      const To out = floating_of<To>(wide, i);
      if constexpr (std::is_same_v<To, float>) return i.ftz ? flushed(out) : out;
      return out;
    }
  }
}

template <class To, class From>
void convert(Warp& w, const Instruction& i, u32 lanes) {
  u64* const d = w.row(i.dest[0]);
  const u64* const a = w.row(i.source[0]);
  for_lanes(lanes,
            [&](int lane) { d[lane] = to_bits(converted<To>(from_bits<From>(a[lane]), i)); });
}
// What needs no rounding, or is rounded as usual, in a loop of its own.
template <class To, class From>
constexpr Operation kPlain = each<[](From v) { return To(v); }, From>;

// Two float32 into a pair of halves: the first one is the upper.
template <class To>
void convert_pair(Warp& w, const Instruction& i, u32 lanes) {
  for_lanes(lanes, [&](int lane) {
    const u64 high = converted<To>(from_bits<float>(w.row(i.source[0])[lane]), i).bits;
    const u64 low = converted<To>(from_bits<float>(w.row(i.source[1])[lane]), i).bits;
    w.row(i.dest[0])[lane] = high << 16 | low;
  });
}

// All pairs of types.
using Types =
    std::tuple<u8, int8_t, u16, int16_t, u32, int32_t, u64, int64_t, Half, Bfloat, float, double>;
const char* const names[] = {"u8",  "s8",  "u16", "s16",  "u32", "s32",
                             "u64", "s64", "f16", "bf16", "f32", "f64"};
constexpr size_t kTypes = std::size(names), kHalf = 8, kFloat = 10, kDouble = 11;

template <size_t... k>
constexpr auto every_pair(std::index_sequence<k...>) {
  return std::array<Operation, kTypes * kTypes>{
      convert<std::tuple_element_t<k / kTypes, Types>, std::tuple_element_t<k % kTypes, Types>>...};
}
constexpr auto pairs = every_pair(std::make_index_sequence<kTypes * kTypes>{});

template <class From>
Operation resized(size_t to) {
  static constexpr Operation all[] = {
      kPlain<u8, From>,  kPlain<int8_t, From>,  kPlain<u16, From>, kPlain<int16_t, From>,
      kPlain<u32, From>, kPlain<int32_t, From>, kPlain<u64, From>, kPlain<int64_t, From>};
  return all[to];
}

// The common ones, in quick loops.
Operation quick(size_t to, size_t from, bool ftz) {
  if (to < kHalf && from < kHalf && from >= 2) {
    static constexpr Operation (*by_source[])(size_t) = {resized<u16>, resized<int16_t>,
                                                         resized<u32>, resized<int32_t>,
                                                         resized<u64>, resized<int64_t>};
    return by_source[from - 2](to);
  }
  if (to == kDouble && from == kFloat)
    return ftz ? each<[](float v) { return double(flushed(v)); }, float> : kPlain<double, float>;
  if (to == kFloat && from == kDouble)
    return ftz ? each<[](double v) { return flushed(float(v)); }, double> : kPlain<float, double>;
  return nullptr;
}

size_t type_named(const std::string& name) {
  return size_t(std::find(std::begin(names), std::end(names), name) - std::begin(names));
}

}  // namespace

bool choose_conversion(Instruction& i, const Opcode& op) {
  if (op.parts.size() < 3) return false;
  const std::string& name = op.parts[op.parts.size() - 2];
  if ((name == "f16x2" || name == "bf16x2") && op.type() == "f32") {
    i.run = name == "f16x2" ? convert_pair<Half> : convert_pair<Bfloat>;
    return i.sources == 2;
  }
  const size_t to = type_named(name), from = type_named(op.type());
  if (to == kTypes || from == kTypes) return false;
  i.run = pairs[to * kTypes + from];
  if (!i.saturate && !i.relu && !i.integral)
    if (const Operation fast = quick(to, from, i.ftz)) i.run = fast;
  set_rounding(i);
  return true;
}

}  // namespace sg
