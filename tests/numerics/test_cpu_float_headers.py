# SPDX-License-Identifier: MIT
"""The CPU stand-ins for cuda_fp16.h and cuda_bf16.h round as CUDA does, and vectorise."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.support.host_code import (
    CUDA_NAN,
    INCLUDE,
    NARROW,
    around_every_rounding_boundary,
    every_16_bits,
    loaded,
    magnitudes,
    nearest_even,
    needs_a_compiler,
    special_values,
)
from tests.support.internals import compiler

pytestmark = needs_a_compiler

SOURCE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define LOOP(FUNCTION, FROM, TO)                                                     \\
  extern "C" void FUNCTION##_loop(const FROM* __restrict__ in, TO* __restrict__ out, \\
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
OPTIONS = ["-O3 -march=native -ffp-contract=off", "-O3 -ffp-contract=off", "-O0"]


def compiled(folder: Path, options: str) -> tuple[Path, str]:
    """Return where the loops are, and what the compiler said."""
    source, library = folder / "loops.cpp", folder / "loops.so"
    source.write_text(SOURCE)
    command = [*compiler().command, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared"]
    command += ["-fPIC", *options.split(), f"-I{INCLUDE}", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library, done.stderr


@pytest.fixture(scope="module", params=OPTIONS)
def convert(request, tmp_path_factory):
    run = loaded(compiled(tmp_path_factory.mktemp("float_headers"), request.param)[0])
    return lambda function, values, dtype: run(f"{function}_loop", values, dtype)


@pytest.mark.parametrize("narrow", WIDEN)
def test_every_16_bit_value_widens_exactly_and_survives_the_way_back(convert, narrow):
    with np.errstate(invalid="ignore"):  # signalling NaNs
        want = every_16_bits().view(NARROW[narrow]).astype(np.float32)
        got = convert(WIDEN[narrow], every_16_bits(), np.float32)
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got), ~number)
        np.testing.assert_array_equal(got[number].view(np.uint32), want[number].view(np.uint32))
        for wide in ("float32", "float64"):
            back = convert(ROUND[narrow, wide], got.astype(wide), np.uint16)
            np.testing.assert_array_equal(back, np.where(number, every_16_bits(), CUDA_NAN))


@pytest.mark.parametrize(("narrow", "wide"), ROUND)
def test_rounding_is_to_nearest_even_once_around_every_boundary(convert, narrow, wide):
    """Some doubles are so close to a midpoint that the nearest float is the midpoint itself."""
    dtype, rng = np.dtype(wide).type, np.random.default_rng(0)
    lowest, highest = np.log2(magnitudes(narrow)[[1, -1]])
    drawn = rng.uniform(1, 2, 200_000) * np.exp2(rng.uniform(lowest - 3, highest + 2, 200_000))
    values = [around_every_rounding_boundary(narrow, dtype), special_values(dtype)]
    with np.errstate(over="ignore", under="ignore"):
        values = np.concatenate([*values, drawn.astype(dtype), -drawn.astype(dtype)])
        expected = nearest_even(narrow, values)
        if wide == "float64":
            twice = nearest_even(narrow, values.astype(np.float32))
            assert (twice != expected).sum() > 10_000, "the values show no double rounding"
    got = convert(ROUND[narrow, wide], values, np.uint16)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("narrow", WIDEN)
def test_random_floats_round_as_in_numpy(convert, narrow):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 2_000_000, np.uint32)
    values = bits.view(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        want = values.astype(NARROW[narrow]).view(np.uint16)
    want = np.where(np.isnan(values), CUDA_NAN, want)
    got = convert(ROUND[narrow, "float32"], values, np.uint16)
    np.testing.assert_array_equal(got, want)


def test_every_conversion_loop_vectorises(tmp_path):
    version = subprocess.run(
        [*compiler().command, "--version"], capture_output=True, text=True, check=True
    )
    if "Free Software Foundation" not in version.stdout:
        pytest.skip("only GCC's report of vectorised loops is read here")
    _, report = compiled(tmp_path, f"{OPTIONS[0]} -fopt-info-vec-optimized")
    lines = set(re.findall(r"loops\.cpp:(\d+):.*loop vectorized", report))
    assert len(lines) == SOURCE.count("\nLOOP(")
