// SPDX-License-Identifier: MIT
// Integer arithmetic and operations on bits.
#include <algorithm>
#include <limits>

#include "lanes.h"

namespace sg {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;
// Holds products of two T.
template <class T>
using Wide =
    std::conditional_t<sizeof(T) == 8,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
                       std::conditional_t<std::is_signed_v<T>, int64_t, u64>>;
template <class T>
constexpr int kBits = 8 * sizeof(T);

template <auto f, int sources>
constexpr ByType integer() {
  return {each_of<f, u16, sources>(), each_of<f, int16_t, sources>(),
          each_of<f, u32, sources>(), each_of<f, int32_t, sources>(),
          each_of<f, u64, sources>(), each_of<f, int64_t, sources>()};
}
// Those whose second source counts bits.
template <auto f>
constexpr ByType shift() {
  return {each<f, u16, u32>,     each<f, int16_t, u32>, each<f, u32, u32>,
          each<f, int32_t, u32>, each<f, u64, u32>,     each<f, int64_t, u32>};
}
// Products twice as wide as their factors; a third source has their width.
template <auto f, auto with_third>
constexpr std::pair<ByType, ByType> widening() {
  return {
      {each<f, u16, u16>, each<f, int16_t, int16_t>, each<f, u32, u32>, each<f, int32_t, int32_t>},
      {each<with_third, u16, u16, u32>, each<with_third, int16_t, int16_t, u32>,
       each<with_third, u32, u32, u64>, each<with_third, int32_t, int32_t, u64>}};
}
constexpr auto wide =
    widening<[]<class T>(T a, T b) { return u64(Wide<T>(a) * Wide<T>(b)); },
             []<class T, class C>(T a, T b, C c) { return u64(Wide<T>(a) * Wide<T>(b)) + c; }>();

template <class T>
T high(T a, T b) {
  return T((Wide<T>(a) * Wide<T>(b)) >> kBits<T>);
}
template <class T>
T saturated(bool overflow, T result, bool negative) {
  return !overflow  ? result
         : negative ? std::numeric_limits<T>::min()
                    : std::numeric_limits<T>::max();
}

const std::map<std::string, ByType> arithmetic = {
    {"add", integer<[]<class T>(T a, T b) { return T(Unsigned<T>(a) + Unsigned<T>(b)); }, 2>()},
    {"sub", integer<[]<class T>(T a, T b) { return T(Unsigned<T>(a) - Unsigned<T>(b)); }, 2>()},
    {"add.sat", integer<[]<class T>(T a, T b) {
       T result;
       const bool overflow = __builtin_add_overflow(a, b, &result);
       return saturated(overflow, result, a < 0);
     },
                        2>()},
    {"sub.sat", integer<[]<class T>(T a, T b) {
       T result;
       const bool overflow = __builtin_sub_overflow(a, b, &result);
       return saturated(overflow, result, a < 0);
     },
                        2>()},
    {"mul.lo", integer<[]<class T>(T a, T b) { return T(u64(a) * u64(b)); }, 2>()},
    {"mul.hi", integer<[]<class T>(T a, T b) { return high(a, b); }, 2>()},
    {"mul.wide", wide.first},
    {"mad.lo", integer<[]<class T>(T a, T b, T c) { return T(u64(a) * u64(b) + u64(c)); }, 3>()},
    {"mad.hi", integer<[]<class T>(T a, T b, T c) { return T(u64(high(a, b)) + u64(c)); }, 3>()},
    {"mad.wide", wide.second},
    {"div", integer<[]<class T>(T a, T b) {
       return b == 0 ? T(-1) : std::is_signed_v<T> && b == T(-1) ? T(0 - u64(a)) : T(a / b);
     },
                    2>()},
    {"rem", integer<[]<class T>(T a, T b) {
       return b == 0 ? a : std::is_signed_v<T> && b == T(-1) ? T(0) : T(a % b);
     },
                    2>()},
    {"min", integer<[]<class T>(T a, T b) { return std::min(a, b); }, 2>()},
    {"max", integer<[]<class T>(T a, T b) { return std::max(a, b); }, 2>()},
    {"neg", integer<[]<class T>(T a) { return T(0 - u64(a)); }, 1>()},
    {"abs", integer<[]<class T>(T a) { return T(a < 0 ? 0 - u64(a) : u64(a)); }, 1>()},
    {"sad", integer<[]<class T>(T a, T b, T c) {
       return T(u64(c) + (a < b ? u64(b) - u64(a) : u64(a) - u64(b)));
     },
                    3>()},
};

// A mask of so many low bits.
template <class U>
U low_bits(u32 count) {
  return count >= u32(kBits<U>) ? U(~U(0)) : U((u64(1) << count) - 1);
}
template <class T>
T extract_bits(T v, u32 position, u32 length) {
  using U = Unsigned<T>;
  position &= 255, length &= 255;
  if (length == 0) return 0;
  const u32 top = std::min(position + length - 1, u32(kBits<T> - 1));
  const bool sign = std::is_signed_v<T> && (U(v) >> top & 1);
  const U there = position < u32(kBits<T>) ? U(U(v) >> position) : U(0);
  const U mask = low_bits<U>(position > top ? 0 : top - position + 1);
  return T((there & mask) | (sign ? U(~mask) : U(0)));
}
template <class T>
T insert_bits(T part, T into, u32 position, u32 length) {
  using U = Unsigned<T>;
  position &= 255, length &= 255;
  if (position >= u32(kBits<T>)) return into;
  const U mask = U(low_bits<U>(length) << position);
  return T((U(into) & U(~mask)) | (U(U(part) << position) & mask));
}
// The first bit from the top that is not the sign; of none, all ones.
template <class T>
u32 highest_bit(T v) {
  const u64 bits = Unsigned<T>(v < 0 ? T(~v) : v);
  return bits ? u32(63 - __builtin_clzll(bits)) : ~0u;
}
template <auto f>
constexpr ByType bit_field() {
  return {nullptr,
          nullptr,
          each<f, u32, u32, u32>,
          each<f, int32_t, u32, u32>,
          each<f, u64, u32, u32>,
          each<f, int64_t, u32, u32>};
}
constexpr auto insert = []<class T>(T a, T b, u32 c, u32 d) { return insert_bits(a, b, c, d); };

const std::map<std::string, ByType> bits = {
    {"and", integer<[]<class T>(T a, T b) { return T(a & b); }, 2>()},
    {"or", integer<[]<class T>(T a, T b) { return T(a | b); }, 2>()},
    {"xor", integer<[]<class T>(T a, T b) { return T(a ^ b); }, 2>()},
    {"not", integer<[]<class T>(T a) { return T(~a); }, 1>()},
    {"cnot", integer<[]<class T>(T a) { return T(a == 0); }, 1>()},
    {"shl",
     shift<[]<class T>(T a, u32 n) { return n >= u32(kBits<T>) ? T(0) : T(u64(a) << n); }>()},
    {"shr", shift<[]<class T>(T a, u32 n) {
       return T(a >> std::min(n, u32(kBits<T> - 1)) >> (n >= u32(kBits<T>)));
     }>()},
    {"bfe", bit_field<[]<class T>(T a, u32 b, u32 c) { return extract_bits(a, b, c); }>()},
    {"bfi",
     {nullptr, nullptr, each<insert, u32, u32, u32, u32>, nullptr,
      each<insert, u64, u64, u32, u32>}},
    {"bfind", integer<[]<class T>(T a) { return highest_bit(a); }, 1>()},
    {"bfind.shiftamt", integer<[]<class T>(T a) {
       const u32 at = highest_bit(a);
       return at == ~0u ? at : u32(kBits<T> - 1) - at;
     },
                               1>()},
    {"popc", integer<[]<class T>(T a) { return u32(__builtin_popcountll(Unsigned<T>(a))); }, 1>()},
    {"clz", integer<[]<class T>(T a) {
       const u64 v = Unsigned<T>(a);
       return v ? u32(__builtin_clzll(v) - (64 - kBits<T>)) : u32(kBits<T>);
     },
                    1>()},
    {"brev", integer<[]<class T>(T a) {
       u64 v = 0;
       for (int k = 0; k < kBits<T>; ++k) v |= (u64(a) >> k & 1) << (kBits<T> - 1 - k);
       return T(v);
     },
                     1>()},
};

// Each bit of the table is the result for one combination of the bits of a, b and c.
u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 out = 0;
  for (u32 k = 0; k < 8; ++k)
    if (table >> k & 1) out |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
  return out;
}
// Each nibble of the selector takes a byte of a and b, or its sign.
u32 permute_bytes(u32 a, u32 b, u32 selector) {
  const u64 v = u64(b) << 32 | a;
  u32 out = 0;
  for (int k = 0; k < 4; ++k) {
    const u32 nibble = selector >> (4 * k) & 15;
    const u32 byte = v >> (8 * (nibble & 7)) & 255;
    out |= (nibble & 8 ? (byte & 128 ? 255 : 0) : byte) << (8 * k);
  }
  return out;
}
template <bool left, bool wrap>
constexpr Operation funnel_shift = each<[](u32 low, u32 high, u32 n) {
  const u64 v = u64(high) << 32 | low;
  n = wrap ? n & 31 : std::min(n, 32u);
  return left ? u32(v << n >> 32) : u32(v >> n);
},
                                        u32, u32, u32>;

