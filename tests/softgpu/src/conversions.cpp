// SPDX-License-Identifier: MIT
// cvt: conversions between types. Arithmetic of float16 and bfloat16.
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

// Converts to an integer of i.bytes, signed if i.variant is 1. A NaN becomes 0 or, if
// either type has 64 bits, a 1 bit and then 0 bits. Values out of range become the nearest limit.
template <class From>
u64 integer_of(double v, const Instruction& i) {
  const int bits = 8 * i.bytes;
  const u64 top = 1ull << (bits - 1), most = i.variant ? top - 1 : top - 1 + top;
  const u64 least = i.variant ? 0 - top : 0;
  if (std::isnan(v)) return i.bytes == 8 || sizeof(From) == 8 ? top : 0;
  v = rounded_to_integer(v, i.rounding);
  if (v >= std::ldexp(1.0, bits - i.variant)) return most;
  if (v <= (i.variant ? -std::ldexp(1.0, bits - 1) : 0)) return least;
  return i.variant ? u64(int64_t(v)) : u64(v);
}

template <class From>
void to_integer(Warp& w, const Instruction& i, u32 lanes) {
  u64* const d = w.row(i.dest[0]);
  const u64* const a = w.row(i.source[0]);
  for_lanes(lanes, [&](int lane) {
    const double v(from_bits<From>(a[lane]));
    const bool flush = i.ftz && std::fabs(v) < double(std::numeric_limits<float>::min());
    d[lane] = integer_of<From>(flush ? 0 : v, i);
  });
}

// Changes an integer's width: keeps its lowest i.bytes, and extends the sign if i.variant is 1.
void keep_bytes(Warp& w, const Instruction& i, u32 lanes) {
  const u64 mask = ~0ull >> (64 - 8 * i.bytes), sign = i.variant ? (mask >> 1) + 1 : 0;
  apply<u64>(w, i, lanes, [=](u64 v) { return ((v & mask) ^ sign) - sign; });
}

// Converts to a floating-point type, under the current rounding mode.
template <class To, class From>
void to_real(Warp& w, const Instruction& i, u32 lanes) {
  u64* const d = w.row(i.dest[0]);
  const u64* const a = w.row(i.source[0]);
  for_lanes(lanes, [&](int lane) {
    double v(from_bits<From>(a[lane]));
    if constexpr (std::is_same_v<From, float>)
      if (i.ftz) v = double(flushed(float(v)));
    if (i.integral) v = rounded_to_integer(v, i.rounding);
    if (i.saturate) v = v > 0 ? std::min(v, 1.0) : 0;  // a NaN becomes 0
    if constexpr (std::is_same_v<To, float>)
      d[lane] = to_bits(i.ftz ? flushed(float(v)) : float(v));
    else if constexpr (std::is_same_v<To, double>)
      d[lane] = to_bits(v);
    else
      d[lane] = to_bits(half_of<To>(v));
  });
}

// Converts two float32 to a pair of 16-bit numbers. The first is stored in the upper 16 bits.
template <class To>
void to_pair(Warp& w, const Instruction& i, u32 lanes) {
  const auto half = [](float v) { return half_of<To>(double(v)).bits; };
  apply<float, float>(w, i, lanes, [=](float a, float b) { return u32(half(a)) << 16 | half(b); });
}

// Each source is one number of type H, or a pair of them: i.variant is 1 or 2. Applies f, in
// float64, to the first numbers of all sources, then to the second ones, and rounds to H.
template <auto f, class H>
void on_halves(Warp& w, const Instruction& i, u32 lanes) {
  for_lanes(lanes, [&](int lane) {
    u64 all = 0;
    for (int k = 0; k < i.variant; ++k) {
      const auto in = [&](int s) { return double(H{u16(w.row(i.source[s])[lane] >> 16 * k)}); };
      all |= u64(half_of<H>(f(in(0), in(1), in(2))).bits) << 16 * k;
    }
    w.row(i.dest[0])[lane] = all;
  });
}
template <auto f>
constexpr std::pair<Operation, Operation> kHalves = {on_halves<f, Half>, on_halves<f, Bfloat>};
const std::map<std::string, std::pair<Operation, Operation>> half_operations = {
    {"add", kHalves<[](double a, double b, double) { return a + b; }>},
    {"sub", kHalves<[](double a, double b, double) { return a - b; }>},
    {"mul", kHalves<[](double a, double b, double) { return a * b; }>},
    {"fma", kHalves<[](double a, double b, double c) { return std::fma(a, b, c); }>},
    {"min", kHalves<[](double a, double b, double) { return lesser(a, b); }>},
    {"max", kHalves<[](double a, double b, double) { return -lesser(-a, -b); }>},
    {"neg", kHalves<[](double a, double, double) { return -a; }>},
    {"abs", kHalves<[](double a, double, double) { return std::fabs(a); }>},
};

