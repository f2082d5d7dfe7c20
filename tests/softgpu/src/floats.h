// SPDX-License-Identifier: MIT
// Floating-point functions that several families of instructions share.
#pragma once
#include <cmath>
#include <limits>

#include "program.h"

namespace sg {

// NaN becomes 0.
template <class T>
inline T saturated(T v) {
  return v > T(0) ? (v < T(1) ? v : T(1)) : T(0);
}
// What is subnormal becomes 0.
template <class T>
inline T flushed(T v) {
  return std::fabs(v) < std::numeric_limits<T>::min() ? std::copysign(T(0), v) : v;
}
// The other one of a NaN; -0 is less than 0.
template <class T>
inline T lesser(T a, T b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) ? b : a;
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
template <class T>
inline T lesser_or_nan(T a, T b) {
  return std::isnan(a) || std::isnan(b) ? std::numeric_limits<T>::quiet_NaN() : lesser(a, b);
}

// Half types, as bits. Their values are doubles, rounded once: 0 to nearest, 1 to zero, 2 down, 3
// up.
struct Half {
  u16 bits;
};
struct Bfloat {
  u16 bits;
};
double value_of(Half);
double value_of(Bfloat);
Half rounded_half(double, int rounding);
Bfloat rounded_bfloat(double, int rounding);

// Has an instruction run under its own rounding mode, where that is not the usual one.
void set_rounding(Instruction&);

}  // namespace sg
