// SPDX-License-Identifier: MIT
// What the instructions do.
#include <fenv.h>
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "machine.h"

namespace sg {
namespace {

// Half types as bits.
struct h16 {
  u16 bits;
};
struct b16f {
  u16 bits;
};
struct h16x2 {
  u32 bits;
};
struct b16fx2 {
  u32 bits;
};

template <class T>
inline T rd(u64 v) {
  if constexpr (std::is_integral_v<T>) {
    return T(v);
  } else {
    T out;
    memcpy(&out, &v, sizeof out);
    return out;
  }
}
template <class T>
inline u64 wr(T v) {
  if constexpr (std::is_integral_v<T>) {
    return u64(std::make_unsigned_t<T>(v));
  } else {
    u64 out = 0;
    memcpy(&out, &v, sizeof v);
    return out;
  }
}
template <>
inline bool rd<bool>(u64 v) {
  return v & 1;
}

inline float ftz(float v) {
  u32 b;
  memcpy(&b, &v, 4);
  if ((b & 0x7f800000u) == 0) b &= 0x80000000u;
  memcpy(&v, &b, 4);
  return v;
}
template <bool Z, class T>
inline T fz(T v) {
  if constexpr (Z && std::is_same_v<T, float>)
    return ftz(v);
  else
    return v;
}
template <class T>
inline T sat01(T v) {
  return v > T(0) ? (v < T(1) ? v : T(1)) : T(0);  // NaN becomes 0
}

inline float half_to_float(u16 h) { return _cvtsh_ss(h); }
inline float bf_to_float(u16 h) { return rd<float>(u64(h) << 16); }
// A double as a float whose last bit says whether anything was cut off: to be rounded again.
inline float to_odd(double v) {
  float f = float(v);
  if (std::isnan(v) || std::isinf(v)) return f;
  if (double(f) == v) return f;
  u32 b = u32(wr(f));
  if (std::fabs(double(f)) > std::fabs(v)) --b;  // toward zero
  return rd<float>(b | 1);
}
inline u16 half_from(double v, int mode) {  // 0 nearest, 1 zero, 2 down, 3 up
  if (std::isnan(v)) return 0x7fff;
  const float f = to_odd(v);
  if (mode == 0) return u16(_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT));
  if (mode == 1) return u16(_cvtss_sh(f, _MM_FROUND_TO_ZERO));
  if (mode == 2) return u16(_cvtss_sh(f, _MM_FROUND_TO_NEG_INF));
  return u16(_cvtss_sh(f, _MM_FROUND_TO_POS_INF));
}
inline u16 bf_from(double v, int mode) {
  if (std::isnan(v)) return 0x7fff;
  u32 b = u32(wr(to_odd(v)));
  if ((b & 0x7fffffff) == 0x7f800000) return u16(b >> 16);
  if (mode == 0)
    b += 0x7fff + ((b >> 16) & 1);
  else if (mode == 2 && (b & 0x80000000) && (b & 0xffff))
    b += 0x10000;
  else if (mode == 3 && !(b & 0x80000000) && (b & 0xffff))
    b += 0x10000;
  return u16(b >> 16);
}

#define LANES(...)                      \
  if (mask == 0xffffffffu) {            \
    for (int l = 0; l < 32; ++l) {      \
      __VA_ARGS__;                      \
    }                                   \
  } else {                              \
    for (u32 q = mask; q; q &= q - 1) { \
      const int l = __builtin_ctz(q);   \
      __VA_ARGS__;                      \
    }                                   \
  }

template <class T, class F>
inline void op1(Warp& w, const Ins& i, u32 mask, F f) {
  u64* const d = w.row(i.d[0]);
  const u64* const a = w.row(i.s[0]);
  LANES(d[l] = wr(f(rd<T>(a[l]))))
}
template <class T, class F>
inline void op2(Warp& w, const Ins& i, u32 mask, F f) {
  u64* const d = w.row(i.d[0]);
  const u64 *const a = w.row(i.s[0]), *const b = w.row(i.s[1]);
  LANES(d[l] = wr(f(rd<T>(a[l]), rd<T>(b[l]))))
}
template <class T, class F>
inline void op3(Warp& w, const Ins& i, u32 mask, F f) {
  u64* const d = w.row(i.d[0]);
  const u64 *const a = w.row(i.s[0]), *const b = w.row(i.s[1]), *const c = w.row(i.s[2]);
  LANES(d[l] = wr(f(rd<T>(a[l]), rd<T>(b[l]), rd<T>(c[l]))))
}

// Integer arithmetic.
template <class T>
struct Int {
  typedef std::make_unsigned_t<T> U;
  typedef std::conditional_t<
      sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, u32>,
      std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, u64>,
                         std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>
      Wide;
  static constexpr int bits = 8 * sizeof(T);
  static void add(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) { return T(U(a) + U(b)); });
  }
  static void sub(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) { return T(U(a) - U(b)); });
  }
  static void add_sat(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) {
      T r;
      return __builtin_add_overflow(a, b, &r)
                 ? (a < 0 ? std::numeric_limits<T>::min() : std::numeric_limits<T>::max())
                 : r;
    });
  }
  static void sub_sat(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) {
      T r;
      return __builtin_sub_overflow(a, b, &r)
                 ? (a < 0 ? std::numeric_limits<T>::min() : std::numeric_limits<T>::max())
                 : r;
    });
  }
  static void mul_lo(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) { return T(Wide(a) * Wide(b)); });
  }
  static void mul_hi(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) { return T((Wide(a) * Wide(b)) >> bits); });
  }
  static void mul_wide(Warp& w, const Ins& i, u32 mask) {
    u64* const d = w.row(i.d[0]);
    const u64 *const a = w.row(i.s[0]), *const b = w.row(i.s[1]);
    LANES(d[l] = u64(Wide(rd<T>(a[l])) * Wide(rd<T>(b[l]))))
  }
  static void mad_lo(Warp& w, const Ins& i, u32 mask) {
    op3<T>(w, i, mask, [](T a, T b, T c) { return T(U(Wide(a) * Wide(b)) + U(c)); });
  }
  static void mad_hi(Warp& w, const Ins& i, u32 mask) {
    op3<T>(w, i, mask, [](T a, T b, T c) { return T(U((Wide(a) * Wide(b)) >> bits) + U(c)); });
  }
  static void mad_wide(Warp& w, const Ins& i, u32 mask) {
    u64* const d = w.row(i.d[0]);
    const u64 *const a = w.row(i.s[0]), *const b = w.row(i.s[1]), *const c = w.row(i.s[2]);
    LANES(d[l] = u64(Wide(rd<T>(a[l])) * Wide(rd<T>(b[l]))) + c[l])
  }
  static void div(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) {
      return b == 0 ? T(-1) : (std::is_signed_v<T> && b == T(-1)) ? T(U(0) - U(a)) : T(a / b);
    });
  }
  static void rem(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) {
      return b == 0 ? a : (std::is_signed_v<T> && b == T(-1)) ? T(0) : T(a % b);
    });
  }
  static void min(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) { return a < b ? a : b; });
  }
  static void max(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) { return a < b ? b : a; });
  }
  static void neg(Warp& w, const Ins& i, u32 mask) {
    op1<T>(w, i, mask, [](T a) { return T(U(0) - U(a)); });
  }
  static void abs(Warp& w, const Ins& i, u32 mask) {
    op1<T>(w, i, mask, [](T a) { return a < 0 ? T(U(0) - U(a)) : a; });
  }
  static void shl(Warp& w, const Ins& i, u32 mask) {
    u64* const d = w.row(i.d[0]);
    const u64 *const a = w.row(i.s[0]), *const b = w.row(i.s[1]);
    LANES(const u32 n = u32(b[l]); d[l] = n >= u32(bits) ? 0 : wr(T(U(a[l]) << n)))
  }
  static void shr(Warp& w, const Ins& i, u32 mask) {
    u64* const d = w.row(i.d[0]);
    const u64 *const a = w.row(i.s[0]), *const b = w.row(i.s[1]);
    LANES(const u32 n = u32(b[l]); const T v = rd<T>(a[l]);
          d[l] = wr(n >= u32(bits) ? T(v < 0 ? -1 : 0) : T(v >> n)))
  }
  static void sad(Warp& w, const Ins& i, u32 mask) {
    op3<T>(w, i, mask, [](T a, T b, T c) { return T(U(c) + (a < b ? U(b) - U(a) : U(a) - U(b))); });
  }
  static void bfe(Warp& w, const Ins& i, u32 mask) {
    u64* const d = w.row(i.d[0]);
    const u64 *const a = w.row(i.s[0]), *const b = w.row(i.s[1]), *const c = w.row(i.s[2]);
    LANES(
        const int pos = int(b[l] & 255), len = int(c[l] & 255); const T v = rd<T>(a[l]); U sign = 0;
        if (std::is_signed_v<T> && len > 0) sign = U(U(v) >> std::min(pos + len - 1, bits - 1)) & 1;
        U out = pos < bits ? U(U(v) >> pos) : U(0);
        if (pos < bits && std::is_signed_v<T> && false) out = 0; if (len < bits) {
          out &= U((u64(1) << len) - 1);
          if (sign) out |= U(~u64(0) << len);
        } if (len == 0) out = 0;
        if (sign && pos + len > bits && len > 0) out |=
        U(pos >= bits ? ~u64(0) : (~u64(0) << (bits - pos)));
        d[l] = wr(T(out)))
  }
  static void bfi(Warp& w, const Ins& i, u32 mask) {
    u64* const d = w.row(i.d[0]);
    const u64 *const a = w.row(i.s[0]), *const b = w.row(i.s[1]), *const c = w.row(i.s[2]),
                     *const e = w.row(i.s[3]);
    LANES(const int pos = int(c[l] & 255), len = int(e[l] & 255);
          U m = len >= bits ? U(~U(0)) : U((u64(1) << len) - 1);
          m = pos >= bits ? U(0) : U(m << pos);
          d[l] = wr(T((U(b[l]) & U(~m)) | ((pos >= bits ? U(0) : U(U(a[l]) << pos)) & m))))
  }
  static void popc(Warp& w, const Ins& i, u32 mask) {
    u64* d = w.row(i.d[0]);
    const u64* a = w.row(i.s[0]);
    LANES(d[l] = u64(__builtin_popcountll(U(a[l]))))
  }
  static void clz(Warp& w, const Ins& i, u32 mask) {
    u64* d = w.row(i.d[0]);
    const u64* a = w.row(i.s[0]);
    LANES(const U v = U(a[l]); d[l] = v ? u64(__builtin_clzll(v) - (64 - bits)) : u64(bits))
  }
  static void bfind(Warp& w, const Ins& i, u32 mask) {
    u64* d = w.row(i.d[0]);
    const u64* a = w.row(i.s[0]);
    LANES(T v = rd<T>(a[l]); if (v < 0) v = T(~v); const U u = U(v);
          d[l] = !u ? 0xffffffffu
                    : u64(i.flags & 2 ? __builtin_clzll(u) - (64 - bits) : 63 - __builtin_clzll(u)))
  }
  static void brev(Warp& w, const Ins& i, u32 mask) {
    u64* d = w.row(i.d[0]);
    const u64* a = w.row(i.s[0]);
    LANES(U v = U(a[l]); U out = 0;
          for (int k = 0; k < bits; ++k) out |= U(((v >> k) & 1)) << (bits - 1 - k);
          d[l] = wr(T(out)))
  }
  static void band(Warp& w, const Ins& i, u32 mask) {
    op2<U>(w, i, mask, [](U a, U b) { return U(a & b); });
  }
  static void bor(Warp& w, const Ins& i, u32 mask) {
    op2<U>(w, i, mask, [](U a, U b) { return U(a | b); });
  }
  static void bxor(Warp& w, const Ins& i, u32 mask) {
    op2<U>(w, i, mask, [](U a, U b) { return U(a ^ b); });
  }
  static void bnot(Warp& w, const Ins& i, u32 mask) {
    op1<U>(w, i, mask, [](U a) { return U(~a); });
  }
  static void cnot(Warp& w, const Ins& i, u32 mask) {
    op1<U>(w, i, mask, [](U a) { return U(a == 0); });
  }
};

