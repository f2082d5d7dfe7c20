# SPDX-License-Identifier: MIT
"""The activations of kernels_cu/activations.cuh, as compiled for the CPU and for a GPU.

"vector" is the CPU build's code. "scalar" is a GPU's code, with C functions in place of CUDA's
functions and of the only PTX instruction. "approximate" is a GPU's code for 16-bit
results; the derivative of its silu is NaN at infinity.
"""

from functools import partial

import numpy as np
import pytest

from cunorm import reference
from tests.support.gate_bounds import count, exponential_term, gate_error, gate_slope_error
from tests.support.host_code import compiled, for_machine, loaded, needs_a_compiler
from tests.support.internals import ACTIVATIONS
from tests.support.ulps import assert_within, unit

pytestmark = needs_a_compiler
NAMES = sorted({*ACTIVATIONS.values()})
DTYPES = {"float": np.dtype(np.float32), "double": np.dtype(np.float64)}

LOOPS = """
#include "activations.cuh"
#ifdef SCALAR
template <class C> inline constexpr int lanes = 1;
template <class C> C read(const C* p) { return *p; }
template <class C> void write(C* p, C v) { *p = v; }
#else
template <class C> inline constexpr int lanes = simd::lanes<C>;
template <class C> auto read(const C* p) { return simd::load<C>(p); }
template <class C> void write(C* p, simd::Vector<C> v) { simd::store(p, v); }
#endif
#define LOOP(FUNCTION, NAME, C, ...)                                                     \\
  extern "C" void NAME##_##FUNCTION##_##C(const C* z, C* value, C* slope, long long n) { \\
    for (long long i = 0; i < n; i += lanes<C>) {                                        \\
      const auto g = activations::NAME::at(read(z + i));                                 \\
      __VA_ARGS__                                                                        \\
    }                                                                                    \\
  }
#define LOOPS(NAME, C)                                                                    \\
  LOOP(both, NAME, C, write(value + i, g.value); write(slope + i, g.derivative);)         \\
  LOOP(value, NAME, C, write(value + i, g.value);)                                        \\
  LOOP(slope, NAME, C, write(slope + i, g.derivative);)
"""
CUDA = """
#include <math.h>
#define SCALAR
#define __device__
inline float rsqrtf(float v) { return 1 / sqrtf(v); }
inline float __fdividef(float a, float b) { return b > 0x1p126f ? 0 : a / b; }
inline float __expf(float v) { return expf(v); }
inline float saturated(float v) { return v > 0 ? fminf(v, 1) : 0; }
#define asm(...) e = saturated(e * s)
"""
DEVICES = {"vector": None, "scalar": CUDA, "approximate": CUDA + "#define APPROXIMATE true\n"}


@pytest.fixture(scope="module", params=DEVICES)
def run(request, tmp_path_factory):
    text = LOOPS + "".join(f"LOOPS({name}, float) LOOPS({name}, double)\n" for name in NAMES)
    folder = tmp_path_factory.mktemp("activations")
    device = DEVICES[request.param]
    function = loaded(compiled(folder, text, *for_machine("native"), device=device))
    return request.param, function


def points(dtype):
    """Return special values, dense points where activations bend or end, and any magnitudes."""
    info = np.finfo(dtype)
    rng = np.random.default_rng(0)
    dense = [np.linspace(-end, end, 20_001) for end in (3, 14, 100)]
    dense += [np.linspace(-end, -0.9 * end, 8_001) for end in (22, 39, 760)]
    sizes = np.exp2(rng.uniform(np.log2(float(info.smallest_subnormal)), info.maxexp - 1, 10_000))
    edges = np.array([0, info.smallest_subnormal, info.tiny, info.eps, 1, 1e30, info.max])
    special = [np.inf, -np.inf, np.nan, 0.0]
    return np.concatenate([special, *dense, sizes, -sizes, edges, -edges]).astype(dtype)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_values_derivatives_and_their_limits_are_right(run, name, kind):
    dtype, (device, function) = DTYPES[kind], run
    functions = {w: partial(function, f"{name}_{w}_{kind}") for w in ("both", "value", "slope")}
    z = points(dtype)
    if (device, name) == ("approximate", "silu"):
        z = z[~np.isinf(z)]
    value, slope = functions["both"](z, dtype, dtype)
    z64, exact = z.astype(np.float64), reference.activations.ACTIVATIONS[name]
    with np.errstate(all="ignore"):
        expected, expected_slope = exact.value(z64), exact.slope(z64)
    sure = ~np.isfinite(z) | (z == 0)
    np.testing.assert_array_equal(value[sure], expected[sure])
    np.testing.assert_array_equal(slope[sure], expected_slope[sure])
    assert_within(value, expected, gate_error(z64, name, dtype.name), "value")
    bound = gate_slope_error(z64, name, dtype.name)
    if name == "gelu" and kind == "float":  # gelu corrects the rounding of its exponent
        term, sensitivity = exponential_term(z64, name)
        bound -= count(2, dtype.name) * unit(dtype.name) * np.abs(sensitivity * term)
    assert_within(slope, expected_slope, bound, "slope")
    np.testing.assert_array_equal(functions["value"](z, dtype, dtype)[0], value)
    np.testing.assert_array_equal(functions["slope"](z, dtype, dtype)[1], slope)
