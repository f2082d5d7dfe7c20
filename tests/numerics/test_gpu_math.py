# SPDX-License-Identifier: MIT
"""The functions of kernels_cu/math.cuh are as accurate as promised, however a GPU approximates.

The C library stands in for CUDA's functions. rsqrtf and __fdividef are rounded to nearest, or moved
from there by two units in the last place, CUDA's largest error. Approximations rounded to nearest,
as the software GPU's are, would hide a Newton step that goes in the wrong direction.
"""

import numpy as np
import pytest

from tests.support.host_code import compiled, for_machine, loaded, needs_a_compiler
from tests.support.ulps import assert_within, ulp

pytestmark = needs_a_compiler
LOOPS = """
#include "math.cuh"
#define LOOP(NAME, C, ...)                                          \\
  extern "C" void NAME(const C* all, C* out, long long n) {         \\
    for (long long i = 0; i < n; ++i) {                             \\
      const C v = all[i];                                           \\
      out[i] = __VA_ARGS__;                                         \\
    }                                                               \\
  }
LOOP(reciprocal, float, math::reciprocal(v))
LOOP(root, float, math::reciprocal_root(v))
LOOP(third, float, math::divided(v, 3.0f))
LOOP(share, float, math::divided(v, 4097.0f))
LOOP(double_reciprocal, double, math::reciprocal(v))
LOOP(double_root, double, math::reciprocal_root(v))
LOOP(double_share, double, math::divided(v, 4097.0))
// Counts wrong quotients by divisors from 1 to 2, `step` floats apart: those that are next to t and
// to the middles between t and its neighbours, for all t with five bits.
double count_wrong(long long step) {
  long long wrong = 0;
  for (long long i = 0; i < 1 << 23; i += step) {
    const float divisor = 1 + i * 0x1p-23f;
    const math::Divisor<float, false> divided(divisor);
    for (int j = 16; j < 32; ++j)
      for (int side = -1; side <= 1; ++side) {
        const double half = j == 16 && side < 0 ? 0x1p-25 : 0x1p-24;
        const float near = float((j / 16.0 + side * half) * divisor);
        const float next[] = {nextafterf(near, 0), near, nextafterf(near, 8)};
        for (float v : next) wrong += divided.quotient(v) != v / divisor;
      }
  }
  return wrong;
}
LOOP(wrong_quotients, double, count_wrong(v))
"""
CUDA = """
#include <math.h>
#define __device__
#define asm(...)
inline float moved(float v) {
  for (int i = 0; 0 < v && v < INFINITY && i < 2 * (MOVED != 0); ++i)
    v = nextafterf(v, MOVED * INFINITY);
  return v;
}
inline float rsqrtf(float v) { return moved(float(1 / sqrt(double(v)))); }
inline float __fdividef(float a, float b) { return b > 0x1p126f ? 0 : moved(a / b); }
inline float __expf(float v) { return expf(v); }
"""


@pytest.fixture(scope="module", params=[-1, 0, 1], ids="moved by {}".format)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("math")
    device = f"#define MOVED ({request.param})\n{CUDA}"
    return loaded(compiled(folder, LOOPS, *for_machine("native"), device=device))


def magnitudes(dtype, low, high):
    return np.exp2(np.random.default_rng(0).uniform(low, high, 30_000)).astype(dtype)


def test_a_reciprocal_is_within_an_ulp_and_0_for_the_largest_numbers(run):
    v = np.append(magnitudes(np.float32, 0, 125), np.float32(1))
    exact = 1 / v.astype(np.float64)
    assert_within(run("reciprocal", v), exact, ulp(exact, "float32"))
    assert not run("reciprocal", np.array([2**126.5, 2**127, np.inf], np.float32)).any()


def test_a_reciprocal_root_is_rounded_about_once_and_has_its_limits(run):
    v = magnitudes(np.float32, -126, 127)
    exact = 1 / np.sqrt(v.astype(np.float64))
    assert_within(run("root", v), exact, 0.501 * ulp(exact, "float32"))
    limits = run("root", np.array([0, np.inf, np.nan, -1], np.float32))
    np.testing.assert_array_equal(limits, [np.inf, 0, np.nan, np.nan])


@pytest.mark.parametrize(("name", "count"), [("third", 3), ("share", 4097)])
def test_a_quotient_is_rounded_once_and_stays_infinite(run, name, count):
    v = magnitudes(np.float32, -100, 127)
    np.testing.assert_array_equal(run(name, v), (v.astype(np.float64) / count).astype(np.float32))
    np.testing.assert_array_equal(run(name, -v), -run(name, v))
    limits = np.array([0, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(run(name, limits), limits)


def test_double_results_are_rounded_as_ieee_says(run):
    v = magnitudes(np.float64, -900, 900)
    np.testing.assert_array_equal(run("double_reciprocal", v), 1 / v)
    np.testing.assert_array_equal(run("double_root", v), 1 / np.sqrt(v))
    np.testing.assert_array_equal(run("double_share", v), v / 4097)


@pytest.mark.parametrize("step", [pytest.param(31, marks=pytest.mark.exhaustive), 1009])
def test_quotients_next_to_the_middles_between_8_bit_codes_are_rounded_as_by_a_division(run, step):
    assert run("wrong_quotients", np.float64([step])) == 0