void pred_and(Warp& w, const Ins& i, u32 mask) {
  op2<u64>(w, i, mask, [](u64 a, u64 b) { return a & b & 1; });
}
void pred_or(Warp& w, const Ins& i, u32 mask) {
  op2<u64>(w, i, mask, [](u64 a, u64 b) { return (a | b) & 1; });
}
void pred_xor(Warp& w, const Ins& i, u32 mask) {
  op2<u64>(w, i, mask, [](u64 a, u64 b) { return (a ^ b) & 1; });
}
void pred_not(Warp& w, const Ins& i, u32 mask) {
  op1<u64>(w, i, mask, [](u64 a) { return ~a & 1; });
}
void move(Warp& w, const Ins& i, u32 mask) {
  u64* const d = w.row(i.d[0]);
  const u64* const a = w.row(i.s[0]);
  LANES(d[l] = a[l])
}
void pack(Warp& w, const Ins& i, u32 mask) {  // from a vector into one register
  LANES(u64 v = 0; for (int k = 0; k < i.mode; ++k) v |=
                   (w.row(i.s[k])[l] & (i.bytes == 8 ? ~0ull : (1ull << (8 * i.bytes)) - 1))
                   << (8 * i.bytes * k);
        w.row(i.d[0])[l] = v)
}
void unpack(Warp& w, const Ins& i, u32 mask) {
  LANES(const u64 v = w.row(i.s[0])[l];
        for (int k = 0; k < i.n; ++k) w.row(i.d[k])[l] =
            (v >> (8 * i.bytes * k)) & ((1ull << (8 * i.bytes)) - 1))
}
void select(Warp& w, const Ins& i, u32 mask) {
  u64* const d = w.row(i.d[0]);
  const u64 *const a = w.row(i.s[0]), *const b = w.row(i.s[1]), *const c = w.row(i.s[2]);
  LANES(d[l] = c[l] & 1 ? a[l] : b[l])
}
void slct_s32(Warp& w, const Ins& i, u32 mask) {
  u64* const d = w.row(i.d[0]);
  const u64 *const a = w.row(i.s[0]), *const b = w.row(i.s[1]), *const c = w.row(i.s[2]);
  LANES(d[l] = int32_t(c[l]) >= 0 ? a[l] : b[l])
}
void slct_f32(Warp& w, const Ins& i, u32 mask) {
  u64* const d = w.row(i.d[0]);
  const u64 *const a = w.row(i.s[0]), *const b = w.row(i.s[1]), *const c = w.row(i.s[2]);
  LANES(d[l] = rd<float>(c[l]) >= 0 ? a[l] : b[l])
}
void lop3(Warp& w, const Ins& i, u32 mask) {
  u64* const d = w.row(i.d[0]);
  const u64 *const a = w.row(i.s[0]), *const b = w.row(i.s[1]), *const c = w.row(i.s[2]),
                   *const t = w.row(i.s[3]);
  LANES(const u32 x = u32(a[l]), y = u32(b[l]), z = u32(c[l]), k = u32(t[l]); u32 out = 0;
        if (k & 1) out |= ~x & ~y & ~z; if (k & 2) out |= ~x & ~y & z;
        if (k & 4) out |= ~x & y & ~z; if (k & 8) out |= ~x & y & z; if (k & 16) out |= x & ~y & ~z;
        if (k & 32) out |= x & ~y & z; if (k & 64) out |= x & y & ~z; if (k & 128) out |= x & y & z;
        d[l] = out)
}
void prmt(Warp& w, const Ins& i, u32 mask) {
  u64* const d = w.row(i.d[0]);
  const u64 *const a = w.row(i.s[0]), *const b = w.row(i.s[1]), *const c = w.row(i.s[2]);
  LANES(const u64 v = u64(u32(b[l])) << 32 | u32(a[l]); u32 out = 0; for (int k = 0; k < 4; ++k) {
    const u32 s = u32(c[l] >> (4 * k)) & 15;
    u32 byte = u32(v >> (8 * (s & 7))) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    out |= byte << (8 * k);
  } d[l] = out)
}
template <bool left, bool wrap>
void shf(Warp& w, const Ins& i, u32 mask) {
  u64* const d = w.row(i.d[0]);
  const u64 *const a = w.row(i.s[0]), *const b = w.row(i.s[1]), *const c = w.row(i.s[2]);
  LANES(const u64 v = u64(u32(b[l])) << 32 | u32(a[l]);
        const u32 n = wrap ? u32(c[l]) & 31 : std::min<u32>(u32(c[l]), 32);
        d[l] = left ? u32((v << n) >> 32) : u32(v >> n))
}

