# SPDX-License-Identifier: MIT
"""The CPU build's vectors convert exactly, and results do not show how wide they are."""

import ctypes
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import cunorm
from cunorm import _cpu
from cunorm._cpu import _compile
from cunorm._sources import kernel_folder
from tests.numerics.test_cpu_float_headers import (
    around_every_rounding_boundary,
    nearest_even,
    special_values,
)
from tests.support.described import with_empty_caches
from tests.support.operands import DTYPES, assert_same_bits, at, draw, optional

pytestmark = pytest.mark.skipif(_cpu.compiler() is None, reason="needs a C++ compiler")
HOST = Path(_compile.__file__).parent / "include" / "host"
WIDE = {"float": np.float32, "double": np.float64}
NARROW = {"fp16": "half", "bf16": "bfloat16"}  # as the table of test_cpu_float_headers has them
STORED = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
MACHINES = ("native", "x86-64-v3", "x86-64")

SOURCE = """
#include "device.h"
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
conversions = pytest.mark.parametrize(
    ("stored", "wide"), [(stored, wide) for stored in STORED for wide in WIDE]
)
narrow_conversions = pytest.mark.parametrize(
    ("stored", "wide"), [(stored, wide) for stored in NARROW for wide in WIDE]
)


def runs(machine):
    """Whether code for that machine runs here, by the flags that need to be there."""
    needed = {"x86-64-v3": {"avx2", "fma", "f16c", "bmi2"}, "x86-64": {"sse2"}}
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    return needed.get(machine, set()) <= flags


def for_machine(machine):
    """Return the options of the CPU build, for another machine than this one."""
    if not runs(machine):
        pytest.skip(f"this machine does not run code for {machine}")
    return tuple(o.replace("native", machine) for o in _compile._OPTIONS)


@pytest.fixture(scope="module", params=MACHINES)
def convert(request, tmp_path_factory):
    """Run load_* or store_* over an array of any size."""
    folder = tmp_path_factory.mktemp("simd")
    (folder / "loops.cpp").write_text(SOURCE)
    options = [*for_machine(request.param), f"-I{HOST}", f"-I{HOST.parent}", f"-I{kernel_folder()}"]
    command = [*_cpu.compiler().command, *options, os.fspath(folder / "loops.cpp")]
    subprocess.run([*command, "-o", os.fspath(folder / "loops.so")], check=True)
    library = ctypes.CDLL(os.fspath(folder / "loops.so"))

    def run(function, values, dtype):
        values = np.pad(values, (0, -len(values) % 64), mode="edge")  # whole vectors
        out = np.empty(len(values), dtype)
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (values, out))
        getattr(library, function)(*pointers, ctypes.c_longlong(len(values)))
        return out

    return run


@np.errstate(invalid="ignore")  # signalling NaNs
def assert_same_values(actual, expected):
    """Bit for bit, but for what a NaN looks like."""
    actual, expected = actual[: len(expected)], np.asarray(expected, actual.dtype)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), ~number)
    assert_same_bits(actual[number], expected[number])


# --- conversions ----------------------------------------------------------------------------------


@narrow_conversions
def test_every_16_bit_value_loads_exactly(convert, stored, wide):
    every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[STORED[stored]])
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = every.astype(WIDE[wide])
    assert_same_values(convert(f"load_{stored}_{wide}", every, WIDE[wide]), expected)


@narrow_conversions
def test_every_16_bit_value_survives_a_load_and_a_store(convert, stored, wide):
    every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[STORED[stored]])
    loaded = convert(f"load_{stored}_{wide}", every, WIDE[wide])
    assert_same_values(convert(f"store_{stored}_{wide}", loaded, every.dtype), every)


@narrow_conversions
def test_stores_round_to_nearest_even_subnormals_included(convert, stored, wide):
    dtype = WIDE[wide]
    values = np.append(around_every_rounding_boundary(NARROW[stored], dtype), special_values(dtype))
    # In any company: an instruction may serve a whole vector only where it has no subnormal.
    for order in (values, np.sort(values), np.random.default_rng(0).permutation(values)):
        expected = nearest_even(NARROW[stored], order).view(DTYPES[STORED[stored]])
        for function in ("store", "store_all"):
            result = convert(f"{function}_{stored}_{wide}", order, expected.dtype)
            assert_same_values(result, expected)


@pytest.mark.parametrize(("stored", "wide"), [(s, w) for s in ("fp32", "fp64") for w in WIDE])
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


# --- kernels on other machines --------------------------------------------------------------------

CASES = {
    "float32": ("float32", "float32"),
    "bfloat16 on a float32 stream": ("bfloat16", "float32"),
    "float16": ("float16", "float16"),
    "float64": ("float64", "float64"),
}


def every_result(dtype, stream, width):
    """Layer norm with everything, forward and backward."""
    shape = (40, width)
    x, dy = (draw(name, shape, dtype) for name in ("x", "dy"))
    residual, d_residual = (draw(name, shape, stream) for name in ("residual", "d_residual"))
    weight, bias = (optional(name, width, dtype) for name in ("weight", "bias"))
    forward = cunorm.layer_norm_forward(x, weight, bias, residual=residual)
    grads = cunorm.layer_norm_backward(
        dy,
        forward.residual,
        weight,
        bias,
        rstd=forward.rstd,
        mean=forward.mean,
        d_residual=d_residual,
        x_dtype=dtype,
    )
    return {**forward._asdict(), **grads._asdict(), "dgate": x}


ON_OTHER_MACHINES = [
    pytest.param(
        machine, case, marks=pytest.mark.exhaustive if long else (), id=f"{case}, {machine}"
    )
    for machine in MACHINES[1:]
    for case in CASES
    # Without the instructions for it, a fused product and sum takes the compiler long.
    for long in [machine == "x86-64" or case in ("float32", "float64")]
]


@pytest.mark.parametrize(("machine", "case"), ON_OTHER_MACHINES)
def test_results_do_not_depend_on_the_width_of_vectors(monkeypatch, machine, case):
    dtype, stream = CASES[case]
    widths = (1, 7, 33, 64, 129, 1003)
    expected = [every_result(dtype, stream, width) for width in widths]
    monkeypatch.setattr(_compile, "_OPTIONS", for_machine(machine))
    with_empty_caches(monkeypatch)
    for width, one in zip(widths, expected, strict=True):
        for name, result in every_result(dtype, stream, width).items():
            with at(f"width {width}"):
                assert_same_bits(result, one[name], name)
