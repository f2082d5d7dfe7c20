# SPDX-License-Identifier: MIT
"""Floating-point instructions under every rounding mode, against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.softgpu.launching import cupy, launch

MODES = ("rn", "rz", "rm", "rp")
REGISTER = {"f64": "d", "f32": "f", "f16": "h", "bf16": "h", "s64": "l", "u64": "l", "s32": "r",
            "u32": "r", "s16": "h", "u16": "h"}  # fmt: skip
HELD = {"d": "double", "f": "float", "h": "unsigned short", "l": "long long", "r": "int"}
DTYPES = {"f64": np.dtype("f8"), "f32": np.dtype("f4"), "f16": np.dtype("f2"),
          "bf16": np.dtype(ml_dtypes.bfloat16), "s64": np.dtype("i8"), "u64": np.dtype("u8"),
          "s32": np.dtype("i4"), "u32": np.dtype("u4"), "s16": np.dtype("i2"),
          "u16": np.dtype("u2")}  # fmt: skip
RNG = np.random.default_rng(3)


def run(instruction: str, to: str, source: str, *arrays: np.ndarray) -> np.ndarray:
    """Give the results of one instruction for the elements of arrays."""
    into, of = REGISTER[to], REGISTER[source]
    names = [f"a{k}" for k in range(len(arrays))]
    given = ", ".join(f"const {HELD[of]}* {name}" for name in names)
    inputs = ", ".join(f'"{of}"({name}[i])' for name in names)
    operands = ", ".join(f"%{k + 1}" for k in range(len(arrays)))
    body = f"""{HELD[into]}* y, {given}) {{ int i = threadIdx.x + 256 * blockIdx.x; {HELD[into]} r;
        asm volatile("{instruction} %0, {operands};" : "={into}"(r) : {inputs}); y[i] = r; }}"""
    out = cupy.zeros(arrays[0].size, f"u{DTYPES[to].itemsize}")
    raw = [cupy.asarray(v.view(f"u{v.itemsize}")) for v in arrays]
    launch(body, out, *raw, grid=arrays[0].size // 256, block=256)
    return out.get().view(DTYPES[to])


def drawn(kind: str) -> np.ndarray:
    """Draw numbers of many sizes, so that sums lose digits."""
    v = RNG.standard_normal(256) * 2.0 ** RNG.integers(-12, 12, 256)
    return v.astype(DTYPES[kind])


def steps(v: np.ndarray, up: bool) -> np.ndarray:
    """Give the next numbers of the same type."""
    bits = v.view(f"i{v.itemsize}").astype("i8")
    bits = np.where((bits >= 0) == up, bits + 1, bits - 1)
    return bits.astype(f"i{v.itemsize}").view(v.dtype)


def rounded(exact: list[Fraction], kind: str, mode: str) -> np.ndarray:
    """Round fractions, none of which is 0 or too large."""
    with np.errstate(over="ignore"):
        near = np.array([float(v) for v in exact]).astype(DTYPES[kind])
    is_above = np.array([Fraction(float(n)) > v for n, v in zip(near, exact, strict=True)])
    below = np.where(is_above, steps(near, up=False), near)
    is_equal = [Fraction(float(n)) == v for n, v in zip(below, exact, strict=True)]
    above = np.where(is_equal, below, steps(below, up=True))
    if mode != "rn":
        is_positive = np.array([v > 0 for v in exact])
        down = {"rm": True, "rp": False, "rz": is_positive}[mode]
        return np.where(down, below, above)
    gaps = [(v - Fraction(float(b)), Fraction(float(a)) - v)
            for v, b, a in zip(exact, below, above, strict=True)]  # fmt: skip
    is_even = below.view(f"u{below.itemsize}") % 2 == 0
    is_down = [d < u or (d == u and bool(e)) for (d, u), e in zip(gaps, is_even, strict=True)]
    return np.where(is_down, below, above)


EXACT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1 / a,
    "fma": lambda a, b, c: a * b + c,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("what", EXACT)
def test_arithmetic_is_rounded_as_the_instruction_says(what, kind, mode):
    arrays = [drawn(kind) for _ in range(EXACT[what].__code__.co_argcount)]
    found = run(f"{what}.{mode}.{kind}", kind, kind, *arrays)
    exact = [EXACT[what](*map(Fraction, map(float, v))) for v in zip(*arrays, strict=True)]
    np.testing.assert_array_equal(found, rounded(exact, kind, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_square_roots_are_rounded_as_the_instruction_says(kind, mode):
    v = np.abs(drawn(kind))
    # 100 digits, which no square root of these numbers ends within, but a whole one.
    scale = 10**100
    exact = [Fraction(math.isqrt(int(Fraction(float(n)) * scale**2)), scale) for n in v]
    found = run(f"sqrt.{mode}.{kind}", kind, kind, v)
    np.testing.assert_array_equal(found, rounded(exact, kind, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", ["f64", "f32", "s64", "u64", "s32"])
@pytest.mark.parametrize("to", ["f32", "f64", "f16", "bf16"])
def test_numbers_become_floating_point_as_the_rounding_says(to, source, mode):
    if DTYPES[source].kind == "f":
        if DTYPES[to].itemsize >= DTYPES[source].itemsize:
            return  # nothing is rounded
        v = drawn(source)
    elif to in ("f16", "bf16"):
        v = RNG.integers(1, 60000, 256).astype(DTYPES[source])
    else:
        v = RNG.integers(1, np.iinfo(DTYPES[source]).max, 256, DTYPES[source])
    exact = [Fraction(int(n)) if v.dtype.kind != "f" else Fraction(float(n)) for n in v]
    found = run(f"cvt.{mode}.{to}.{source}", to, source, v)
    np.testing.assert_array_equal(found, rounded(exact, to, mode))


WHOLE = {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", ["f64", "f32", "f16"])
@pytest.mark.parametrize("to", ["s64", "u64", "s32", "u32", "s16", "u16"])
def test_numbers_become_integers_within_limits(to, source, mode):
    with np.errstate(over="ignore"):
        v = (RNG.standard_normal(256) * 2.0 ** RNG.integers(-2, 70, 256)).astype(DTYPES[source])
    v[:6] = np.inf, -np.inf, 0.5, 1.5, -2.5, -0.0
    limits = np.iinfo(DTYPES[to])
    wanted = [limits.max if n > 0 else limits.min for n in v]
    wanted = [min(max(WHOLE[mode](float(n)), limits.min), limits.max) if np.isfinite(n) else w
              for n, w in zip(v, wanted, strict=True)]  # fmt: skip
    v[-1] = np.nan  # 0, but for 64 bits the upper one alone
    wide = source == "f64" or DTYPES[to].itemsize == 8
    wanted[-1] = (limits.min or limits.max // 2 + 1) if wide else 0
    found = run(f"cvt.{mode}i.{to}.{source}", to, source, v)
    np.testing.assert_array_equal(found, np.array(wanted, dtype=DTYPES[to]))


def test_integers_are_held_within_limits_where_that_is_asked_for():
    v = np.r_[RNG.integers(-(2**40), 2**40, 254), -5, 5]
    for to in ("s32", "u32", "s16", "u16"):
        limits = np.iinfo(DTYPES[to])
        wanted = np.clip(v, limits.min, limits.max).astype(DTYPES[to])
        np.testing.assert_array_equal(run(f"cvt.sat.{to}.s64", to, "s64", v), wanted)


TINY = np.array([2.0**-130, -(2.0**-130), 2.0**-126, 1.5, np.nan, -0.0, -3.0, np.inf] * 32, "f4")


def test_subnormal_numbers_are_flushed_where_that_is_asked_for():
    flushed = np.where(np.abs(TINY) < 2.0**-126, np.copysign(np.float32(0), TINY), TINY)
    np.testing.assert_array_equal(run("add.f32", "f32", "f32", TINY, TINY), TINY * 2)
    found = run("add.ftz.f32", "f32", "f32", TINY, TINY)
    np.testing.assert_array_equal(found, flushed * 2)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(flushed))
    np.testing.assert_array_equal(run("cvt.ftz.f64.f32", "f64", "f32", TINY), flushed.astype("f8"))


def test_saturation_holds_numbers_between_0_and_1_and_takes_nan_for_0():
    wanted = np.clip(np.nan_to_num(TINY, nan=0, posinf=1), 0, 1)
    one = np.ones_like(TINY)
    np.testing.assert_array_equal(run("mul.sat.f32", "f32", "f32", TINY, one), wanted)
    np.testing.assert_array_equal(run("cvt.sat.f32.f32", "f32", "f32", TINY), wanted)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_of_a_number_and_nan_min_takes_the_number(kind):
    a, b = np.meshgrid(*[[1, -2, np.nan, 0.0, -0.0, np.inf]] * 2)
    a, b = a.ravel()[:32].repeat(8), b.ravel()[:32].repeat(8)
    raw = a.astype(DTYPES[kind]), b.astype(DTYPES[kind])
    for what, wanted in (("min", np.fmin(a, b)), ("max", np.fmax(a, b))):
        found = run(f"{what}.{kind}", kind, kind, *raw).astype("f8")
        np.testing.assert_array_equal(found, wanted)
        if kind != "f64":  # has no such instruction
            found = run(f"{what}.NaN.{kind}", kind, kind, *raw).astype("f8")
            np.testing.assert_array_equal(
                found, np.where(np.isnan(a) | np.isnan(b), np.nan, wanted)
            )


FUNCTIONS = {
    "exp(a)": math.exp,
    "tanh(a)": math.tanh,
    "erf(a)": math.erf,
    "erfc(a)": math.erfc,
    "sqrt(fabs(a))": lambda a: math.sqrt(abs(a)),
    "rsqrt(fabs(a))": lambda a: 1 / math.sqrt(abs(a)),
    "log(fabs(a))": lambda a: math.log(abs(a)),
    "1 / (1 + exp(-a))": lambda a: 1 / (1 + math.exp(-a)),
    "a / (a * a + 1)": lambda a: a / (a * a + 1),
    "fmin(a, 0.5) + fmax(a, 0.25)": lambda a: min(a, 0.5) + max(a, 0.25),
    "a > 0 ? a : -a": abs,
}


@pytest.mark.parametrize("what", FUNCTIONS)
def test_functions_of_float64_are_those_of_the_processor(what):
    a = RNG.standard_normal(256) * 3
    out, body = cupy.zeros(256, "f8"), "double* y, const double* x) { int i = threadIdx.x;"
    launch(body + f"double a = x[i]; y[i] = {what}; }}", out, cupy.asarray(a), block=256)
    wanted = np.array([FUNCTIONS[what](v) for v in a])
    # A few units in the last place, as CUDA promises for the worst of them, erfc.
    np.testing.assert_allclose(out.get(), wanted, rtol=6 * 2.0**-52)