// Floating point. The rounding mode: 0 nearest, 1 zero, 2 down, 3 up.
template <class T, bool Z, bool S>
struct Float {
  static T out(T v) {
    v = fz<Z>(v);
    return S ? sat01(v) : v;
  }
  static void add(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) { return out(fz<Z>(a) + fz<Z>(b)); });
  }
  static void sub(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) { return out(fz<Z>(a) - fz<Z>(b)); });
  }
  static void mul(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) { return out(fz<Z>(a) * fz<Z>(b)); });
  }
  static void div(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) { return out(fz<Z>(a) / fz<Z>(b)); });
  }
  static void fma(Warp& w, const Ins& i, u32 mask) {
    op3<T>(w, i, mask, [](T a, T b, T c) {
      if constexpr (sizeof(T) == 4)
        return out(__builtin_fmaf(fz<Z>(a), fz<Z>(b), fz<Z>(c)));
      else
        return out(__builtin_fma(a, b, c));
    });
  }
  static T less(T a, T b) {
    return std::isnan(a)   ? b
           : std::isnan(b) ? a
           : a == b        ? (std::signbit(a) ? a : b)
           : a < b         ? a
                           : b;
  }
  static T more(T a, T b) {
    return std::isnan(a)   ? b
           : std::isnan(b) ? a
           : a == b        ? (std::signbit(a) ? b : a)
           : a < b         ? b
                           : a;
  }
  static void min(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) { return fz<Z>(less(a, b)); });
  }
  static void max(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) { return fz<Z>(more(a, b)); });
  }
  static void min_nan(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) {
      return std::isnan(a) || std::isnan(b) ? std::numeric_limits<T>::quiet_NaN()
                                            : fz<Z>(less(a, b));
    });
  }
  static void max_nan(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) {
      return std::isnan(a) || std::isnan(b) ? std::numeric_limits<T>::quiet_NaN()
                                            : fz<Z>(more(a, b));
    });
  }
  static void neg(Warp& w, const Ins& i, u32 mask) {
    op1<T>(w, i, mask, [](T a) { return -fz<Z>(a); });
  }
  static void abs(Warp& w, const Ins& i, u32 mask) {
    op1<T>(w, i, mask, [](T a) { return std::fabs(fz<Z>(a)); });
  }
  static void sqrt(Warp& w, const Ins& i, u32 mask) {
    op1<T>(w, i, mask, [](T a) { return out(std::sqrt(fz<Z>(a))); });
  }
  static void rcp(Warp& w, const Ins& i, u32 mask) {
    op1<T>(w, i, mask, [](T a) { return out(T(1) / fz<Z>(a)); });
  }
  // The approximate ones, as the correctly rounded value.
  static void rsqrt(Warp& w, const Ins& i, u32 mask) {
    op1<T>(w, i, mask, [](T a) { return out(T(1.0L / std::sqrt((long double)(fz<Z>(a))))); });
  }
  static void ex2(Warp& w, const Ins& i, u32 mask) {
    op1<T>(w, i, mask, [](T a) { return out(T(std::exp2(double(fz<Z>(a))))); });
  }
  static void lg2(Warp& w, const Ins& i, u32 mask) {
    op1<T>(w, i, mask, [](T a) { return out(T(std::log2(double(fz<Z>(a))))); });
  }
  static void sin(Warp& w, const Ins& i, u32 mask) {
    op1<T>(w, i, mask, [](T a) { return out(T(std::sin(double(fz<Z>(a))))); });
  }
  static void cos(Warp& w, const Ins& i, u32 mask) {
    op1<T>(w, i, mask, [](T a) { return out(T(std::cos(double(fz<Z>(a))))); });
  }
  static void tanh(Warp& w, const Ins& i, u32 mask) {
    op1<T>(w, i, mask, [](T a) { return out(T(std::tanh(double(fz<Z>(a))))); });
  }
  // div.approx: 0 where the divisor is above 2^126; div.full too.
  static void div_approx(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) {
      a = fz<Z>(a), b = fz<Z>(b);
      if (sizeof(T) == 4 && std::fabs(b) > T(8.507059173023462e37) &&
          std::fabs(b) <= std::numeric_limits<T>::max())
        return std::isinf(a) ? std::numeric_limits<T>::quiet_NaN()
                             : std::copysign(T(0), T(a * (b < 0 ? -1 : 1)));
      return out(a / b);
    });
  }
  static void directed(Warp& w, const Ins& i, u32 mask) {
    static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    volatile T a, b, c, r;
    const char what = char(i.flags);
    for (u32 q = mask; q; q &= q - 1) {
      const int l = __builtin_ctz(q);
      a = fz<Z>(rd<T>(w.row(i.s[0])[l])), b = fz<Z>(rd<T>(w.row(i.s[1])[l])),
      c = fz<Z>(rd<T>(w.row(i.s[2])[l]));
      fesetround(modes[i.bytes]);
      switch (what) {
        case '+':
          r = a + b;
          break;
        case '-':
          r = a - b;
          break;
        case '*':
          r = a * b;
          break;
        case '/':
          r = a / b;
          break;
        case 'q':
          r = std::sqrt(a);
          break;
        case 'r':
          r = T(1) / a;
          break;
        default:
          r = sizeof(T) == 4 ? T(::fmaf(float(a), float(b), float(c)))
                             : T(::fma(double(a), double(b), double(c)));
      }
      fesetround(FE_TONEAREST);
      w.row(i.d[0])[l] = wr(out(T(r)));
    }
  }
  static void testp(Warp& w, const Ins& i, u32 mask) {
    op1<T>(w, i, mask, [&](T a) {
      switch (i.flags) {
        case 0:
          return u64(std::isfinite(a));
        case 1:
          return u64(std::isinf(a));
        case 2:
          return u64(!std::isnan(a));
        case 3:
          return u64(std::isnan(a));
        case 4:
          return u64(std::isnormal(a) || a == 0);
        default:
          return u64(std::fpclassify(a) == FP_SUBNORMAL);
      }
    });
  }
  static void copysign(Warp& w, const Ins& i, u32 mask) {
    op2<T>(w, i, mask, [](T a, T b) { return std::copysign(b, a); });
  }
};

// Half arithmetic: done in double, which holds sums and products, and rounded once.
struct HalfType {
  static double in(u16 v) { return half_to_float(v); }
  static u16 out(double v) { return half_from(v, 0); }
};
struct BfType {
  static double in(u16 v) { return bf_to_float(v); }
  static u16 out(double v) { return bf_from(v, 0); }
};
template <class H, int n>
void half_op(Warp& w, const Ins& i, u32 mask) {
  LANES(u64 all = 0; for (int k = 0; k < n; ++k) {
    const u16 ra = u16(w.row(i.s[0])[l] >> (16 * k)), rb = u16(w.row(i.s[1])[l] >> (16 * k)),
              rc = u16(w.row(i.s[2])[l] >> (16 * k));
    double a = H::in(ra), b = H::in(rb), c = H::in(rc), r = 0;
    u16 out;
    bool done = false;
    switch (char(i.flags)) {
      case '+':
        r = a + b;
        break;
      case '-':
        r = a - b;
        break;
      case '*':
        r = a * b;
        break;
      case 'f':
        r = __builtin_fma(a, b, c);
        break;
      case 'r':
        r = __builtin_fma(a, b, c);
        if (r < 0) r = 0;
        break;
      case 'n':
        out = ra ^ 0x8000;
        done = true;
        break;
      case 'a':
        out = ra & 0x7fff;
        done = true;
        break;
      case '<':
        r = Float<double, false, false>::less(a, b);
        break;
      case '>':
        r = Float<double, false, false>::more(a, b);
        break;
      case 'l':
        r = std::isnan(a) || std::isnan(b) ? NAN : Float<double, false, false>::less(a, b);
        break;
      case 'm':
        r = std::isnan(a) || std::isnan(b) ? NAN : Float<double, false, false>::more(a, b);
        break;
      case 'e':
        r = std::exp2(a);
        break;
      case 't':
        r = std::tanh(a);
        break;
    }
    if (!done) out = H::out(i.bytes == 1 ? sat01(r) : r);
    all |= u64(out) << (16 * k);
  } w.row(i.d[0])[l] = all)
}

