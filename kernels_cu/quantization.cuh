// SPDX-License-Identifier: MIT
// The rules of quantised results: y is about q * scale.
//
//   a     = max |y| of a row or of a block of columns, at most `bound`; NaN if any y is NaN
//   scale = max(a / largest, least)    or, in e8m0, the power of two at or above a / largest
//   q     = y / scale, in s8 y * (1 / scale); clamped to +-largest; rounded to nearest even
//
// Or the scale is given. `largest` and `least` are those of q's type. Quotients are rounded once to
// the compute type, then to the type of scale or q. NaN gives the code 0x7f, in s8 0. An infinite a
// gives the scale infinity or, in e8m0, NaN.
#pragma once
#include "math.cuh"
#include "operands.cuh"

// The macros of a build; the defaults are those of builds whose result is y.
#ifndef Q_T
#define Q_T absent
#define SCALE_T absent
#define SCALE_BLOCK 0
#define GIVEN_SCALE false
#define ABSMAX_BOUND false
#define WRITES_Y true
#endif

// Types of q: numbers with a sign, an exponent with bias `bias` and `fraction` fraction bits; and
// integers.
struct e4m3 {
  unsigned char bits;
  static constexpr int fraction = 3, bias = 7;
  static constexpr int largest_exponent = 8, largest_fraction = 3;  // 448 = (1 + 3 / 4) 2^8
  static constexpr float largest = 448, least_scale = 1 / (448.0f * 512);
};
struct e5m2 {
  unsigned char bits;
  static constexpr int fraction = 2, bias = 15;
  static constexpr int largest_exponent = 15, largest_fraction = 3;
  static constexpr float largest = 57344, least_scale = 1 / (448.0f * 512);
};
struct s8 {
  unsigned char bits;
  static constexpr float largest = 127, least_scale = 0x1p-23f;
};
// A type of scales: `bits` stands for 2^(bits - 127), 255 for NaN.
struct e8m0 {
  unsigned char bits;
};

struct Quantization {
  using q_t = Q_T;
  using scale_t = SCALE_T;
  static constexpr bool quantizes = present<q_t>;
  static constexpr bool gives_scale = GIVEN_SCALE;  // the caller gives it
  static constexpr bool is_bounded = ABSMAX_BOUND;
  static constexpr int block = SCALE_BLOCK;  // columns; 0: the row
  static constexpr bool scales_rows = quantizes && !gives_scale && block == 0;
  static constexpr bool writes_y = WRITES_Y;
};

template <class B>
struct QuantizedArguments {
  using C = typename B::compute_t;
  Rows<typename B::q_t> q;
  Rows<typename B::scale_t> scale;  // without data, `given` is the scale
  index_t scale_step;               // from one block's scale to the next
  Number<C> given, bound;
};

// The integers whose bits are those of a number or, on a CPU, of a SIMD vector. Adding `to_integer`
// to a number rounds it to an integer, which is in the last bits of the sum.
template <class V>
struct Bits;
template <>
struct Bits<float> {
  using type = int;
  static constexpr int fraction = 23, bias = 127, size = 32;
  static constexpr float to_integer = 0x1.8p23f;
};
template <>
struct Bits<double> {
  using type = long long;
  static constexpr int fraction = 52, bias = 1023, size = 64;
  static constexpr double to_integer = 0x1.8p52;
};

template <class To, class From>
__device__ inline To same_bits(From v) {
  static_assert(sizeof(To) == sizeof(From), "the same number of bits");
  To out;
  memcpy(&out, &v, sizeof(out));
  return out;
}