const std::map<std::string, Operation> others = {
    {"and.pred", each<[](bool a, bool b) { return a && b; }, bool, bool>},
    {"or.pred", each<[](bool a, bool b) { return a || b; }, bool, bool>},
    {"xor.pred", each<[](bool a, bool b) { return a != b; }, bool, bool>},
    {"not.pred", each<[](bool a) { return !a; }, bool>},
    {"lop3.b32", each<lop3, u32, u32, u32, u32>},
    {"prmt.b32", each<permute_bytes, u32, u32, u32>},
    {"shf.l.wrap.b32", funnel_shift<true, true>},
    {"shf.l.clamp.b32", funnel_shift<true, false>},
    {"shf.r.wrap.b32", funnel_shift<false, true>},
    {"shf.r.clamp.b32", funnel_shift<false, false>},
};

// The base with the middle parts, as the tables have it.
bool find(Instruction& i, const std::map<std::string, ByType>& table, const Opcode& op) {
  std::string key = op.base();
  for (size_t k = 1; k + 1 < op.parts.size(); ++k) key += "." + op.parts[k];
  const auto found = table.find(key);
  i.run = found == table.end() ? nullptr : found->second.of(op.type());
  return i.run != nullptr;
}

}  // namespace

bool choose_integer(Instruction& i, const Opcode& op) { return find(i, arithmetic, op); }

bool choose_bits(Instruction& i, const Opcode& op) {
  std::string name = op.base();
  for (size_t k = 1; k < op.parts.size(); ++k) name += "." + op.parts[k];
  const auto found = others.find(name);
  if (found == others.end()) return find(i, bits, op);
  i.run = found->second;
  return true;
}

}  // namespace sg
