# SPDX-License-Identifier: MIT
"""The activations of kernels_cu/activations.cuh, as the CPU and as a GPU compiles them.

"vector" is the CPU build's text. "scalar" is the text of a GPU, with the C library's functions for
CUDA's.
"""

import numpy as np
import pytest

from tests.support.activation_formulas import NAMES, assert_within, bounds, exact
from tests.support.host_code import compiled, for_machine, loaded, needs_a_compiler
from tests.support.internals import kernel_folder

pytestmark = needs_a_compiler
DTYPES = {"float": np.dtype(np.float32), "double": np.dtype(np.float64)}

# Both results from one call, each of them from a call that uses it alone, and the value alone.
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
  LOOP(alone, NAME, C, write(value + i, activations::NAME::value(read(z + i)));)          \\
  LOOP(slope, NAME, C, write(slope + i, g.derivative);)
"""
CUDA = """
#include <math.h>
#define SCALAR
#define __device__
inline float __fdividef(float a, float b) { return b > 0x1p126f ? 0 : a / b; }
"""


def library(folder, build, names, *options):
    """Compile activations, perhaps with others than the shipped text in the folder."""
    text = LOOPS + "".join(f"LOOPS({name}, float) LOOPS({name}, double)\n" for name in names)
    device = None if build == "vector" else CUDA
    return loaded(compiled(folder, text, *for_machine("native"), *options, device=device))


class Activation:
    """An activation of a library."""

    def __init__(self, name, run):
        self.name, self.run = name, run

    def __call__(self, z, which="both"):
        """The value and the derivative at each z; where only one is asked for, the other is 0."""
        kind = {dtype: kind for kind, dtype in DTYPES.items()}[z.dtype]
        return self.run(f"{self.name}_{which}_{kind}", z, z.dtype, z.dtype)


@pytest.fixture(scope="module", params=("vector", "scalar"))
def build(request, tmp_path_factory):
    run = library(tmp_path_factory.mktemp("activations"), request.param, NAMES)
    return {name: Activation(name, run) for name in NAMES}


activations = pytest.mark.parametrize("name", NAMES)
kinds = pytest.mark.parametrize("kind", DTYPES)


def points(dtype):
    """Dense where an activation bends and where its tails end; then of every magnitude."""
    info = np.finfo(dtype)
    rng = np.random.default_rng(0)
    dense = [np.linspace(-end, end, 20_001) for end in (3, 14, 100)]
    dense += [np.linspace(-end, -0.9 * end, 8_001) for end in (22, 39, 760)]
    sizes = np.exp2(rng.uniform(np.log2(float(info.smallest_subnormal)), info.maxexp - 1, 10_000))
    edges = np.array([0, info.smallest_subnormal, info.tiny, info.eps, 1, 1e30, info.max])
    return np.concatenate([*dense, sizes, -sizes, edges, -edges]).astype(dtype)


def check_finite(activation, dtype):
    """Assert that an activation holds its bounds."""
    name, z = activation.name, points(dtype)
    alone, _ = activation(z, "alone")
    if dtype == np.float64 and np.finfo(np.longdouble).nmant < 60:
        pytest.skip("NumPy has no type wider than float64 here")
    expected = exact(name, z)
    of_value, of_slope = bounds(name, z, expected)
    value, slope = activation(z)
    assert_within(name, "value", z, value, expected.value, of_value)
    assert_within(name, "value alone", z, alone, expected.value, of_value)
    assert_within(name, "derivative", z, slope, expected.slope, of_slope)


def check_limits(activation, dtype):
    """Assert what becomes of infinities and of NaN."""
    name = activation.name
    z = np.array([np.inf, -np.inf, np.nan], dtype)
    value, slope = activation(z)
    at_infinity = {"sigmoid": (1, 0), "tanh": (1, -1), "relu": (np.inf, 0)}
    at_infinity["identity"] = (np.inf, -np.inf)
    expected = [*at_infinity.get(name, (np.inf, np.nan)), np.nan]  # z times 0 is NaN there
    np.testing.assert_array_equal(value, expected, name)
    np.testing.assert_array_equal(activation(z, "alone")[0], expected, name)
    limits = {"identity": (1, 1, 1), "sigmoid": (0, 0, np.nan), "tanh": (0, 0, np.nan)}
    np.testing.assert_array_equal(slope, limits.get(name, (1, 0, np.nan)), name)


@kinds
@activations
def test_values_and_derivatives_are_right_limits_included(build, name, kind):
    check_limits(build[name], DTYPES[kind])
    check_finite(build[name], DTYPES[kind])


@kinds
@activations
def test_a_result_is_the_same_without_the_other(build, name, kind):
    z = points(DTYPES[kind])
    value, slope = build[name](z)
    np.testing.assert_array_equal(build[name](z, "value")[0], value)
    np.testing.assert_array_equal(build[name](z, "slope")[1], slope)


@kinds
def test_zero_is_where_they_meet_their_axes(build, kind):
    zero = np.zeros(1, DTYPES[kind])
    at_zero = {name: tuple(float(v[0]) for v in build[name](zero)) for name in NAMES}
    half = {"silu": (0, 0.5), "gelu": (0, 0.5), "gelu_tanh": (0, 0.5), "sigmoid": (0.5, 0.25)}
    assert at_zero == {"identity": (0, 1), "tanh": (0, 1), "relu": (0, 0), **half}


# --- the checks see what could be wrong -----------------------------------------------------------

WRONG = [
    ("sigmoid", "s.value * s.complement", "s.value"),
    ("sigmoid", "s.value * s.complement", "s.value * (1.0f - s.value)"),
    ("sigmoid", "math::exp_minus(z)", "math::exp(z)"),
    ("silu", "math::at_most(e, math::largest_finite<V>)", "e"),
    ("silu", "bounded(z)", "z"),
    ("tanh", "distance * (2.0f - distance)", "1.0f - math::tanh(z) * math::tanh(z)"),
    ("relu", "math::select(z > zero, one, z)", "one"),
    ("gelu", "fma(lost, math::constant<V>(-0.5), math::constant<V>(1))", "1.0f"),
    ("gelu", "0.5f * math::erfc(", "1.0f - 0.5f * math::erfc(-"),
    ("gelu", "math::constant<V>(0.3989", "math::constant<V>(0.3990"),
    ("gelu_tanh", "0.044715", "0.0447"),
    ("gelu_tanh", "const V b = bounded(z)", "const V b = z"),
    ("gelu_tanh", "b * s.complement", "b * (1.0f - s.value)"),
]


@pytest.mark.parametrize(("name", "right", "wrong"), WRONG)
def test_the_checks_see_a_wrong_formula(tmp_path, name, right, wrong):
    text = (kernel_folder() / "activations.cuh").read_text()
    assert right in text
    (tmp_path / "activations.cuh").write_text(text.replace(right, wrong))
    activation = Activation(name, library(tmp_path, "scalar", [name], "-O0"))
    with pytest.raises(AssertionError, match=name):
        for dtype in DTYPES.values():
            check_limits(activation, dtype)
            check_finite(activation, dtype)
