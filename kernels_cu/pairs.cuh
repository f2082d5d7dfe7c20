// SPDX-License-Identifier: MIT
// Two floats. Compute capabilities 10.x have instructions that compute on both; each result has the
// bits that the instruction for one float gives. Elsewhere, pairs are of two rows.
#pragma once

struct FloatPair;

// Returns v, or `other` where v is NaN.
template <class V>
__device__ inline V unless_nan(V v, V other) {
  return v == v ? v : other;
}

#if __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1100
inline constexpr bool has_pairs = true;

struct FloatPair {
  float low, high;

  FloatPair() = default;
  __device__ FloatPair(float low, float high) : low(low), high(high) {}
  __device__ FloatPair(float both) : low(both), high(both) {}
  __device__ explicit FloatPair(unsigned long long bits) {
    asm("mov.b64 {%0, %1}, %2;" : "=f"(low), "=f"(high) : "l"(bits));
  }
  __device__ unsigned long long bits() const {
    unsigned long long bits;
    asm("mov.b64 %0, {%1, %2};" : "=l"(bits) : "f"(low), "f"(high));
    return bits;
  }
  // C++'s negation makes subnormal numbers 0, for which it needs an instruction.
  __device__ FloatPair operator-() const {
    FloatPair v;
    asm("neg.f32 %0, %1;" : "=f"(v.low) : "f"(low));
    asm("neg.f32 %0, %1;" : "=f"(v.high) : "f"(high));
    return v;
  }
};

#define PAIR_OPERATOR(OPERATOR, INSTRUCTION)                                                    \
  __device__ inline FloatPair operator OPERATOR(FloatPair a, FloatPair b) {                     \
    unsigned long long result;                                                                  \
    asm(INSTRUCTION ".rn.ftz.f32x2 %0, %1, %2;" : "=l"(result) : "l"(a.bits()), "l"(b.bits())); \
    return FloatPair(result);                                                                   \
  }
PAIR_OPERATOR(+, "add")
PAIR_OPERATOR(-, "sub")
PAIR_OPERATOR(*, "mul")
#undef PAIR_OPERATOR

__device__ inline FloatPair fma(FloatPair a, FloatPair b, FloatPair c) {
  unsigned long long result;
  asm("fma.rn.ftz.f32x2 %0, %1, %2, %3;"
      : "=l"(result)
      : "l"(a.bits()), "l"(b.bits()), "l"(c.bits()));
  return FloatPair(result);
}
#else
inline constexpr bool has_pairs = false;

struct FloatPair {
  float low, high;

  FloatPair() = default;
  __device__ FloatPair(float low, float high) : low(low), high(high) {}
  __device__ FloatPair(float both) : low(both), high(both) {}
  __device__ FloatPair operator-() const { return {-low, -high}; }
};

#define PAIR_OPERATOR(OPERATOR)                                             \
  __device__ inline FloatPair operator OPERATOR(FloatPair a, FloatPair b) { \
    return {a.low OPERATOR b.low, a.high OPERATOR b.high};                  \
  }
PAIR_OPERATOR(+)
PAIR_OPERATOR(-)
PAIR_OPERATOR(*)
#undef PAIR_OPERATOR

__device__ inline FloatPair fma(FloatPair a, FloatPair b, FloatPair c) {
  return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
}
#endif

__device__ inline void operator+=(FloatPair& a, FloatPair b) { a = a + b; }
__device__ inline void operator-=(FloatPair& a, FloatPair b) { a = a - b; }
__device__ inline void operator*=(FloatPair& a, FloatPair b) { a = a * b; }
__device__ inline FloatPair unless_nan(FloatPair v, FloatPair other) {
  return {unless_nan(v.low, other.low), unless_nan(v.high, other.high)};
}