// Comparisons.
enum Compare { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan };
template <int C, class T>
inline bool compare(T a, T b) {
  switch (C) {
    case kEq:
      return a == b;
    case kNe:
      return a < b || a > b || (std::is_integral_v<T> && a != b);
    case kLt:
      return a < b;
    case kLe:
      return a <= b;
    case kGt:
      return a > b;
    case kGe:
      return a >= b;
    case kEqu:
      return !(a < b || a > b);
    case kNeu:
      return a != b;
    case kLtu:
      return !(a >= b);
    case kLeu:
      return !(a > b);
    case kGtu:
      return !(a <= b);
    case kGeu:
      return !(a < b);
    case kNum:
      return a == a && b == b;
    default:
      return a != a || b != b;
  }
}
template <class T, bool Z, int C>
void setp(Warp& w, const Ins& i, u32 mask) {
  u64* const d = w.row(i.d[0]);
  const u64 *const a = w.row(i.s[0]), *const b = w.row(i.s[1]);
  if (i.flags == 0) {
    LANES(d[l] = compare<C, T>(fz<Z>(rd<T>(a[l])), fz<Z>(rd<T>(b[l]))))
  } else {
    u64* const e = w.row(i.d[1]);
    const u64* const c = w.row(i.s[2]);
    LANES(const u64 r = compare<C, T>(fz<Z>(rd<T>(a[l])), fz<Z>(rd<T>(b[l])));
          const u64 k = i.flags == 8 ? 0 : c[l] & 1; const u64 x = i.flags == 8   ? r
                                                                   : i.flags == 1 ? r & k
                                                                   : i.flags == 2 ? r | k
                                                                                  : r ^ k;
          const u64 y = i.flags == 8   ? r ^ 1
                        : i.flags == 1 ? (r ^ 1) & k
                        : i.flags == 2 ? (r ^ 1) | k
                                       : (r ^ 1) ^ k;
          d[l] = x; if (i.d[1]) e[l] = y)
  }
}
template <class T, bool Z>
Op setp_of(int c) {
  static const Op all[] = {setp<T, Z, 0>,  setp<T, Z, 1>, setp<T, Z, 2>,  setp<T, Z, 3>,
                           setp<T, Z, 4>,  setp<T, Z, 5>, setp<T, Z, 6>,  setp<T, Z, 7>,
                           setp<T, Z, 8>,  setp<T, Z, 9>, setp<T, Z, 10>, setp<T, Z, 11>,
                           setp<T, Z, 12>, setp<T, Z, 13>};
  return all[c];
}
template <class H>
void setp_half(Warp& w, const Ins& i, u32 mask) {
  LANES(
      const double a = H::in(u16(w.row(i.s[0])[l])), b = H::in(u16(w.row(i.s[1])[l]));
      bool r = false; switch (i.bytes) {
        case kEq:
          r = compare<kEq>(a, b);
          break;
        case kNe:
          r = compare<kNe>(a, b);
          break;
        case kLt:
          r = compare<kLt>(a, b);
          break;
        case kLe:
          r = compare<kLe>(a, b);
          break;
        case kGt:
          r = compare<kGt>(a, b);
          break;
        case kGe:
          r = compare<kGe>(a, b);
          break;
        case kEqu:
          r = compare<kEqu>(a, b);
          break;
        case kNeu:
          r = compare<kNeu>(a, b);
          break;
        case kLtu:
          r = compare<kLtu>(a, b);
          break;
        case kLeu:
          r = compare<kLeu>(a, b);
          break;
        case kGtu:
          r = compare<kGtu>(a, b);
          break;
        case kGeu:
          r = compare<kGeu>(a, b);
          break;
        case kNum:
          r = compare<kNum>(a, b);
          break;
        default:
          r = compare<kNan>(a, b);
      } const bool k = w.row(i.s[2])[l] & 1;
      w.row(i.d[0])[l] = i.flags == 1   ? r && k
                         : i.flags == 2 ? r || k
                         : i.flags == 4 ? r != k
                                        : r;
      if (i.d[1]) w.row(i.d[1])[l] = !r)
}
// Conversions.
enum Type : u8 { U8, S8, U16, S16, U32, S32, U64, S64, F16, BF16, F32, F64, kNoType };
struct Number {
  bool floating;
  double f;
  __int128 i;
};
Number load_number(u8 type, u64 v, bool z) {
  switch (type) {
    case U8:
      return {false, 0, u8(v)};
    case S8:
      return {false, 0, int8_t(v)};
    case U16:
      return {false, 0, u16(v)};
    case S16:
      return {false, 0, int16_t(v)};
    case U32:
      return {false, 0, u32(v)};
    case S32:
      return {false, 0, int32_t(v)};
    case U64:
      return {false, 0, v};
    case S64:
      return {false, 0, int64_t(v)};
    case F16:
      return {true, half_to_float(u16(v)), 0};
    case BF16:
      return {true, bf_to_float(u16(v)), 0};
    case F32:
      return {true, z ? ftz(rd<float>(v)) : rd<float>(v), 0};
    default:
      return {true, rd<double>(v), 0};
  }
}
// In flags: 1 ftz, 2 sat, 4 rounds to an integer, 8 relu; in bytes: the rounding mode; in n: the
// number of halves; in space: whether... the types are in mode (to) and d[7] (from).
u64 store_number(u8 type, Number v, const Ins& i) {
  static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  const int mode = i.bytes;
  if (v.floating && (i.flags & 4)) {
    switch (mode) {
      case 0:
        v.f = std::nearbyint(v.f);
        break;
      case 1:
        v.f = std::trunc(v.f);
        break;
      case 2:
        v.f = std::floor(v.f);
        break;
      default:
        v.f = std::ceil(v.f);
    }
  }
  if (type <= S64) {
    __int128 low, high;
    switch (type) {
      case U8:
        low = 0, high = 255;
        break;
      case S8:
        low = -128, high = 127;
        break;
      case U16:
        low = 0, high = 65535;
        break;
      case S16:
        low = -32768, high = 32767;
        break;
      case U32:
        low = 0, high = 0xffffffffu;
        break;
      case S32:
        low = INT32_MIN, high = INT32_MAX;
        break;
      case U64:
        low = 0, high = ~0ull;
        break;
      default:
        low = INT64_MIN, high = INT64_MAX;
    }
    if (v.floating) {
      if (std::isnan(v.f))
        return i.d[7] == F64 && type >= U32 ? (type == U64 || type == S64 ? 1ull << 63
                                               : type == U32              ? 0
                                                                          : 0x80000000u)
               : type >= U64                ? 1ull << 63
                                            : 0;
      if (v.f <= double(low)) return u64(low);
      if (v.f >= double(high)) return u64(high);
      return u64(__int128(v.f));
    }
    if (i.flags & 2) v.i = std::min(std::max(v.i, low), high);
    switch (type) {
      case U8:
        return u8(v.i);
      case S8:
        return u64(int64_t(int8_t(v.i)));
      case U16:
        return u16(v.i);
      case S16:
        return u64(int64_t(int16_t(v.i)));
      case U32:
        return u32(v.i);
      case S32:
        return u64(int64_t(int32_t(v.i)));
      default:
        return u64(v.i);
    }
  }
  if (v.floating && (i.flags & 2)) v.f = sat01(v.f);
  if (v.floating && (i.flags & 8) && v.f < 0) v.f = 0;
  if (type == F16) return half_from(v.floating ? v.f : double(int64_t(v.i)), mode);
  if (type == BF16) return bf_from(v.floating ? v.f : double(int64_t(v.i)), mode);
  fesetround(modes[mode]);
  u64 out;
  if (type == F32) {
    volatile double f = v.f;
    volatile float r = v.floating ? float(f) : v.i < 0 ? float(int64_t(v.i)) : float(u64(v.i));
    out = wr(float(r));
    if (i.flags & 1) out = wr(ftz(rd<float>(out)));
    if (std::isnan(rd<float>(out))) out = 0x7fffffff;
  } else {
    volatile double r = v.floating ? v.f : v.i < 0 ? double(int64_t(v.i)) : double(u64(v.i));
    out = wr(double(r));
  }
  fesetround(FE_TONEAREST);
  return out;
}
void convert(Warp& w, const Ins& i, u32 mask) {
  LANES(w.row(i.d[0])[l] =
            store_number(i.mode, load_number(u8(i.d[7]), w.row(i.s[0])[l], i.flags & 1), i))
}
// Two numbers into a pair of halves: the first one is the upper.
void convert_pair(Warp& w, const Ins& i, u32 mask) {
  LANES(const u64 hi = store_number(i.mode, load_number(F32, w.row(i.s[0])[l], false), i),
        lo = store_number(i.mode, load_number(F32, w.row(i.s[1])[l], false), i);
        w.row(i.d[0])[l] = (hi & 0xffff) << 16 | (lo & 0xffff))
}
template <class From, class To>
void resize(Warp& w, const Ins& i, u32 mask) {
  u64* const d = w.row(i.d[0]);
  const u64* const a = w.row(i.s[0]);
  LANES(d[l] = wr(To(rd<From>(a[l]))))
}
void half_to_f32(Warp& w, const Ins& i, u32 mask) {
  u64* const d = w.row(i.d[0]);
  const u64* const a = w.row(i.s[0]);
  LANES(d[l] = wr(half_to_float(u16(a[l]))))
}
void bf_to_f32(Warp& w, const Ins& i, u32 mask) {
  u64* const d = w.row(i.d[0]);
  const u64* const a = w.row(i.s[0]);
  LANES(d[l] = u64(u16(a[l])) << 16)
}

