// SPDX-License-Identifier: MIT
// cvt: conversions between types.
#include <immintrin.h>

#include <algorithm>

#include "lanes.h"

namespace sg {
namespace {

// Half types, stored as bits. Results are rounded to nearest.
struct Half {
  u16 bits;
  explicit operator double() const { return _cvtsh_ss(bits); }
};
struct Bfloat {
  u16 bits;
  explicit operator double() const { return double(from_bits<float>(u64(bits) << 16)); }
};

// Rounds to odd: the last bit of the float32 is 1 if the value is inexact. Rounding the float32
// again, to 16 bits, then gives the same as rounding the value once.
float rounded_to_odd(double v) {
  const float f = float(v);
  if (double(f) == v || std::isnan(v) || std::isinf(v)) return f;
  const u32 bits = u32(to_bits(f)) - (std::fabs(double(f)) > std::fabs(v));  // toward zero
  return from_bits<float>(bits | 1);
}
template <class To>
To half_of(double v) {
  if (std::isnan(v)) return {0x7fff};
  const float f = rounded_to_odd(v);
  if constexpr (std::is_same_v<To, Half>) return {u16(_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT))};
  const u32 bits = u32(to_bits(f));
  return {u16((bits + (std::isinf(f) ? 0 : 0x7fff + (bits >> 16 & 1))) >> 16)};
}

// Rounds with `whole`. Values out of range become the nearest limit. A NaN becomes 0, or the least
// integer if either type has 64 bits.
template <class To, class From, double (*whole)(double)>
void to_integer(Warp& w, const Instruction& i, u32 lanes) {
  using Limits = std::numeric_limits<To>;
  constexpr bool is_long = sizeof(To) == 8 || sizeof(From) == 8;
  constexpr double end = 2.0 * (Limits::max() / 2 + 1);  // max + 1, exactly
  apply<From>(w, i, lanes, [](From from) {
    const double v = whole(from);
    if (std::isnan(v)) return is_long ? Limits::min() : To(0);
    if (v >= end) return Limits::max();
    return v >= -end ? To(v) : Limits::min();
  });
}

// Rounds to an 8-bit float with `fraction` bits after the point, whose least normal number is
// 2^least. Numbers beyond `largest` and infinity become `largest`. Any NaN becomes 0x7f.
template <int fraction, int least, int largest>
u32 float8_of(float v) {
  if (std::isnan(v)) return 0x7f;
  const float size = std::min(std::fabs(v), float(largest));
  const int exponent = std::max(int(to_bits(size) >> 23) - 127, least);
  const float scale = from_bits<float>(u64(127 + fraction - exponent) << 23);  // a power of 2
  const int steps = int(std::nearbyint(size * scale)) + ((exponent - least) << fraction);
  return u32(std::signbit(v)) << 7 | u32(steps);
}
// A pair of 8-bit floats; a becomes the upper one.
template <int fraction, int least, int largest>
constexpr auto pair_of_float8 = [](float a, float b) {
  return float8_of<fraction, least, largest>(a) << 8 | float8_of<fraction, least, largest>(b);
};

// Changes an integer's width: keeps its lowest i.bytes, and extends the sign if i.variant is 1.
void keep_bytes(Warp& w, const Instruction& i, u32 lanes) {
  const u64 mask = ~0ull >> (64 - 8 * i.bytes), sign = i.variant ? (mask >> 1) + 1 : 0;
  apply<u64>(w, i, lanes, [=](u64 v) { return ((v & mask) ^ sign) - sign; });
}

// Converts to a floating-point type, under the current rounding mode.
template <class To, class From>
void to_real(Warp& w, const Instruction& i, u32 lanes) {
  apply<From>(w, i, lanes, [&](From from) {
    double v(from);
    if constexpr (std::is_same_v<From, float>)
      if (i.ftz) v = double(flushed(from));
    if (i.integral) v = i.variant ? std::trunc(v) : std::nearbyint(v);
    if (i.saturate) v = v > 0 ? std::min(v, 1.0) : 0;  // a NaN becomes 0
    if constexpr (std::is_same_v<To, float>)
      return i.ftz ? flushed(float(v)) : float(v);
    else if constexpr (std::is_same_v<To, double>)
      return v;
    else
      return half_of<To>(v).bits;
  });
}

// A conversion by a cast, in a loop that vectorizes.
template <class To, class From>
constexpr Operation kPlain = each<[](From v) { return To(v); }, From>;

// Conversions between floating-point types. Those of `fast`, without and with a flush, vectorize.
const std::map<std::string, std::pair<Operation, Operation>> fast = {
    {".f64.f32", {kPlain<double, float>, each<[](float v) { return double(flushed(v)); }, float>}},
    {".f32.f64", {kPlain<float, double>, each<[](double v) { return flushed(float(v)); }, double>}},
};
const std::map<std::string, Operation> of_reals = {
    {".f32.f32", to_real<float, float>},   {".f64.f32", to_real<double, float>},
    {".f16.f32", to_real<Half, float>},    {".bf16.f32", to_real<Bfloat, float>},
    {".f64.f64", to_real<double, double>}, {".f32.f64", to_real<float, double>},
    {".f16.f64", to_real<Half, double>},   {".bf16.f64", to_real<Bfloat, double>},
    {".f32.f16", to_real<float, Half>},    {".f32.bf16", to_real<float, Bfloat>},
};
template <class To>
constexpr ByType kFromIntegers = {kPlain<To, u16>,     kPlain<To, int16_t>, kPlain<To, u32>,
                                  kPlain<To, int32_t>, kPlain<To, u64>,     kPlain<To, int64_t>};
const std::map<std::string, ByType> of_integers = {{"f32", kFromIntegers<float>},
                                                   {"f64", kFromIntegers<double>}};
// Conversions that have one mode each, by that mode and the types. Their results have limits.
const std::map<std::string, Operation> limited = {
    {".rzi.s64.f64", to_integer<int64_t, double, std::trunc>},
    {".rni.s32.f64", to_integer<int32_t, double, std::nearbyint>},
    {".rni.s32.f32", to_integer<int32_t, float, std::nearbyint>},
    {".rni.s8.f64", to_integer<int8_t, double, std::nearbyint>},
    {".rni.s8.f32", to_integer<int8_t, float, std::nearbyint>},
    {".rn.satfinite.e4m3x2.f32", each<pair_of_float8<3, -6, 448>, float, float>},
    {".rn.satfinite.e5m2x2.f32", each<pair_of_float8<2, -14, 57344>, float, float>},
};

bool is_integer(const std::string& type) { return type[0] == 's' || type[0] == 'u'; }
int bytes_of(const std::string& type) { return atoi(type.c_str() + 1) / 8; }

}  // namespace

