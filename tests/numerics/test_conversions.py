# SPDX-License-Identifier: MIT
"""The CPU build converts exactly or rounds to nearest even, in any vectors and one by one.

The stand-ins for cuda_fp16.h and cuda_bf16.h convert numbers one by one, and round as CUDA does.
"""

import re

import numpy as np
import pytest

from tests.support.host_code import (
    MACHINES,
    around_every_rounding_boundary,
    compiled,
    every_16_bits,
    for_machine,
    loaded,
    magnitudes,
    nearest_even,
    needs_a_compiler,
    special_values,
)
from tests.support.internals import compiler
from tests.support.operands import DTYPES
from tests.support.ulps import assert_same_numbers

pytestmark = needs_a_compiler
COMPUTE = {"float": np.dtype(np.float32), "double": np.dtype(np.float64)}
STORED = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
NARROW = ("fp16", "bf16")

ONE_BY_ONE = """
#include "simd_doubles.h"
#define LOOP(NAME, FROM, TO, STEP, ...)                             \\
  extern "C" void NAME(const FROM* in, TO* out, long long count) {  \\
    for (long long i = 0; i < count; i += STEP) {                   \\
      __VA_ARGS__;                                                  \\
    }                                                               \\
  }
LOOP(one_load_fp16_float, fp16, float, 1, out[i] = __half2float(in[i]))
LOOP(one_store_fp16_float, float, fp16, 1, out[i] = __float2half_rn(in[i]))
LOOP(one_store_fp16_double, double, fp16, 1, out[i] = __double2half(in[i]))
LOOP(one_load_bf16_float, bf16, float, 1, out[i] = __bfloat162float(in[i]))
LOOP(one_store_bf16_float, float, bf16, 1, out[i] = __float2bfloat16_rn(in[i]))
LOOP(one_store_bf16_double, double, bf16, 1, out[i] = __double2bfloat16(in[i]))
"""
VECTORS = """
template <class T, int count, class C>
void store_all(T* out, const C* in) {
  simd::Vector<C> v[count];
  for (int i = 0; i < count; ++i) v[i] = simd::load<C>(in + i * simd::lanes<C>);
  simd::store_all<count>(out, v);
}
#define LOOPS(C, T)                                                                       \\
  LOOP(store_all_##T##_##C, C, T, 64, constexpr int even = 64 / simd::lanes<C>;           \\
       constexpr int odd = even - 1; constexpr int last = odd * simd::lanes<C>;           \\
       if (i % 128) { store_all<T, even>(out + i, in + i); } else {                       \\
         store_all<T, odd>(out + i, in + i);                                              \\
         store_all<T, 1>(out + i + last, in + i + last); })                               \\
  LOOP(load_##T##_##C, T, C, simd::lanes<C>, simd::store(out + i, simd::load<C>(in + i))) \\
  LOOP(store_##T##_##C, C, T, simd::lanes<C>, simd::store(out + i, simd::load<C>(in + i)))
LOOPS(float, fp16) LOOPS(float, bf16) LOOPS(float, fp32) LOOPS(float, fp64)
LOOPS(double, fp16) LOOPS(double, bf16) LOOPS(double, fp32) LOOPS(double, fp64)
"""


@pytest.fixture(scope="module", params=MACHINES)
def convert(request, tmp_path_factory):
    """Return a function that runs a loop over an array of any size."""
    folder = tmp_path_factory.mktemp("simd")
    return loaded(compiled(folder, ONE_BY_ONE + VECTORS, *for_machine(request.param)))


@np.errstate(invalid="ignore")  # signalling NaNs
def assert_same_values(actual, expected):
    assert_same_numbers(actual, np.asarray(expected, actual.dtype), "values")


@pytest.mark.parametrize("stored", NARROW)
def test_every_16_bit_value_loads_exactly_and_survives_a_store(convert, stored):
    all_values = every_16_bits().view(DTYPES[STORED[stored]])
    for load, compute in (("load", "float"), ("load", "double"), ("one_load", "float")):
        with np.errstate(invalid="ignore"):  # signalling NaNs
            expected = all_values.astype(COMPUTE[compute])
        values = convert(f"{load}_{stored}_{compute}", all_values, COMPUTE[compute])
        assert_same_values(values, expected)
        survived = convert(f"store_{stored}_{compute}", values, all_values.dtype)
        assert_same_values(survived, all_values)


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("stored", NARROW)
def test_stores_round_once_to_nearest_even_subnormals_included(convert, stored, compute):
    """For some doubles, the nearest float is the midpoint of two results."""
    dtype, narrow, rng = COMPUTE[compute].type, STORED[stored], np.random.default_rng(0)
    lowest, highest = np.log2(magnitudes(narrow)[[1, -1]])
    drawn = rng.uniform(1, 2, 50_000) * np.exp2(rng.uniform(lowest - 3, highest + 2, 50_000))
    with np.errstate(over="ignore", under="ignore"):
        drawn = drawn.astype(dtype)
    near = around_every_rounding_boundary(narrow, dtype)
    values = np.concatenate([near, special_values(dtype), drawn, -drawn])
    bits = nearest_even(narrow, values)
    one_by_one = convert(f"one_store_{stored}_{compute}", values, np.uint16)
    np.testing.assert_array_equal(one_by_one, bits)  # NaNs too, with CUDA's bits
    # In two orders: an instruction may convert a whole vector only if no element is subnormal.
    for order in (np.arange(len(values)), rng.permutation(len(values))):
        expected = bits[order].view(DTYPES[narrow])
        for function in ("store", "store_all"):
            result = convert(f"{function}_{stored}_{compute}", values[order], expected.dtype)
            assert_same_values(result, expected)


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("stored", ["fp32", "fp64"])
def test_float_and_double_convert_as_numpy_does(convert, stored, compute):
    dtypes = (DTYPES[STORED[stored]], COMPUTE[compute])
    bits = np.random.default_rng(0).integers(0, 1 << 32, 50_000, np.uint32).view(np.float32)
    near = np.float64(1) + np.arange(-3, 4) * 2.0**-30
    with np.errstate(all="ignore"):
        values = np.concatenate([bits.astype(np.float64), (bits[:, None] * near).reshape(-1)])
        for function, (source, target) in {"load": dtypes, "store": dtypes[::-1]}.items():
            given = values.astype(source)
            result = convert(f"{function}_{stored}_{compute}", given, target)
            assert_same_values(result, given.astype(target))


@pytest.mark.skipif(not (compiler() and compiler().is_gcc), reason="reads GCC's report of loops")
def test_every_loop_of_single_conversions_is_vectorised(tmp_path):
    report = tmp_path / "report"
    compiled(tmp_path, ONE_BY_ONE, *for_machine("native"), f"-fopt-info-vec-optimized={report}")
    lines = set(re.findall(r"probe\.cu:(\d+):.*loop vectorized", report.read_text()))
    assert len(lines) == ONE_BY_ONE.count("\nLOOP(")