// Memory.
template <class T>
void load(Warp& w, const Ins& i, u32 mask) {
  const u64* const a = w.row(i.s[0]);
  const u32 all = i.n * sizeof(T);
  for (u32 q = mask; q; q &= q - 1) {
    const int l = __builtin_ctz(q);
    const u8* from = memory_at(w, i, l, a[l] + u64(i.offset), all, i.space, false);
    for (int k = 0; k < i.n; ++k) {
      T v;
      memcpy(&v, from + k * sizeof(T), sizeof(T));
      w.row(i.d[k])[l] = std::is_signed_v<T> ? u64(int64_t(v)) : u64(v);
    }
  }
}
template <class T>
void store(Warp& w, const Ins& i, u32 mask) {
  const u64* const a = w.row(i.s[0]);
  const u32 all = i.n * sizeof(T);
  for (u32 q = mask; q; q &= q - 1) {
    const int l = __builtin_ctz(q);
    u8* to = memory_at(w, i, l, a[l] + u64(i.offset), all, i.space, true);
    for (int k = 0; k < i.n; ++k) {
      const T v = T(w.row(i.flags & 128 ? i.d[k] : i.s[1 + k])[l]);
      memcpy(to + k * sizeof(T), &v, sizeof(T));
    }
  }
}
enum Atomic : u8 { aAdd, aInc, aDec, aMin, aMax, aAnd, aOr, aXor, aExch, aCas };
template <class T>
T combine(u8 what, T a, T b, T c) {
  if constexpr (std::is_integral_v<T>) {
    switch (what) {
      case aAdd:
        return T(std::make_unsigned_t<T>(a) + std::make_unsigned_t<T>(b));
      case aInc:
        return a >= b ? 0 : T(a + 1);
      case aDec:
        return a == 0 || a > b ? b : T(a - 1);
      case aAnd:
        return a & b;
      case aOr:
        return a | b;
      case aXor:
        return a ^ b;
    }
  }
  switch (what) {
    case aMin:
      return b < a ? b : a;
    case aMax:
      return a < b ? b : a;
    case aExch:
      return b;
    case aCas:
      return a == b ? c : a;
    default:
      return a + b;
  }
}
template <class T>
void atomic(Warp& w, const Ins& i, u32 mask) {
  const int values = i.d[6] ? 0 : 1;
  (void)values;
  for (u32 q = mask; q; q &= q - 1) {
    const int l = __builtin_ctz(q);
    u8* at =
        memory_at(w, i, l, w.row(i.s[0])[l] + u64(i.offset), u32(i.n * sizeof(T)), i.space, true);
    for (int k = 0; k < i.n; ++k) {
      T old;
      memcpy(&old, at + k * sizeof(T), sizeof(T));
      const T now = combine<T>(i.flags, old, rd<T>(w.row(i.s[1 + k])[l]), rd<T>(w.row(i.s[2])[l]));
      memcpy(at + k * sizeof(T), &now, sizeof(T));
      w.row(i.d[k])[l] = wr(old);
    }
  }
}
template <class H, int n>
void atomic_half(Warp& w, const Ins& i, u32 mask) {
  for (u32 q = mask; q; q &= q - 1) {
    const int l = __builtin_ctz(q);
    u8* at = memory_at(w, i, l, w.row(i.s[0])[l] + u64(i.offset), 2 * n, i.space, true);
    u64 old = 0, now = 0;
    memcpy(&old, at, 2 * n);
    for (int k = 0; k < n; ++k)
      now |= u64(H::out(H::in(u16(old >> (16 * k))) + H::in(u16(w.row(i.s[1])[l] >> (16 * k)))))
             << (16 * k);
    memcpy(at, &now, 2 * n);
    w.row(i.d[0])[l] = old;
  }
}

// Addresses.
template <u64 window>
void to_generic(Warp& w, const Ins& i, u32 mask) {
  LANES(w.row(i.d[0])[l] = w.row(i.s[0])[l] | window)
}
void from_generic(Warp& w, const Ins& i, u32 mask) {
  LANES(w.row(i.d[0])[l] = w.row(i.s[0])[l] & ~kWindowBits)
}
void in_window(Warp& w, const Ins& i, u32 mask) {
  LANES(const u64 v = w.row(i.s[0])[l] & kWindowBits; w.row(i.d[0])[l] = v == u64(i.flags) << 56)
}
void mapa(Warp& w, const Ins& i, u32 mask) {
  LANES(const u64 v = w.row(i.s[0])[l]; const u32 rank = u32(w.row(i.s[1])[l]);
        if (rank >= w.block->cluster->blocks.size())
            fail(w, i, l, 700,
                 format("block %u of a cluster of %zu", rank, w.block->cluster->blocks.size()));
        w.row(i.d[0])[l] =
            (v & kWindowBits) | (v & ((1u << kRankShift) - 1)) | u64(rank + 1) << kRankShift)
}
void get_rank(Warp& w, const Ins& i, u32 mask) {
  LANES(const u64 v = w.row(i.s[0])[l]; const u32 rank = u32(v >> kRankShift) & 255;
        w.row(i.d[0])[l] = rank ? rank - 1 : w.block->rank)
}