bool choose_conversion(Instruction& i, const Opcode& op) {
  if (op.parts.size() < 3) return false;
  const std::string &from = op.type(), &to = op.parts[op.parts.size() - 2];
  // .ftz and .sat change none of these: a subnormal number becomes 0 anyway.
  if (const auto found = limited.find(op.middle({"ftz", "sat"}) + "." + from);
      found != limited.end()) {
    i.run = found->second;
    return true;
  }
  if (!op.middle({"rn", "rni", "rzi", "ftz", "sat", to.c_str()}).empty()) return false;
  const std::string types = "." + to + "." + from;
  const auto find = [](const auto& table, const std::string& key) {
    const auto found = table.find(key);
    return found == table.end() ? nullptr : &found->second;
  };
  if (is_integer(to) && is_integer(from)) {
    i.bytes = u8(std::min(bytes_of(to), bytes_of(from)));
    i.variant = (bytes_of(to) > bytes_of(from) ? from : to)[0] == 's';
    i.run = i.saturate ? nullptr : keep_bytes;
  } else if (is_integer(from)) {
    const ByType* const found = find(of_integers, to);
    i.run = found && !i.saturate ? found->of(from) : nullptr;
  } else if (!is_integer(to)) {
    i.integral = op.has("rni") || op.has("rzi"), i.variant = op.has("rzi");
    const Operation* const found = find(of_reals, types);
    const auto* const quick = i.saturate || i.integral ? nullptr : find(fast, types);
    i.run = quick ? (i.ftz ? quick->second : quick->first) : found ? *found : nullptr;
  }
  return i.run != nullptr;
}

}  // namespace sg
