// SPDX-License-Identifier: MIT
// Arithmetic, operations on bits, and comparisons. Approximate instructions other than divisions
// return the correctly rounded value, or its upper half if they define only that half.
#include <fenv.h>

#include <algorithm>

#include "lanes.h"

namespace sg {
namespace {

template <class T>
constexpr u32 kBits = 8 * sizeof(T);
// Holds products of two T.
template <class T>
using Wide =
    std::conditional_t<sizeof(T) == 8,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
                       std::conditional_t<std::is_signed_v<T>, int64_t, u64>>;

// Operations that signed and unsigned types share. The upper bits of 16-bit results are undefined.
template <auto f, int n>
constexpr ByType bitwise() {
  constexpr Operation word = each_of<f, u32, n>(), pair = each_of<f, u64, n>();
  return {word, word, word, word, pair, pair};
}
template <auto f, int n>
constexpr ByType arithmetic() {
  return {each_of<f, u16, n>(),     each_of<f, int16_t, n>(), each_of<f, u32, n>(),
          each_of<f, int32_t, n>(), each_of<f, u64, n>(),     each_of<f, int64_t, n>()};
}
// Shifts: the second source is the number of bits.
constexpr auto left = []<class T>(T a, u32 n) { return n < kBits<T> ? T(a << n) : T(0); };
constexpr auto right = []<class T>(T a, u32 n) {
  return T(a >> std::min(n, kBits<T> - 1) >> (n >= kBits<T>));
};
constexpr auto product = []<class T>(T a, T b) { return u64(Wide<T>(a) * Wide<T>(b)); };
template <class T>
T insert_bits(T part, T into, u32 position, u32 length) {
  position &= 255, length &= 255;
  if (position >= kBits<T>) return into;
  const T mask = T((length < kBits<T> ? T(1) << length : 0) - 1) << position;
  return (into & ~mask) | (part << position & mask);
}
constexpr auto insert = []<class T>(T a, T b, u32 c, u32 d) { return insert_bits(a, b, c, d); };
// Picks 4 of the 8 bytes of a and b. Each 4 bits of `how` are the number of a byte; their highest
// bit picks the byte's sign, 8 times, instead.
u32 permute(u32 a, u32 b, u32 how) {
  const u64 bytes = u64(b) << 32 | a;
  u32 out = 0;
  for (u32 k = 0; k < 32; k += 8, how >>= 4) {
    const auto byte = int8_t(bytes >> 8 * (how & 7));
    out |= u32(u8(how & 8 ? byte >> 7 : byte)) << k;
  }
  return out;
}
const std::map<std::string, ByType> integers = {
    {"add", bitwise<[]<class T>(T a, T b) { return a + b; }, 2>()},
    {"sub", bitwise<[]<class T>(T a, T b) { return a - b; }, 2>()},
    {"mul.lo", bitwise<[]<class T>(T a, T b) { return a * b; }, 2>()},
    {"mad.lo", bitwise<[]<class T>(T a, T b, T c) { return a * b + c; }, 3>()},
    {"neg", bitwise<[]<class T>(T a) { return 0 - a; }, 1>()},
    {"and", bitwise<[]<class T>(T a, T b) { return a & b; }, 2>()},
    {"or", bitwise<[]<class T>(T a, T b) { return a | b; }, 2>()},
    {"xor", bitwise<[]<class T>(T a, T b) { return a ^ b; }, 2>()},
    {"not", bitwise<[]<class T>(T a) { return ~a; }, 1>()},
    {"shl",
     {each<left, u32, u32>, nullptr, each<left, u32, u32>, nullptr, each<left, u64, u32>, nullptr}},
    {"shr",
     {each<right, u16, u32>, each<right, int16_t, u32>, each<right, u32, u32>,
      each<right, int32_t, u32>, each<right, u64, u32>, each<right, int64_t, u32>}},
    {"bfi",
     {nullptr, nullptr, each<insert, u32, u32, u32, u32>, nullptr,
      each<insert, u64, u64, u32, u32>}},
    {"prmt", {nullptr, nullptr, each<permute, u32, u32, u32>}},
    {"mul.hi",
     arithmetic<[]<class T>(T a, T b) { return T((Wide<T>(a) * Wide<T>(b)) >> kBits<T>); }, 2>()},
    {"mul.wide",
     {each<product, u16, u16>, each<product, int16_t, int16_t>, each<product, u32, u32>,
      each<product, int32_t, int32_t>}},
    {"div", arithmetic<[]<class T>(T a, T b) {
       return b == 0 ? T(-1) : std::is_signed_v<T> && b == T(-1) ? T(0 - u64(a)) : T(a / b);
     },
                       2>()},
    {"rem", arithmetic<[]<class T>(T a, T b) {
       return b == 0 ? a : std::is_signed_v<T> && b == T(-1) ? T(0) : T(a % b);
     },
                       2>()},
    {"min", arithmetic<[]<class T>(T a, T b) { return std::min(a, b); }, 2>()},
    {"max", arithmetic<[]<class T>(T a, T b) { return std::max(a, b); }, 2>()},
};

// 16-bit floats, as bits. They are NaN if the bits after the sign exceed `infinity`.
constexpr u16 kHalfInfinity = 0x7c00, kBfloatInfinity = 0x7f80;
template <u16 infinity>
bool has_nan(u16 a, u16 b) {
  return (a & 0x7fff) > infinity || (b & 0x7fff) > infinity;
}
template <u16 infinity>
u16 larger(u16 a, u16 b) {
  const auto rank = [](u16 v) { return v & 0x8000 ? ~(v & 0x7fff) : int(v); };  // -0 is below 0
  return has_nan<infinity>(a, b) ? 0x7fff : rank(a) > rank(b) ? a : b;
}
// Returns the larger magnitude; its sign is the product of both signs.
template <u16 infinity>
u16 larger_magnitude(u16 a, u16 b) {
  const u16 found = larger<infinity>(a & 0x7fff, b & 0x7fff);
  return has_nan<infinity>(a, b) ? found : u16(found | ((a ^ b) & 0x8000));
}
template <u16 (*f)(u16, u16)>
constexpr Operation pairwise =
    each<[](u32 a, u32 b) { return u32(f(u16(a >> 16), u16(b >> 16))) << 16 | f(u16(a), u16(b)); },
         u32, u32>;
// Their instructions, and the comparisons by which CUDA's headers replace some.
constexpr Operation magnitudes = each<[](u32 a) { return a & 0x7fff7fff; }, u32>;
const std::map<std::string, Operation> halves = {
    {"abs.f16x2", magnitudes},
    {"abs.bf16x2", magnitudes},
    {"max.NaN.f16x2", pairwise<larger<kHalfInfinity>>},
    {"max.NaN.bf16x2", pairwise<larger<kBfloatInfinity>>},
    {"max.NaN.xorsign.abs.f16x2", pairwise<larger_magnitude<kHalfInfinity>>},
    {"max.NaN.xorsign.abs.bf16x2", pairwise<larger_magnitude<kBfloatInfinity>>},
    {"set.nan.f16.f16",
     each<[](u16 a, u16 b) { return u16(has_nan<kHalfInfinity>(a, b) ? 0x3c00 : 0); }, u16, u16>},
    {"set.nan.f32.f32",
     each<[](float a, float b) { return float(a != a || b != b); }, float, float>},
    {"set.eq.f32.f32", each<[](float a, float b) { return float(a == b); }, float, float>},
    {"set.ge.f32.f32", each<[](float a, float b) { return float(a >= b); }, float, float>},
};

// Returns f of float32; if the instruction says so, it flushes arguments and results.
template <auto f>
auto flushing(const Instruction& i) {
  const float least = i.ftz ? std::numeric_limits<float>::min() : 0.0f;
  const auto flush = [=](float v) { return std::fabs(v) < least ? std::copysign(0.0f, v) : v; };
  return [=](auto... v) { return flush(f(flush(v)...)); };
}
template <size_t>
using Float = float;
template <auto f, size_t... k>
void apply_flushing(Warp& w, const Instruction& i, u32 lanes, std::index_sequence<k...>) {
  apply<Float<k>...>(w, i, lanes, flushing<f>(i));
}
template <auto f, int n>
void in_float32(Warp& w, const Instruction& i, u32 lanes) {
  apply_flushing<f>(w, i, lanes, std::make_index_sequence<n>{});
}
// Applies f to the lower and to the upper float32 of 64 bits.
template <size_t>
using TwoFloats = u64;
template <auto f, size_t... k>
void apply_to_both(Warp& w, const Instruction& i, u32 lanes, std::index_sequence<k...>) {
  const auto one = flushing<f>(i);
  apply<TwoFloats<k>...>(w, i, lanes, [=](auto... v) {
    const float low = one(from_bits<float>(v)...), high = one(from_bits<float>(v >> 32)...);
    return to_bits(high) << 32 | to_bits(low);
  });
}
template <auto f, int n>
void in_both(Warp& w, const Instruction& i, u32 lanes) {
  apply_to_both<f>(w, i, lanes, std::make_index_sequence<n>{});
}
// Applies f to a float64. In the argument and in the result, clears the lower 32 bits and flushes
// subnormal numbers to 0.
template <auto f>
constexpr auto upper_half = [](double v) {
  const auto cut = [](double a) { return from_bits<double>(to_bits(flushed(a)) & ~0xffffffffull); };
  return cut(f(cut(v)));
};

struct Real {
  Operation f32, f64, f64_ftz = nullptr;
};
template <auto f, int n>
constexpr Real real() {
  return {in_float32<f, n>, each_of<f, double, n>()};
}
// Divides. For a float32 b above 2^126, div.approx and div.full may return 0, or NaN if a is
// infinite: this function does so.
template <class T>
T divided_approximately(T a, T b) {
  if (sizeof(T) == 4 && std::fabs(b) > T(0x1p126) && std::isfinite(b))
    return std::isinf(a) ? std::numeric_limits<T>::quiet_NaN()
                         : std::copysign(T(0), std::signbit(a) == std::signbit(b) ? T(1) : T(-1));
  return a / b;
}
// Clamps a product to [0, 1]. NaN becomes 0.
constexpr auto saturated_product = []<class T>(T a, T b) {
  return a * b > 0 ? std::min(a * b, T(1)) : T(0);
};
// Returns f of the numbers; the canonical NaN if one is NaN.
template <auto f>
constexpr auto or_nan = [](float a, float b) {
  return std::isnan(a) || std::isnan(b) ? from_bits<float>(0x7fffffff) : f(a, b);
};
constexpr auto minimum = []<class T>(T a, T b) { return lesser(a, b); };
constexpr auto maximum = []<class T>(T a, T b) { return -lesser(-a, -b); };
constexpr auto reciprocal = []<class T>(T a) { return 1 / a; };
constexpr auto sum = []<class T>(T a, T b) { return a + b; };
constexpr auto difference = []<class T>(T a, T b) { return a - b; };
constexpr auto real_product = []<class T>(T a, T b) { return a * b; };
constexpr auto fused = []<class T>(T a, T b, T c) { return std::fma(a, b, c); };

const std::map<std::string, Real> reals = {
    {"add", real<sum, 2>()},
    {"sub", real<difference, 2>()},
    {"mul", real<real_product, 2>()},
    {"mul.sat", real<saturated_product, 2>()},
    {"div", real<[]<class T>(T a, T b) { return a / b; }, 2>()},
    {"div.approx", real<[]<class T>(T a, T b) { return divided_approximately(a, b); }, 2>()},
    {"fma", real<fused, 3>()},
    {"min", real<minimum, 2>()},
    {"max", real<maximum, 2>()},
    {"min.NaN", {in_float32<or_nan<minimum>, 2>, nullptr}},
    {"max.NaN", {in_float32<or_nan<maximum>, 2>, nullptr}},
    {"neg", real<[]<class T>(T a) { return -a; }, 1>()},
    {"abs", real<[]<class T>(T a) { return std::fabs(a); }, 1>()},
    {"copysign", real<[]<class T>(T a, T b) { return std::copysign(b, a); }, 2>()},
    {"sqrt", real<[]<class T>(T a) { return std::sqrt(a); }, 1>()},
    {"rcp",
     {in_float32<reciprocal, 1>, each<reciprocal, double>, each<upper_half<reciprocal>, double>}},
    {"rsqrt",
     {in_float32<[](float a) { return float(1 / std::sqrt((long double)(a))); }, 1>, nullptr}},
    {"ex2", {in_float32<[](float a) { return float(std::exp2(double(a))); }, 1>, nullptr}},
};
// Instructions on two float32, of the type f32x2.
const std::map<std::string, Operation> pairs = {
    {"add", in_both<sum, 2>},
    {"sub", in_both<difference, 2>},
    {"mul", in_both<real_product, 2>},
    {"fma", in_both<fused, 3>},
};

// Sets d to the result of comparing a with b, negated if the variant is 1.
template <auto compare, class T, bool ftz = false>
void set_predicate(Warp& w, const Instruction& i, u32 lanes) {
  const u64 *const a = w.row(i.source[0]), *const b = w.row(i.source[1]), negated = i.variant;
  u64* const d = w.row(i.dest[0]);
  each_lane(lanes, [=](int lane) {
    const T x = from_bits<T>(a[lane]), y = from_bits<T>(b[lane]);
    if constexpr (ftz)
      d[lane] = compare(flushed(x), flushed(y)) ^ negated;
    else
      d[lane] = compare(x, y) ^ negated;
  });
}

struct Comparison {
  ByType integer;
  Operation f32, f32_ftz, f64;
};
template <auto f>
constexpr Comparison comparison() {
  return {{set_predicate<f, u16>, set_predicate<f, int16_t>, set_predicate<f, u32>,
           set_predicate<f, int32_t>, set_predicate<f, u64>, set_predicate<f, int64_t>},
          set_predicate<f, float>,
          set_predicate<f, float, true>,
          set_predicate<f, double>};
}
constexpr auto equal = comparison<[]<class T>(T a, T b) { return a == b; }>();
constexpr auto equal_or_nan = comparison<[]<class T>(T a, T b) { return !(a < b) && !(a > b); }>();
constexpr auto less = comparison<[]<class T>(T a, T b) { return a < b; }>();
constexpr auto less_or_equal = comparison<[]<class T>(T a, T b) { return a <= b; }>();
constexpr auto ordered = comparison<[]<class T>(T a, T b) { return a == a && b == b; }>();

// Comparisons that end in u are true for NaN. All of them but .equ negate the opposite comparison.
struct Compared {
  const Comparison& how;
  bool swapped, negated;
};
const std::map<std::string, Compared> comparisons = {
    {".eq", {equal, false, false}},         {".neu", {equal, false, true}},
    {".equ", {equal_or_nan, false, false}}, {".ne", {equal_or_nan, false, true}},
    {".lt", {less, false, false}},          {".geu", {less, false, true}},
    {".gt", {less, true, false}},           {".leu", {less, true, true}},
    {".le", {less_or_equal, false, false}}, {".gtu", {less_or_equal, false, true}},
    {".ge", {less_or_equal, true, false}},  {".ltu", {less_or_equal, true, true}},
    {".num", {ordered, false, false}},      {".nan", {ordered, false, true}},
};

template <int mode>
void in_mode(Warp& w, const Instruction& i, u32 lanes) {
  fesetround(mode);
  i.rounded(w, i, lanes);
  fesetround(FE_TONEAREST);
}

}  // namespace

bool choose_arithmetic(Instruction& i, const Opcode& op) {
  const std::string& type = op.type();
  if (const auto found = halves.find(op.base() + op.middle() + "." + type); found != halves.end()) {
    i.run = found->second;
    return true;
  }
  if (type == "f32x2") {
    const auto found = pairs.find(op.base() + op.middle({"rn", "ftz"}));
    i.run = found == pairs.end() ? nullptr : found->second;
    return i.run != nullptr;
  }
  if (type != "f32" && type != "f64") {
    const auto found = integers.find(op.base() + op.middle());
    i.run = found == integers.end() ? nullptr : found->second.of(type);
    return i.run != nullptr;
  }
  std::string how = op.middle({"rn", "rm", "rp", "ftz"});
  if (how == ".approx" || how == ".full") how = op.base() == "div" ? ".approx" : "";
  const auto found = reals.find(op.base() + how);
  if (found == reals.end()) return false;
  const Real& f = found->second;
  i.run = type == "f32" ? f.f32 : i.ftz ? f.f64_ftz : f.f64;
  if (op.has("rm") || op.has("rp")) {
    i.rounded = i.run;
    i.run = op.has("rm") ? in_mode<FE_DOWNWARD> : in_mode<FE_UPWARD>;
  }
  return i.run != nullptr;
}

bool choose_comparison(Instruction& i, const Opcode& op) {
  if (op.base() == "selp") {
    i.run = each<[](u64 a, u64 b, bool c) { return c ? a : b; }, u64, u64, bool>;
    return true;
  }
  const auto found = comparisons.find(op.middle({"ftz"}));
  if (found == comparisons.end()) return false;
  const auto& [how, swapped, negated] = found->second;
  if (swapped) std::swap(i.source[0], i.source[1]);
  i.variant = negated;
  i.run = op.type() == "f32"   ? (i.ftz ? how.f32_ftz : how.f32)
          : op.type() == "f64" ? how.f64
                               : how.integer.of(op.type());
  return i.run != nullptr && i.dest[1] == 0;
}

}  // namespace sg
