# SPDX-License-Identifier: MIT
"""The CPU stand-ins for cuda_fp16.h and cuda_bf16.h round as CUDA does, and vectorise."""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

INCLUDE = Path(__file__).parents[2] / "cunorm" / "_cpu" / "include"
COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

NARROW = {"half": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
INFINITY = {"half": 0x7C00, "bfloat16": 0x7F80}
CUDA_NAN = 0x7FFF

SOURCE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define LOOP(FUNCTION, FROM, TO)                                                     \\
  extern "C" void loop_##FUNCTION(const FROM* __restrict__ in, TO* __restrict__ out, \\
                                  long long count) {                                 \\
    for (long long i = 0; i < count; ++i) out[i] = FUNCTION(in[i]);                  \\
  }
LOOP(__half2float, __half, float)
LOOP(__float2half_rn, float, __half)
LOOP(__double2half, double, __half)
LOOP(__bfloat162float, __nv_bfloat16, float)
LOOP(__float2bfloat16_rn, float, __nv_bfloat16)
LOOP(__double2bfloat16, double, __nv_bfloat16)

static_assert(sizeof(__half) == 2 && alignof(__half) == 2);
static_assert(sizeof(__nv_bfloat16) == 2 && alignof(__nv_bfloat16) == 2);
static_assert(__is_trivially_copyable(__half) && __is_trivially_copyable(__nv_bfloat16));
"""
WIDEN = {"half": "__half2float", "bfloat16": "__bfloat162float"}
ROUND = {
    ("half", "float32"): "__float2half_rn",
    ("half", "float64"): "__double2half",
    ("bfloat16", "float32"): "__float2bfloat16_rn",
    ("bfloat16", "float64"): "__double2bfloat16",
}


class Conversions:
    """The loops of SOURCE, compiled with the given options."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        source, library = folder / "loops.cpp", folder / "loops.so"
        source.write_text(SOURCE)
        command = [COMPILER, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        command += [*options, f"-I{INCLUDE}", str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self.compiler_output = done.stderr
        self.library = ctypes.CDLL(str(library))

    def __call__(self, function: str, values: np.ndarray, dtype: type) -> np.ndarray:
        """function(value) for each of the values, as an array of that dtype."""
        out = np.empty(values.shape, dtype)
        loop = getattr(self.library, f"loop_{function}")
        loop(*(ctypes.c_void_p(a.ctypes.data) for a in (values, out)), ctypes.c_longlong(out.size))
        return out

    def round(self, narrow: str, values: np.ndarray) -> np.ndarray:
        """The bits of the values rounded to the 16-bit format."""
        return self(ROUND[narrow, values.dtype.name], values, np.uint16)


@pytest.fixture(
    scope="module",
    params=[["-O3", "-march=native", "-ffp-contract=off"], ["-O3", "-ffp-contract=off"], ["-O0"]],
    ids=" ".join,
)
def convert(request, tmp_path_factory) -> Conversions:
    return Conversions(tmp_path_factory.mktemp("float_headers"), request.param)


def all_bits() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16)


def magnitudes(narrow: str) -> np.ndarray:
    """Every finite value from 0 up, then what would follow the largest, were there no infinity."""
    finite = all_bits()[: INFINITY[narrow]].view(NARROW[narrow]).astype(np.float64)
    return np.append(finite, 2 * finite[-1] - finite[-2])


def nearest_even(narrow: str, values: np.ndarray) -> np.ndarray:
    """The bits of values rounded to nearest even, by search in the table of all results.

    The bits of the finite values and infinity count up from 0, so that an even fraction is an even
    index. All the midpoints are exact in float64.
    """
    table = magnitudes(narrow)
    midpoints = (table[:-1] + table[1:]) / 2
    magnitude = np.abs(values).astype(np.float64)
    below, above = (np.searchsorted(midpoints, magnitude, side) for side in ("left", "right"))
    bits = np.where(below % 2 == 0, below, above).astype(np.uint16)
    bits |= np.signbit(values).astype(np.uint16) << 15
    return np.where(np.isnan(values), np.uint16(CUDA_NAN), bits)


def around_every_rounding_boundary(narrow: str, dtype: type) -> np.ndarray:
    """Each result, each midpoint between two, and their neighbours in dtype, of both signs."""
    table = magnitudes(narrow)
    with np.errstate(over="ignore", under="ignore"):
        centres = np.concatenate([table, (table[:-1] + table[1:]) / 2]).astype(dtype)
        near = [np.nextafter(centres, dtype(0)), centres, np.nextafter(centres, dtype(np.inf))]
    return np.concatenate([*near, *(-values for values in near)])


def special_values(dtype: type) -> np.ndarray:
    info = np.finfo(dtype)
    values = [0.0, np.inf, np.nan, info.max, info.tiny, info.smallest_subnormal, info.eps]
    return np.array([*values, *(-v for v in values)], dtype)


@pytest.mark.parametrize("narrow", WIDEN)
def test_every_16_bit_value_widens_exactly(convert, narrow):
    with np.errstate(invalid="ignore"):
        want = all_bits().view(NARROW[narrow]).astype(np.float32)
    got = convert(WIDEN[narrow], all_bits(), np.float32)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~number)
    np.testing.assert_array_equal(got[number].view(np.uint32), want[number].view(np.uint32))


