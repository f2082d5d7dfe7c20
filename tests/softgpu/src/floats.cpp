// SPDX-License-Identifier: MIT
// Floating-point arithmetic. Approximate instructions give the correctly rounded value, but for
// those of float64 that promise its upper half alone.
#include "floats.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "lanes.h"

namespace sg {
namespace {

template <auto f, bool ftz, bool saturate>
constexpr auto float_of = []<class... T>(T... v) {
  auto out = f((ftz ? flushed(v) : v)...);
  if (ftz) out = flushed(out);
  return saturate ? saturated(out) : out;
};
// Takes and gives the upper 32 bits of a float64; what is subnormal becomes 0.
template <auto f>
constexpr auto upper_half = [](double v) {
  const auto cut = [](double a) { return from_bits<double>(to_bits(flushed(a)) & ~0xffffffffull); };
  return cut(f(cut(v)));
};

struct FloatOperation {
  Operation f32[2][2], f64, f64_ftz = nullptr;  // f32[ftz][saturate]
};
template <auto f, int n>
constexpr FloatOperation real() {
  return {{{each_of<float_of<f, false, false>, float, n>(),
            each_of<float_of<f, false, true>, float, n>()},
           {each_of<float_of<f, true, false>, float, n>(),
            each_of<float_of<f, true, true>, float, n>()}},
          each_of<f, double, n>()};
}
template <auto f>
constexpr FloatOperation approximate() {
  FloatOperation out = real<f, 1>();
  out.f64_ftz = each<upper_half<f>, double>;
  return out;
}

// 0 where the divisor is above 2^126, as div.approx and div.full may.
template <class T>
T divided_approximately(T a, T b) {
  if (sizeof(T) == 4 && std::fabs(b) > T(0x1p126) && std::isfinite(b))
    return std::isinf(a) ? std::numeric_limits<T>::quiet_NaN()
                         : std::copysign(T(0), std::signbit(a) == std::signbit(b) ? T(1) : T(-1));
  return a / b;
}
// By way of float64, so that a float32 is rounded once.
template <class T>
T in_double(double (*f)(double), T v) {
  return T(f(double(v)));
}

const std::map<std::string, FloatOperation> table = {
    {"add", real<[]<class T>(T a, T b) { return a + b; }, 2>()},
    {"sub", real<[]<class T>(T a, T b) { return a - b; }, 2>()},
    {"mul", real<[]<class T>(T a, T b) { return a * b; }, 2>()},
    {"div", real<[]<class T>(T a, T b) { return a / b; }, 2>()},
    {"div.approx", real<[]<class T>(T a, T b) { return divided_approximately(a, b); }, 2>()},
    {"fma", real<[]<class T>(T a, T b, T c) { return std::fma(a, b, c); }, 3>()},
    {"min", real<[]<class T>(T a, T b) { return lesser(a, b); }, 2>()},
    {"max", real<[]<class T>(T a, T b) { return -lesser(-a, -b); }, 2>()},
    {"min.NaN", real<[]<class T>(T a, T b) { return lesser_or_nan(a, b); }, 2>()},
    {"max.NaN", real<[]<class T>(T a, T b) { return -lesser_or_nan(-a, -b); }, 2>()},
    {"neg", real<[]<class T>(T a) { return -a; }, 1>()},
    {"abs", real<[]<class T>(T a) { return std::fabs(a); }, 1>()},
    {"copysign", real<[]<class T>(T a, T b) { return std::copysign(b, a); }, 2>()},
    {"sqrt", real<[]<class T>(T a) { return std::sqrt(a); }, 1>()},
    {"rcp", approximate<[]<class T>(T a) { return 1 / a; }>()},
    {"rsqrt", approximate<[]<class T>(T a) { return T(1 / std::sqrt((long double)(a))); }>()},
    {"ex2", real<[]<class T>(T a) { return in_double(std::exp2, a); }, 1>()},
    {"lg2", real<[]<class T>(T a) { return in_double(std::log2, a); }, 1>()},
    {"sin", real<[]<class T>(T a) { return in_double(std::sin, a); }, 1>()},
    {"cos", real<[]<class T>(T a) { return in_double(std::cos, a); }, 1>()},
    {"tanh", real<[]<class T>(T a) { return in_double(std::tanh, a); }, 1>()},
};

}  // namespace

bool choose_float(Instruction& i, const Opcode& op) {
  const bool wide = op.type() == "f64";
  std::string key = op.base() == "mad" ? "fma" : op.base();
  if (op.has("NaN")) key += ".NaN";
  if (key == "div" && (op.has("approx") || op.has("full"))) key += ".approx";
  const auto found = table.find(key);
  if (found == table.end() || op.has("xorsign") || i.sources > (key == "fma" ? 3 : 2)) return false;
  const FloatOperation& f = found->second;
  i.run = !wide ? f.f32[i.ftz][i.saturate] : i.ftz ? f.f64_ftz : f.f64;
  set_rounding(i);
  return i.run != nullptr;
}

}  // namespace sg
