# SPDX-License-Identifier: MIT
"""Two float32 in a register of 64 bits, on which one instruction computes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tests import softgpu
from tests.softgpu.launching import cupy, launch, raises
from tests.softgpu.test_arithmetic import TINY, TYPES, rounded, run

PAIRED = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
}


def run_pairs(name: str, *arrays: np.ndarray, capability: int = 100) -> np.ndarray:
    """Return the results of an instruction on the neighbours in arrays of float32."""
    operands = ", ".join(f"%{k}" for k in range(len(arrays) + 1))
    with softgpu.settings(capability=capability):
        (found,) = run("u64", "u64", [f"{name}.f32x2 {operands}"], *(v.view("u8") for v in arrays))
    return found.view("f4")


def drawn(name: str) -> np.ndarray:
    """Return a row for each operand: numbers of many magnitudes, so that sums lose digits."""
    rng, size = np.random.default_rng(3), (PAIRED[name].__code__.co_argcount, 512)
    return (rng.standard_normal(size) * 2.0 ** rng.integers(-12, 12, size)).astype("f4")


@pytest.mark.parametrize("name", PAIRED)
def test_both_numbers_are_rounded_once(name):
    arrays = drawn(name)
    exact = [PAIRED[name](*map(Fraction, v)) for v in arrays.T.tolist()]
    for how in (".rn", ".rn.ftz"):
        found = run_pairs(name + how, *arrays)
        np.testing.assert_array_equal(found, rounded(exact, "f32"), how)


def flushed(v: np.ndarray) -> np.ndarray:
    return np.where(np.abs(v) < np.float32(2.0**-126), np.copysign(np.float32(0), v), v)


@pytest.mark.parametrize("name", PAIRED)
def test_subnormal_operands_and_results_are_flushed_only_with_ftz(name):
    """Compute in float64, in which no result is near the middle between two float32."""
    count = PAIRED[name].__code__.co_argcount
    some = np.concatenate([TINY[:8], np.array([2.0**-127, -(2.0**-126)], "f4")])
    arrays = np.random.default_rng(3).choice(np.append(some, np.float32(0.5)), (count, 512))
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        plain = PAIRED[name](*arrays.astype("f8")).astype("f4")
        without = flushed(PAIRED[name](*flushed(arrays).astype("f8")).astype("f4"))
    assert not np.array_equal(plain, without, equal_nan=True)
    for how, wanted in {".rn": plain, ".rn.ftz": without}.items():
        found = run_pairs(name + how, *arrays)
        np.testing.assert_array_equal(found, wanted, how)
        numbers = ~np.isnan(wanted)
        np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(wanted)[numbers], how)


def test_the_first_of_two_registers_is_the_lower_half():
    x = drawn("add")[0]
    for kind in ("f32", "u32"):
        low, high = (v.copy().view(TYPES[kind][2]) for v in (x[::2], x[1::2]))
        (pairs,) = run("u64", kind, ["mov.b64 %0, {%1, %2}"], low, high)
        np.testing.assert_array_equal(pairs, x.view("u8"), kind)
        register = f".reg .{kind.replace('u', 'b')} other;"
        asked = [f"{{{register} mov.b64 {{{to}}}, %1;}}" for to in ("%0, other", "other, %0")]
        for found, wanted in zip(run(kind, "u64", asked, pairs), (low, high), strict=True):
            np.testing.assert_array_equal(found, wanted, kind)


# What a kernel does with two floats: NVRTC packs and unpacks them.
IN_CUDA = """const float2* x, float2* y) {
    int i = threadIdx.x; unsigned long long a, b, r; float2 v;
    asm("mov.b64 %0, {%1, %2};" : "=l"(a) : "f"(x[i].x), "f"(-x[i].y));
    asm("mov.b64 %0, {%1, %2};" : "=l"(b) : "f"(3.0f), "f"(0.5f));
    asm("fma.rn.ftz.f32x2 %0, %1, %2, %3;" : "=l"(r) : "l"(a), "l"(b), "l"(b));
    asm("mov.b64 {%0, %1}, %2;" : "=f"(v.x), "=f"(v.y) : "l"(r));
    asm("neg.f32 %0, %1;" : "=f"(y[i].x) : "f"(v.x)); y[i].y = v.y; }"""


def test_kernels_compute_with_pairs_of_their_floats():
    x, y = np.arange(64, dtype="f4"), cupy.zeros(64, "f4")
    with softgpu.settings(capability=100):
        launch(IN_CUDA, cupy.asarray(x), y)
    np.testing.assert_array_equal(y.get()[::2], -(x[::2] * 3 + 3))
    np.testing.assert_array_equal(y.get()[1::2], -x[1::2] * 0.5 + 0.5)


@pytest.mark.parametrize("name", PAIRED)
def test_pairs_need_compute_capability_10_0(name):
    arrays = drawn(name)
    for capability in (80, 90):
        with raises(rf"(?s)INVALID_PTX.*PTX line.*{name}\S+ needs compute capability 10.0"):
            run_pairs(f"{name}.rn.ftz", *arrays, capability=capability)
    right = run_pairs(f"{name}.rn", *arrays)
    np.testing.assert_array_equal(run_pairs(f"{name}.rn", *arrays, capability=120), right)


def test_other_roundings_of_pairs_are_not_known():
    with raises("an instruction is not known: add.rz.f32x2"):
        run_pairs("add.rz", *drawn("add"))