// Asynchronous copies: made when they are waited for, in the order in which they were asked for.
void copy_now(Warp& w, int lane, const Warp::Copy& c) {
  u8* to = memory_at(w, *c.ins, lane, c.to, c.bytes, kShared, true);
  memset(to, 0, c.bytes);
  if (c.from_bytes)
    memcpy(to, memory_at(w, *c.ins, lane, c.from, c.from_bytes, kGlobal, false), c.from_bytes);
}
void async_copy(Warp& w, const Ins& i, u32 mask) {
  LANES(const u32 bytes = u32(w.row(i.s[2])[l]);
        Warp::Copy c{w.row(i.s[0])[l] + u64(i.offset), w.row(i.s[1])[l], bytes,
                     i.mode > 3 ? u32(w.row(i.s[3])[l]) : bytes, &i};
        memory_at(w, i, l, c.to, c.bytes, kShared, true);
        if (c.from_bytes) memory_at(w, i, l, c.from, c.from_bytes, kGlobal, false);
        if (c.from % bytes) fail(w, i, l, 716,
                                 format("cp.async from %llx, which is not a multiple of %u",
                                        (unsigned long long)c.from, bytes));
        if (settings().async_early) copy_now(w, l, c); else w.open[l].push_back(c))
}
void async_commit(Warp& w, const Ins&, u32 mask) {
  LANES(w.committed[l].push_back(std::move(w.open[l])); w.open[l].clear())
}
void async_wait(Warp& w, const Ins& i, u32 mask) {
  LANES(
      const u64 pending = i.mode ? w.row(i.s[0])[l] : 0; while (w.committed[l].size() > pending) {
        for (auto& c : w.committed[l].front()) copy_now(w, l, c);
        w.committed[l].pop_front();
      } if (i.flags) {
        for (auto& c : w.open[l]) copy_now(w, l, c);
        w.open[l].clear();
      })
}

// What lanes do together.
void shuffle(Warp& w, const Ins& i, u32 mask) {
  u64 from[32], given[32];
  memcpy(from, w.row(i.s[0]), sizeof from);
  memset(given, 0, sizeof given);
  LANES(
      const u32 b = u32(w.row(i.s[1])[l]) & 31, c = u32(w.row(i.s[2])[l]);
      const int bound = int(c & 31), segment = int(c >> 8 & 31);
      const int most = (l & segment) | (bound & ~segment), least = l & segment; int j = l;
      bool in = true; switch (i.flags) {
        case 0:
          j = l - int(b);
          in = j >= most;
          break;
        case 1:
          j = l + int(b);
          in = j <= most;
          break;
        case 2:
          j = l ^ int(b);
          in = j <= most;
          break;
        default:
          j = least | (int(b) & ~segment);
          in = j <= most;
      } if (!in) j = l;
      given[l] = mask >> (j & 31) & 1 ? u32(from[j & 31])
                                      : 0xffbadbadu;  // of a lane that is not there: undefined
      if (i.d[1]) w.row(i.d[1])[l] = in)
  LANES(w.row(i.d[0])[l] = given[l])
}
void vote(Warp& w, const Ins& i, u32 mask) {
  u32 yes = 0;
  LANES(yes |= u32(w.row(i.s[0])[l] & 1) << l)
  const u64 r = i.flags == 0   ? yes == mask
                : i.flags == 1 ? yes != 0
                : i.flags == 2 ? yes == mask || yes == 0
                               : yes;
  LANES(w.row(i.d[0])[l] = r)
}
void match_any(Warp& w, const Ins& i, u32 mask) {
  const u64 keep = i.bytes == 4 ? 0xffffffffu : ~0ull;
  u64 v[32];
  memcpy(v, w.row(i.s[0]), sizeof v);
  LANES(u32 same = 0; for (int k = 0; k < 32; ++k) if (mask >> k & 1 && ((v[k] ^ v[l]) & keep) == 0)
                          same |= 1u << k;
        w.row(i.d[0])[l] = same)
}
void match_all(Warp& w, const Ins& i, u32 mask) {
  const u64 keep = i.bytes == 4 ? 0xffffffffu : ~0ull;
  const u64 first = w.row(i.s[0])[__builtin_ctz(mask)];
  bool same = true;
  LANES(same &= ((w.row(i.s[0])[l] ^ first) & keep) == 0)
  LANES(w.row(i.d[0])[l] = same ? mask : 0; if (i.d[1]) w.row(i.d[1])[l] = same)
}
template <class T>
void redux(Warp& w, const Ins& i, u32 mask) {
  T v = rd<T>(w.row(i.s[0])[__builtin_ctz(mask)]);
  bool first = true;
  LANES(if (!first) v = combine<T>(i.flags, v, rd<T>(w.row(i.s[0])[l]), T(0)); first = false)
  LANES(w.row(i.d[0])[l] = wr(v))
}
void elect(Warp& w, const Ins& i, u32 mask) {
  const int leader = __builtin_ctz(mask);
  LANES(w.row(i.d[0])[l] = u64(leader); if (i.d[1]) w.row(i.d[1])[l] = l == leader)
}
void active(Warp& w, const Ins& i, u32 mask) { LANES(w.row(i.d[0])[l] = mask) }
void nothing(Warp&, const Ins&, u32) {}
u8 type_of(const std::string& s) {
  static const std::map<std::string, u8> known = {
      {"u8", U8},   {"s8", S8},   {"u16", U16}, {"s16", S16},   {"u32", U32}, {"s32", S32},
      {"u64", U64}, {"s64", S64}, {"f16", F16}, {"bf16", BF16}, {"f32", F32}, {"f64", F64}};
  auto found = known.find(s);
  return found == known.end() ? u8(kNoType) : found->second;
}

#define BY_INT(field)                 \
  (t == "u16"   ? Int<u16>::field     \
   : t == "s16" ? Int<int16_t>::field \
   : t == "u32" ? Int<u32>::field     \
   : t == "s32" ? Int<int32_t>::field \
   : t == "u64" ? Int<u64>::field     \
   : t == "s64" ? Int<int64_t>::field \
                : Op(nullptr))
#define BY_BITS(field)            \
  (t == "b16"   ? Int<u16>::field \
   : t == "b32" ? Int<u32>::field \
   : t == "b64" ? Int<u64>::field \
                : BY_INT(field))
#define BY_FLOAT(field)                                                                        \
  (t == "f64" ? (sat ? Float<double, false, true>::field : Float<double, false, false>::field) \
   : t == "f32"                                                                                \
       ? (z ? (sat ? Float<float, true, true>::field : Float<float, true, false>::field)       \
            : (sat ? Float<float, false, true>::field : Float<float, false, false>::field))    \
       : Op(nullptr))

bool half_choice(Ins& ins, const std::string& t, char what, bool sat) {
  ins.flags = u8(what);
  ins.bytes = sat;
  ins.op = t == "f16"      ? half_op<HalfType, 1>
           : t == "f16x2"  ? half_op<HalfType, 2>
           : t == "bf16"   ? half_op<BfType, 1>
           : t == "bf16x2" ? half_op<BfType, 2>
                           : Op(nullptr);
  return ins.op != nullptr;
}

}  // namespace

