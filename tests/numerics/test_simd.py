# SPDX-License-Identifier: MIT
"""The CPU build's vectors convert exactly, whatever their width."""

import numpy as np
import pytest

from tests.support.host_code import (
    MACHINES,
    around_every_rounding_boundary,
    compiled,
    every_16_bits,
    for_machine,
    loaded,
    nearest_even,
    needs_a_compiler,
    special_values,
)
from tests.support.operands import DTYPES, assert_same_bits

pytestmark = needs_a_compiler
WIDE = {"float": np.float32, "double": np.float64}
NARROW = {"fp16": "half", "bf16": "bfloat16"}  # as the tables of host_code have them
STORED = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}

SOURCE = """
#include "simd_doubles.h"
template <class T, int count, class C>
void store_all(T* out, const C* in) {
  simd::Vector<C> v[count];
  for (int i = 0; i < count; ++i) v[i] = simd::load<C>(in + i * simd::lanes<C>);
  simd::store_all(out, v);
}
#define LOOPS(C, T)                                                          \\
  extern "C" void store_all_##T##_##C(const C* in, T* out, long long count) { \\
    constexpr int even = 64 / simd::lanes<C>, odd = even - 1;                \\
    for (long long i = 0; i < count; i += 64) {                              \\
      if (i % 128) {                                                         \\
        store_all<T, even>(out + i, in + i);                                 \\
      } else {                                                               \\
        store_all<T, odd>(out + i, in + i);                                  \\
        store_all<T, 1>(out + i + odd * simd::lanes<C>, in + i + odd * simd::lanes<C>); \\
      }                                                                      \\
    }                                                                        \\
  }                                                                          \\
  extern "C" void load_##T##_##C(const T* in, C* out, long long count) {     \\
    for (long long i = 0; i < count; i += simd::lanes<C>)                    \\
      simd::store(out + i, simd::load<C>(in + i));                           \\
  }                                                                          \\
  extern "C" void store_##T##_##C(const C* in, T* out, long long count) {    \\
    for (long long i = 0; i < count; i += simd::lanes<C>)                    \\
      simd::store(out + i, simd::load<C>(in + i));                           \\
  }
LOOPS(float, fp16) LOOPS(float, bf16) LOOPS(float, fp32) LOOPS(float, fp64)
LOOPS(double, fp16) LOOPS(double, bf16) LOOPS(double, fp32) LOOPS(double, fp64)
"""
wides = pytest.mark.parametrize("wide", WIDE)


@pytest.fixture(scope="module", params=MACHINES)
def convert(request, tmp_path_factory):
    """Run load_* or store_* over an array of any size."""
    folder = tmp_path_factory.mktemp("simd")
    return loaded(compiled(folder, SOURCE, *for_machine(request.param)))


@np.errstate(invalid="ignore")  # signalling NaNs
def assert_same_values(actual, expected):
    """Bit for bit, but for what a NaN looks like."""
    expected = np.asarray(expected, actual.dtype)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), ~number)
    assert_same_bits(actual[number], expected[number])


@wides
@pytest.mark.parametrize("stored", NARROW)
def test_every_16_bit_value_loads_exactly_and_survives_a_store(convert, stored, wide):
    every = every_16_bits().view(DTYPES[STORED[stored]])
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = every.astype(WIDE[wide])
    values = convert(f"load_{stored}_{wide}", every, WIDE[wide])
    assert_same_values(values, expected)
    assert_same_values(convert(f"store_{stored}_{wide}", values, every.dtype), every)


@wides
@pytest.mark.parametrize("stored", NARROW)
def test_stores_round_to_nearest_even_subnormals_included(convert, stored, wide):
    dtype = WIDE[wide]
    values = np.append(around_every_rounding_boundary(NARROW[stored], dtype), special_values(dtype))
    # In any company: an instruction may serve a whole vector only where it has no subnormal.
    for order in (values, np.sort(values), np.random.default_rng(0).permutation(values)):
        expected = nearest_even(NARROW[stored], order).view(DTYPES[STORED[stored]])
        for function in ("store", "store_all"):
            result = convert(f"{function}_{stored}_{wide}", order, expected.dtype)
            assert_same_values(result, expected)


@wides
@pytest.mark.parametrize("stored", ["fp32", "fp64"])
def test_float_and_double_convert_as_numpy_does(convert, stored, wide):
    dtypes = (DTYPES[STORED[stored]], np.dtype(WIDE[wide]))
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    near = np.float64(1) + np.arange(-3, 4) * 2.0**-30
    with np.errstate(all="ignore"):
        values = np.concatenate([bits.astype(np.float64), (bits[:, None] * near).reshape(-1)])
        for function, (source, target) in {"load": dtypes, "store": dtypes[::-1]}.items():
            given = values.astype(source)
            result = convert(f"{function}_{stored}_{wide}", given, target)
            assert_same_values(result, given.astype(target))