@pytest.mark.parametrize(("narrow", "wide"), ROUND)
def test_every_16_bit_value_survives_the_way_there_and_back(convert, narrow, wide):
    values = convert(WIDEN[narrow], all_bits(), np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        got = convert.round(narrow, values.astype(wide))
    np.testing.assert_array_equal(got, np.where(np.isnan(values), CUDA_NAN, all_bits()))


@pytest.mark.parametrize(("narrow", "wide"), ROUND)
def test_rounding_is_to_nearest_even_around_every_boundary(convert, narrow, wide):
    dtype = np.dtype(wide).type
    values = np.append(around_every_rounding_boundary(narrow, dtype), special_values(dtype))
    np.testing.assert_array_equal(convert.round(narrow, values), nearest_even(narrow, values))


@pytest.mark.parametrize("narrow", WIDEN)
def test_ten_million_random_floats_round_as_in_numpy(convert, narrow):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 10_000_000, np.uint32)
    values = bits.view(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        want = values.astype(NARROW[narrow]).view(np.uint16)
    want = np.where(np.isnan(values), CUDA_NAN, want)
    np.testing.assert_array_equal(convert.round(narrow, values), want)


@pytest.mark.parametrize("narrow", WIDEN)
def test_random_doubles_round_to_nearest_even(convert, narrow):
    rng = np.random.default_rng(0)
    lowest, highest = np.log2(magnitudes(narrow)[[1, -1]])
    values = rng.uniform(1, 2, 1_000_000) * np.exp2(rng.uniform(lowest - 3, highest + 2, 1_000_000))
    values = np.append(values, -values)
    np.testing.assert_array_equal(convert.round(narrow, values), nearest_even(narrow, values))


@pytest.mark.parametrize("narrow", WIDEN)
def test_doubles_are_not_rounded_to_float_on_the_way(convert, narrow):
    """A double so close to a midpoint that the nearest float is the midpoint itself."""
    values = around_every_rounding_boundary(narrow, np.float64)
    with np.errstate(over="ignore", under="ignore"):
        twice = nearest_even(narrow, values.astype(np.float32))
    once = nearest_even(narrow, values)
    assert (twice != once).sum() > 10_000, "the values would not show a double rounding"
    np.testing.assert_array_equal(convert.round(narrow, values), once)


def test_every_conversion_loop_vectorises(tmp_path):
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True)
    if "Free Software Foundation" not in version.stdout:
        pytest.skip("only GCC's report of vectorised loops is read here")
    options = ["-O3", "-march=native", "-ffp-contract=off", "-fopt-info-vec-optimized"]
    report = Conversions(tmp_path, options).compiler_output
    lines = set(re.findall(r"loops\.cpp:(\d+):.*loop vectorized", report))
    assert len(lines) == SOURCE.count("\nLOOP(")