// Returns the code of v in the lowest byte, and anything in the others.
//
// v is added to `power`, a power of two whose last bit is worth a step of the code at v. Below the
// smallest normal number, all steps are equal.
template <class Q, class V>
__device__ inline auto code_of(V v) {
  using F = Bits<V>;
  using I = typename F::type;
  const I none = {}, one = none + 1;
  v = math::at_most(math::at_least(v, -Q::largest), Q::largest);
  if constexpr (same_type<Q, s8>) {
    return v == v ? same_bits<I>(v + F::to_integer) : none;
  } else {
    constexpr int dropped = F::fraction - Q::fraction;
    const I bits = same_bits<I>(v), magnitude = bits & ~(one << (F::size - 1));
    const I least = (none + (F::bias + 1 - Q::bias)) << F::fraction;
    const I own = magnitude >> F::fraction << F::fraction, exponent = own > least ? own : least;
    const I power = exponent + ((none + dropped) << F::fraction);
    const I steps = same_bits<I>(same_bits<V>(magnitude) + same_bits<V>(power)) - power;
    const I code = ((exponent - least) >> dropped) + steps, sign = (bits >> (F::size - 8)) & 0x80;
    return v == v ? code | sign : none + 0x7f;
  }
}

// Returns the scale for a, the largest |y|.
template <class B>
__device__ inline typename B::scale_t scale_for(typename B::compute_t a) {
  using C = typename B::compute_t;
  using Q = typename B::q_t;
  if constexpr (same_type<typename B::scale_t, e8m0>) {
    using F = Bits<C>;
    using I = typename F::type;
    const I bits = same_bits<I>(a), exponent = bits >> F::fraction;
    const bool is_above = (bits ^ exponent << F::fraction) > I(Q::largest_fraction)
                                                                 << (F::fraction - 2);
    const I code = exponent + is_above + (127 - F::bias - Q::largest_exponent);
    const bool is_known = a - a == 0 && code < 255;  // neither infinite nor NaN
    return {static_cast<unsigned char>(!is_known ? 255 : code < 0 ? 0 : code)};
  } else {
    const float scale = convert<float>(math::divided(a, C(Q::largest)));
    constexpr float least = Q::least_scale;
    return scale < least ? least : scale;  // a NaN stays
  }
}

// A scale, ready to divide y by it.
template <class B>
struct Divisor {
  using C = typename B::compute_t;
  using Q = typename B::q_t;
  static constexpr bool multiplies = same_type<Q, s8> || same_type<typename B::scale_t, e8m0>;
  either<multiplies, C, math::Divisor<C, B::gives_scale || B::is_bounded>> factor;

  __device__ explicit Divisor(float scale) : factor(multiplies ? 1 / C(scale) : C(scale)) {}
  __device__ explicit Divisor(e8m0 scale) {
    using I = typename Bits<C>::type;
    const I power = I(Bits<C>::bias + 127 - scale.bits) << Bits<C>::fraction;
    factor = same_bits<C>(scale.bits == 255 ? I(-1) : power);  // I(-1) is NaN
  }
  template <class V>
  __device__ V quotient(V y) const {
    if constexpr (multiplies)
      return y * factor;
    else
      return factor.quotient(y);
  }
};

// The scales of a row: its own if it has one, and where those of blocks are stored.
template <class B, bool = B::quantizes>
struct RowScale {
  using C = typename B::compute_t;
  using T = typename B::scale_t;
  const QuantizedArguments<B>& arguments;
  index_t row;
  T own;

  template <class Row>
  __device__ RowScale(const QuantizedArguments<B>& arguments, const Row& place)
      : arguments(arguments), row(place.index) {
    if constexpr (B::gives_scale) {
      own = float(C(arguments.given));
      if (arguments.scale.data != nullptr && place.exists) own = *arguments.scale.at(row);
    }
  }
  // Returns the scale for a, the largest |y| of a block. Stores the scale if `is_first`.
  __device__ T of_block(C a, index_t block, bool is_first) const {
    if constexpr (B::is_bounded) a = a > C(arguments.bound) ? C(arguments.bound) : a;
    const T scale = scale_for<B>(a);
    if (is_first) arguments.scale.at(row)[block * arguments.scale_step] = scale;
    return scale;
  }
  __device__ void find(C a, bool is_first) { own = of_block(a, 0, is_first); }
};
template <class B>
struct RowScale<B, false> {
  template <class Arguments, class Row>
  __device__ RowScale(const Arguments&, const Row&) {}
};