// A conversion by a cast, in a loop that vectorizes.
template <class To, class From>
constexpr Operation kPlain = each<[](From v) { return To(v); }, From>;

struct Type {
  const char* name;
  int bytes;
  bool sign;
  Operation f32, f64, f16, bf16, integer;  // conversions from this type
};
template <class From>
constexpr Type integer(const char* name) {
  return {name,
          sizeof(From),
          std::is_signed_v<From>,
          kPlain<float, From>,
          kPlain<double, From>,
          nullptr,
          nullptr,
          keep_bytes};
}
template <class From>
constexpr Type real(const char* name) {
  return {name,
          0,
          false,
          to_real<float, From>,
          to_real<double, From>,
          to_real<Half, From>,
          to_real<Bfloat, From>,
          to_integer<From>};
}
const Type types[] = {integer<u8>("u8"),       integer<int8_t>("s8"),   integer<u16>("u16"),
                      integer<int16_t>("s16"), integer<u32>("u32"),     integer<int32_t>("s32"),
                      integer<u64>("u64"),     integer<int64_t>("s64"), real<Half>("f16"),
                      real<Bfloat>("bf16"),    real<float>("f32"),      real<double>("f64")};
const Type* type_named(const std::string& name) {
  const auto* found = std::find_if(std::begin(types), std::end(types),
                                   [&](const Type& t) { return name == t.name; });
  return found == std::end(types) ? nullptr : found;
}

Operation fast_conversion(const std::string& to, const std::string& from, bool ftz) {
  if (to == "f64" && from == "f32")
    return ftz ? each<[](float v) { return double(flushed(v)); }, float> : kPlain<double, float>;
  if (to == "f32" && from == "f64")
    return ftz ? each<[](double v) { return flushed(float(v)); }, double> : kPlain<float, double>;
  return nullptr;
}

Operation conversion(Instruction& i, const Type& to, const Type& from) {
  const bool is_whole = to.bytes > 0;
  i.bytes = u8(from.bytes ? std::min(to.bytes, from.bytes) : to.bytes);
  i.variant = from.bytes && to.bytes > from.bytes ? from.sign : to.sign;
  const std::string name = to.name;
  if (is_whole) return from.bytes && i.saturate ? nullptr : from.integer;
  if (!i.saturate && !i.integral)
    if (const Operation fast = fast_conversion(name, from.name, i.ftz)) return fast;
  if (name == "f32") return from.f32;
  if (name == "f64") return from.f64;
  return i.rounding ? nullptr : name == "f16" ? from.f16 : from.bf16;
}

}  // namespace

bool choose_half(Instruction& i, const Opcode& op) {
  const auto found = half_operations.find(op.base());
  if (found == half_operations.end() || !op.middle({"rn"}).empty()) return false;
  i.variant = op.type().ends_with("x2") ? 2 : 1;
  i.run = op.type()[0] == 'b' ? found->second.second : found->second.first;
  return true;
}

bool choose_conversion(Instruction& i, const Opcode& op) {
  if (op.parts.size() < 3) return false;
  const std::string& name = op.parts[op.parts.size() - 2];
  if (name == "f16x2" || name == "bf16x2") {
    i.run = name == "f16x2" ? to_pair<Half> : to_pair<Bfloat>;
    return op.type() == "f32" && op.middle({"rn", name.c_str()}).empty() && i.sources == 2;
  }
  const Type *const to = type_named(name), *const from = type_named(op.type());
  const std::string how =
      op.middle({"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat", name.c_str()});
  if (!to || !from || !how.empty()) return false;
  i.run = conversion(i, *to, *from);
  set_rounding(i);
  return i.run != nullptr;
}

}  // namespace sg
