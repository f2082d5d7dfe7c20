// SPDX-License-Identifier: MIT
// Arithmetic of float16 and bfloat16, alone and in pairs: done in float64, which holds sums and
// products, and rounded once.
#include <fenv.h>
#include <immintrin.h>

#include "floats.h"
#include "lanes.h"

namespace sg {

double value_of(Half h) { return _cvtsh_ss(h.bits); }
double value_of(Bfloat h) { return from_bits<float>(u64(h.bits) << 16); }

// A float32 whose last bit says whether anything was cut off: it can be rounded again.
static float rounded_to_odd(double v) {
  const float f = float(v);
  if (double(f) == v || std::isnan(v) || std::isinf(v)) return f;
  const u32 bits = u32(to_bits(f)) - (std::fabs(double(f)) > std::fabs(v));  // toward zero
  return from_bits<float>(bits | 1);
}

Half rounded_half(double v, int rounding) {
  if (std::isnan(v)) return {0x7fff};
  const float f = rounded_to_odd(v);
  switch (rounding) {
    case 0:
      return {u16(_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT))};
    case 1:
      return {u16(_cvtss_sh(f, _MM_FROUND_TO_ZERO))};
    case 2:
      return {u16(_cvtss_sh(f, _MM_FROUND_TO_NEG_INF))};
    default:
      return {u16(_cvtss_sh(f, _MM_FROUND_TO_POS_INF))};
  }
}

Bfloat rounded_bfloat(double v, int rounding) {
  if (std::isnan(v)) return {0x7fff};
  u32 bits = u32(to_bits(rounded_to_odd(v)));
  if (std::isinf(v)) return {u16(bits >> 16)};
  const bool negative = bits >> 31;
  if (rounding == 0) bits += 0x7fff + (bits >> 16 & 1);
  if (rounding == (negative ? 2 : 3)) bits += 0xffff;
  return {u16(bits >> 16)};
}

static void under_rounding(Warp& w, const Instruction& i, u32 lanes) {
  static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  fesetround(modes[i.rounding]);
  i.rounded(w, i, lanes);
  fesetround(FE_TONEAREST);
}

void set_rounding(Instruction& i) {
  if (!i.rounding || !i.run) return;
  i.rounded = i.run;
  i.run = under_rounding;
}

namespace {

template <class H>
H rounded(double v) {
  if constexpr (std::is_same_v<H, Half>)
    return rounded_half(v, 0);
  else
    return rounded_bfloat(v, 0);
}

// f of `sources` rows, each of which holds `n` halves.
template <auto f, class H, int sources, int n>
void half_operation(Warp& w, const Instruction& i, u32 lanes) {
  for_lanes(lanes, [&](int lane) {
    u64 all = 0;
    for (int k = 0; k < n; ++k) {
      const auto in = [&](int s) { return value_of(H{u16(w.row(i.source[s])[lane] >> 16 * k)}); };
      double v;
      if constexpr (sources == 1)
        v = f(in(0));
      else if constexpr (sources == 2)
        v = f(in(0), in(1));
      else
        v = f(in(0), in(1), in(2));
      if (i.saturate) v = saturated(v);
      if (i.relu && v < 0) v = 0;
      all |= u64(rounded<H>(v).bits) << 16 * k;
    }
    w.row(i.dest[0])[lane] = all;
  });
}

struct HalfOperation {
  int sources;
  Operation f16, f16x2, bf16, bf16x2;
};
template <auto f, int sources>
constexpr HalfOperation half() {
  return {sources, half_operation<f, Half, sources, 1>, half_operation<f, Half, sources, 2>,
          half_operation<f, Bfloat, sources, 1>, half_operation<f, Bfloat, sources, 2>};
}

const std::map<std::string, HalfOperation> table = {
    {"add", half<[](double a, double b) { return a + b; }, 2>()},
    {"sub", half<[](double a, double b) { return a - b; }, 2>()},
    {"mul", half<[](double a, double b) { return a * b; }, 2>()},
    {"fma", half<[](double a, double b, double c) { return std::fma(a, b, c); }, 3>()},
    {"neg", half<[](double a) { return -a; }, 1>()},
    {"abs", half<[](double a) { return std::fabs(a); }, 1>()},
    {"min", half<[](double a, double b) { return lesser(a, b); }, 2>()},
    {"max", half<[](double a, double b) { return -lesser(-a, -b); }, 2>()},
    {"min.NaN", half<[](double a, double b) { return lesser_or_nan(a, b); }, 2>()},
    {"max.NaN", half<[](double a, double b) { return -lesser_or_nan(-a, -b); }, 2>()},
    {"ex2", half<[](double a) { return std::exp2(a); }, 1>()},
    {"tanh", half<[](double a) { return std::tanh(a); }, 1>()},
};

}  // namespace

bool choose_half(Instruction& i, const Opcode& op) {
  const auto found = table.find(op.has("NaN") ? op.base() + ".NaN" : op.base());
  if (found == table.end() || found->second.sources != i.sources || op.has("xorsign")) return false;
  const HalfOperation& h = found->second;
  const bool pair = op.type().find("x2") != std::string::npos, brain = op.type()[0] == 'b';
  i.run = brain ? (pair ? h.bf16x2 : h.bf16) : (pair ? h.f16x2 : h.f16);
  return true;
}

bool choose_arithmetic(Instruction& i, const Opcode& op) {
  const std::string& type = op.type();
  if (type == "f32" || type == "f64") return choose_float(i, op);
  if (type.find("f16") != std::string::npos) return choose_half(i, op);
  return choose_integer(i, op);
}

}  // namespace sg