bool choose(Ins& ins, const Parts& p) {
  const std::string& b = p.base();
  const std::string& t = p.last();
  const bool z = p.has("ftz"), sat = p.has("sat");
  const bool half = t == "f16" || t == "bf16" || t == "f16x2" || t == "bf16x2";
  const bool real = t == "f32" || t == "f64";
  const int rounding = p.has("rz") || p.has("rzi")   ? 1
                       : p.has("rm") || p.has("rmi") ? 2
                       : p.has("rp") || p.has("rpi") ? 3
                                                     : 0;
  Op& op = ins.op;
  op = nullptr;
  auto directed = [&](char what) {
    ins.flags = u8(what), ins.bytes = u8(rounding);
    op = BY_FLOAT(directed);
    return op != nullptr;
  };
  if (p.has("cc")) return false;
  if (b == "mov") {
    if (ins.n > 1 && ins.mode == 1) {
      ins.bytes = u8((t == "b32" ? 4 : t == "b64" ? 8 : 2) / ins.n);
      op = unpack;
    } else if (ins.mode > 1) {
      ins.bytes = u8((t == "b32" ? 4 : t == "b64" ? 8 : 2) / ins.mode);
      op = pack;
    } else {
      op = move;
    }
  } else if (b == "add") {
    if (half) return half_choice(ins, t, '+', sat);
    if (real) return rounding ? directed('+') : (op = BY_FLOAT(add)) != nullptr;
    op = sat ? (t == "s32" ? Int<int32_t>::add_sat : Op(nullptr)) : BY_INT(add);
  } else if (b == "sub") {
    if (half) return half_choice(ins, t, '-', sat);
    if (real) return rounding ? directed('-') : (op = BY_FLOAT(sub)) != nullptr;
    op = sat ? (t == "s32" ? Int<int32_t>::sub_sat : Op(nullptr)) : BY_INT(sub);
  } else if (b == "mul") {
    if (half) return half_choice(ins, t, '*', sat);
    if (real) return rounding ? directed('*') : (op = BY_FLOAT(mul)) != nullptr;
    op = p.has("wide") ? (t == "u16"   ? Int<u16>::mul_wide
                          : t == "s16" ? Int<int16_t>::mul_wide
                          : t == "u32" ? Int<u32>::mul_wide
                                       : Int<int32_t>::mul_wide)
         : p.has("hi") ? BY_INT(mul_hi)
                       : BY_INT(mul_lo);
  } else if (b == "fma" || (b == "mad" && real)) {
    if (half) return half_choice(ins, t, p.has("relu") ? 'r' : 'f', sat);
    if (real) return rounding ? directed('f') : (op = BY_FLOAT(fma)) != nullptr;
  } else if (b == "mad") {
    if (sat) return false;
    op = p.has("wide") ? (t == "u16"   ? Int<u16>::mad_wide
                          : t == "s16" ? Int<int16_t>::mad_wide
                          : t == "u32" ? Int<u32>::mad_wide
                                       : Int<int32_t>::mad_wide)
         : p.has("hi") ? BY_INT(mad_hi)
                       : BY_INT(mad_lo);
  } else if (b == "div") {
    if (real) {
      if (p.has("approx") || p.has("full"))
        op = BY_FLOAT(div_approx);
      else
        return rounding ? directed('/') : (op = BY_FLOAT(div)) != nullptr;
    } else {
      op = BY_INT(div);
    }
  } else if (b == "rem") {
    op = BY_INT(rem);
  } else if (b == "sad") {
    op = BY_INT(sad);
  } else if (b == "min" || b == "max") {
    const bool nan = p.has("NaN");
    if (p.has("xorsign") || p.has("abs") || ins.mode > 2) return false;
    if (half) return half_choice(ins, t, b == "min" ? (nan ? 'l' : '<') : (nan ? 'm' : '>'), false);
    if (real)
      op = b == "min" ? (nan ? BY_FLOAT(min_nan) : BY_FLOAT(min))
                      : (nan ? BY_FLOAT(max_nan) : BY_FLOAT(max));
    else
      op = b == "min" ? BY_INT(min) : BY_INT(max);
  } else if (b == "neg" || b == "abs") {
    if (half) return half_choice(ins, t, b == "neg" ? 'n' : 'a', false);
    if (real)
      op = b == "neg" ? BY_FLOAT(neg) : BY_FLOAT(abs);
    else
      op = b == "neg" ? BY_INT(neg) : BY_INT(abs);
  } else if (b == "sqrt") {
    return rounding ? directed('q') : (op = BY_FLOAT(sqrt)) != nullptr;
  } else if (b == "rcp") {
    return rounding ? directed('r') : (op = BY_FLOAT(rcp)) != nullptr;
  } else if (b == "rsqrt") {
    op = BY_FLOAT(rsqrt);
  } else if (b == "ex2") {
    if (half) return half_choice(ins, t, 'e', false);
    op = BY_FLOAT(ex2);
  } else if (b == "lg2") {
    op = BY_FLOAT(lg2);
  } else if (b == "sin") {
    op = BY_FLOAT(sin);
  } else if (b == "cos") {
    op = BY_FLOAT(cos);
  } else if (b == "tanh") {
    if (half) return half_choice(ins, t, 't', false);
    op = BY_FLOAT(tanh);
  } else if (b == "copysign") {
    op = BY_FLOAT(copysign);
  } else if (b == "testp") {
    static const char* const names[] = {"finite",     "infinite", "number",
                                        "notanumber", "normal",   "subnormal"};
    for (int k = 0; k < 6; ++k)
      if (p.has(names[k])) ins.flags = u8(k);
    op = BY_FLOAT(testp);
  } else if (b == "and" || b == "or" || b == "xor") {
    if (t == "pred")
      op = b == "and" ? pred_and : b == "or" ? pred_or : pred_xor;
    else
      op = b == "and" ? BY_BITS(band) : b == "or" ? BY_BITS(bor) : BY_BITS(bxor);
  } else if (b == "not") {
    op = t == "pred" ? pred_not : BY_BITS(bnot);
  } else if (b == "cnot") {
    op = BY_BITS(cnot);
  } else if (b == "shl") {
    op = BY_BITS(shl);
  } else if (b == "shr") {
    op = BY_BITS(shr);
  } else if (b == "shf") {
    op = p.has("l") ? (p.has("wrap") ? shf<true, true> : shf<true, false>)
                    : (p.has("wrap") ? shf<false, true> : shf<false, false>);
  } else if (b == "bfe") {
    op = BY_INT(bfe);
  } else if (b == "bfi") {
    op = BY_BITS(bfi);
  } else if (b == "bfind") {
    ins.flags = p.has("shiftamt") ? 2 : 0;
    op = BY_INT(bfind);
  } else if (b == "popc") {
    op = BY_BITS(popc);
  } else if (b == "clz") {
    op = BY_BITS(clz);
  } else if (b == "brev") {
    op = BY_BITS(brev);
  } else if (b == "lop3") {
    op = ins.mode == 4 ? lop3 : Op(nullptr);
  } else if (b == "prmt") {
    op = p.part.size() == 2 ? prmt : Op(nullptr);
  } else if (b == "selp") {
    op = select;
  } else if (b == "slct") {
    op = t == "f32" ? slct_f32 : slct_s32;
  } else if (b == "setp") {
    static const char* const names[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                        "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};
    static const std::map<std::string, int> more = {
        {"lo", kLt}, {"ls", kLe}, {"hi", kGt}, {"hs", kGe}};
    int c = -1;
    for (int k = 0; k < 14; ++k)
      if (p.part[1] == names[k]) c = k;
    if (more.count(p.part[1])) c = more.at(p.part[1]);
    if (c < 0) return false;
    ins.flags = p.part[2] == "and"   ? 1
                : p.part[2] == "or"  ? 2
                : p.part[2] == "xor" ? 4
                : ins.d[1]           ? 8
                                     : 0;
    if (t == "f16" || t == "bf16") {
      ins.bytes = u8(c);
      op = t == "f16" ? setp_half<HalfType> : setp_half<BfType>;
    } else {
      op = t == "f32"                 ? (z ? setp_of<float, true>(c) : setp_of<float, false>(c))
           : t == "f64"               ? setp_of<double, false>(c)
           : t == "s16"               ? setp_of<int16_t, false>(c)
           : t == "u16" || t == "b16" ? setp_of<u16, false>(c)
           : t == "s32"               ? setp_of<int32_t, false>(c)
           : t == "u32" || t == "b32" ? setp_of<u32, false>(c)
           : t == "s64"               ? setp_of<int64_t, false>(c)
           : t == "u64" || t == "b64" ? setp_of<u64, false>(c)
                                      : Op(nullptr);
    }
  } else if (b == "cvta") {
    const bool to = p.has("to");
    if (p.has("global") || p.has("const"))
      op = move;
    else if (p.has("shared") || p.has("shared::cta") || p.has("shared::cluster"))
      op = to ? Op(from_generic) : to_generic<kSharedWindow>;
    else if (p.has("local"))
      op = to ? Op(from_generic) : to_generic<kLocalWindow>;
    else if (p.has("param") || p.has("param::entry"))
      op = move;
  } else if (b == "isspacep") {
    if (t == "shared" || t == "shared::cta" || t == "shared::cluster")
      ins.flags = 1;
    else if (t == "local")
      ins.flags = 2;
    else if (t == "param")
      ins.flags = 3;
    op = in_window;
  } else if (b == "cvt") {
    // cvt{.rounding}{.ftz}{.sat}.to.from
    if (p.part.size() < 3) return false;
    const std::string &to = p.part[p.part.size() - 2], &from = t;
    const u8 a = type_of(to), c = type_of(from);
    ins.flags = u8((z ? 1 : 0) | (sat ? 2 : 0) | (p.has("relu") ? 8 : 0));
    if (p.has("rni") || p.has("rzi") || p.has("rmi") || p.has("rpi")) ins.flags |= 4;
    ins.bytes = u8(rounding);
    if ((to == "f16x2" || to == "bf16x2") && from == "f32") {
      ins.mode = to == "f16x2" ? F16 : BF16;
      op = convert_pair;
      return true;
    }
    if (a == kNoType || c == kNoType) return false;
    if (c >= F16 && a <= S64 && !(ins.flags & 4)) return false;
    if (!sat && a <= S64 && c <= S64) {
#define RESIZE(A, TA)              \
  c == U32   ? resize<u32, TA>     \
  : c == S32 ? resize<int32_t, TA> \
  : c == U64 ? resize<u64, TA>     \
  : c == S64 ? resize<int64_t, TA> \
  : c == U16 ? resize<u16, TA>     \
  : c == S16 ? resize<int16_t, TA> \
  : c == U8  ? resize<u8, TA>      \
             : resize<int8_t, TA>
      op = a == U64 || a == S64   ? (RESIZE(U64, int64_t))
           : a == U32 || a == S32 ? (RESIZE(U32, int32_t))
           : a == U16 || a == S16 ? (RESIZE(U16, int16_t))
           : a == U8              ? (RESIZE(U8, u8))
                                  : (RESIZE(S8, int8_t));
      if (a == S8) {
        ins.mode = a, ins.d[7] = c;
        op = convert;
      }
      return true;
    }
    if (ins.flags == 0 && a == F32 && c == F16) {
      op = half_to_f32;
      return true;
    }
    if (a == F32 && c == BF16) {
      op = bf_to_f32;
      return true;
    }
    ins.mode = a, ins.d[7] = c;
    op = convert;
  } else if (b == "ld" || b == "ldu" || b == "st") {
    for (auto& s : p.part) {
      if (s == "global")
        ins.space = kGlobal;
      else if (s == "shared" || s == "shared::cta")
        ins.space = kShared;
      else if (s == "shared::cluster")
        ins.space = kSharedCluster;
      else if (s == "local")
        ins.space = kLocal;
      else if (s == "const")
        ins.space = kConst;
      else if (s.compare(0, 5, "param") == 0 && ins.space != kLocal)
        ins.space = kParam;
    }
    if (!p.has("global") && !p.has("local") && !p.has("const") && !p.has("shared") &&
        !p.has("shared::cta") && !p.has("shared::cluster") && !p.has("param") &&
        !p.has("param::entry") && !p.has("param::func"))
      ins.space = kGeneric;
    const bool is_load = b != "st";
    const int size = t == "b8" || t == "u8" || t == "s8"                                   ? 1
                     : t == "b16" || t == "u16" || t == "s16" || t == "f16" || t == "bf16" ? 2
                     : t == "b32" || t == "u32" || t == "s32" || t == "f32"                ? 4
                     : t == "b64" || t == "u64" || t == "s64" || t == "f64"                ? 8
                                                                                           : 0;
    if (!size) return false;
    ins.bytes = u8(size);
    const int told = p.has("v2") ? 2 : p.has("v4") ? 4 : p.has("v8") ? 8 : 1;
    if (told != ins.n) return false;
    if (is_load)
      op = t == "s8"    ? load<int8_t>
           : t == "s16" ? load<int16_t>
           : t == "s32" ? load<int32_t>
           : size == 1  ? load<u8>
           : size == 2  ? load<u16>
           : size == 4  ? load<u32>
                        : load<u64>;
    else
      op = size == 1 ? store<u8> : size == 2 ? store<u16> : size == 4 ? store<u32> : store<u64>;
  } else if (b == "atom" || b == "red") {
    ins.space = p.has("global")                           ? kGlobal
                : p.has("shared::cluster")                ? kSharedCluster
                : p.has("shared") || p.has("shared::cta") ? kShared
                                                          : kGeneric;
    if (p.has("async")) return false;
    static const char* const names[] = {"add", "inc", "dec", "min",  "max",
                                        "and", "or",  "xor", "exch", "cas"};
    int what = -1;
    for (int k = 0; k < 10; ++k)
      if (p.has(names[k])) what = k;
    if (what < 0) return false;
    ins.flags = u8(what);
    ins.atomic = true;
    if (half) {
      if (what != aAdd || ins.n > 1) return false;
      op = t == "f16"     ? atomic_half<HalfType, 1>
           : t == "f16x2" ? atomic_half<HalfType, 2>
           : t == "bf16"  ? atomic_half<BfType, 1>
                          : atomic_half<BfType, 2>;
    } else {
      op = t == "u32" || t == "b32"   ? atomic<u32>
           : t == "s32"               ? atomic<int32_t>
           : t == "u64" || t == "b64" ? atomic<u64>
           : t == "s64"               ? atomic<int64_t>
           : t == "f32"               ? atomic<float>
           : t == "f64"               ? atomic<double>
           : t == "b16"               ? atomic<u16>
                                      : Op(nullptr);
    }
  } else if (b == "mapa") {
    op = mapa;
  } else if (b == "getctarank") {
    op = get_rank;
  } else if (b == "cp") {
    if (!p.has("async") || p.has("bulk") || p.has("mbarrier")) return false;
    if (p.has("commit_group"))
      op = async_commit;
    else if (p.has("wait_group"))
      op = async_wait;
    else if (p.has("wait_all"))
      ins.flags = 1, ins.mode = 0, op = async_wait;
    else if (p.has("shared") && p.has("global"))
      op = async_copy;
  } else if (b == "membar" || b == "fence" || b == "prefetch" || b == "prefetchu" ||
             b == "discard" || b == "applypriority" || b == "nanosleep" || b == "griddepcontrol" ||
             b == "pmevent") {
    op = nothing;
  } else if (b == "createpolicy") {
    op = nothing;
  } else if (b == "activemask") {
    op = active;
  } else if (b == "shfl") {
    ins.kind = kWarpSync;
    ins.flags = p.has("up") ? 0 : p.has("down") ? 1 : p.has("bfly") ? 2 : 3;
    if (!p.has("sync")) return false;
    ins.target = 3;  // which operand says who takes part
    op = shuffle;
  } else if (b == "vote") {
    ins.kind = kWarpSync;
    ins.flags = p.has("all") ? 0 : p.has("any") ? 1 : p.has("uni") ? 2 : 3;
    ins.target = 1;
    op = p.has("sync") ? vote : Op(nullptr);
  } else if (b == "match") {
    ins.kind = kWarpSync;
    ins.bytes = t == "b64" ? 8 : 4;
    ins.target = 1;
    op = p.has("any") ? match_any : match_all;
  } else if (b == "redux") {
    ins.kind = kWarpSync;
    ins.target = 1;
    ins.flags = p.has("add")   ? aAdd
                : p.has("min") ? aMin
                : p.has("max") ? aMax
                : p.has("and") ? aAnd
                : p.has("or")  ? aOr
                               : aXor;
    op = t == "s32" ? redux<int32_t> : t == "f32" ? Op(nullptr) : redux<u32>;
  } else if (b == "elect") {
    ins.kind = kWarpSync;
    ins.target = 0;
    op = elect;
  } else if (b == "bar" || b == "barrier") {
    op = nothing;
    if (p.has("warp")) {
      ins.kind = kWarpSync;
      ins.target = 0;
    } else if (p.has("cluster")) {
      ins.kind = p.has("arrive") ? kClusterArrive : kClusterWait;
    } else {
      ins.kind = kBarrier;
      // 1: arrives only; 2, 3, 4: and, or, popc of a predicate; 16: all lanes of a warp must be
      // there
      ins.flags = u8((p.has("arrive") ? 1
                      : p.has("red")  ? (p.has("and")  ? 2
                                         : p.has("or") ? 3
                                                       : 4)
                                      : 0) |
                     (b == "bar" || p.has("aligned") ? 16 : 0));
    }
  } else {
    return false;
  }
  return op != nullptr;
}

}  // namespace sg
