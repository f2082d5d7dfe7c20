# SPDX-License-Identifier: MIT
"""Kernels compute what NumPy computes; an instruction returns the exact result, rounded once."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from tests.softgpu.statements import TYPES, computed, run

OF_C = ("f32", "f64", "s8", "s16", "s32", "s64", "u32")
RNG = np.random.default_rng(3)
BEGINNING = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def _drawn_alike():
    """Make a test draw the same numbers, whatever ran before."""
    RNG.bit_generator.state = BEGINNING


def ends(kind: str) -> tuple[float, float]:
    found = np.finfo("f4") if kind[0] == "f" else np.iinfo(TYPES[kind][2])
    return float(found.min), float(found.max) * (1 - 2**-12)


@pytest.mark.parametrize("source", OF_C)
def test_every_type_is_converted_to_every_other_as_numpy_does(source):
    dtype = TYPES[source][2]
    exact = RNG.standard_normal(253) * 10.0 ** RNG.integers(-3, 25, 253)
    for is_wide in (False, True):
        targets = [to for to in OF_C if (TYPES[to][2].itemsize >= 4) == is_wide]
        low, high = np.array([ends(kind) for kind in (source, *targets)]).T
        v = np.clip(np.r_[exact, 0.5, 1.5, -2.5], low.max(), high.min()).astype(dtype)
        found = computed([(to, f"r = ({TYPES[to][0]})a;") for to in targets], v)
        for to, y in zip(targets, found, strict=True):
            np.testing.assert_array_equal(y, v.astype(TYPES[to][2]), f"{source} to {to}")


A, B = RNG.integers(-(2**40), 2**40, 256), RNG.integers(1, 2**20, 256)
QUOTIENT = np.abs(A) // B * np.sign(A)
INTEGERS = {
    "a / b": QUOTIENT,
    "a % b": A - QUOTIENT * B,
    "a * b - (a & ~b | 5)": A * B - (A & ~B | 5),
    "a >> (b & 63)": A >> (B & 63),
    "(unsigned long long)a >> (b & 63)": (A.view("u8") >> (B & 63).astype("u8")).view("i8"),
    "(int)a << (b & 15)": (A << (B & 15)).astype("i4"),
    "__mul64hi(a << 20, b << 30)": (A.astype(object) * B.astype(object) * 2**50 >> 64).astype("i8"),
    "min(a, b) + max(a, b) * 3": np.minimum(A, B) + np.maximum(A, B) * 3,
    "__clzll(b)": [64 - v.bit_length() for v in B.tolist()],
}  # fmt: skip


def test_integer_arithmetic_is_that_of_numpy():
    found = computed([("s64", f"r = {what};") for what in INTEGERS], A, B)
    for (what, wanted), y in zip(INTEGERS.items(), found, strict=True):
        np.testing.assert_array_equal(y, wanted, what)


WORDS = {
    "popc.b32 %0, %1": lambda a, b, c: a.bit_count(),
    "clz.b32 %0, %3": lambda a, b, c: 32 - c.bit_length(),
    "bfind.shiftamt.u32 %0, %3": lambda a, b, c: 32 - c.bit_length() if c else -1,
    "brev.b32 %0, %1": lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    "abs.s32 %0, %1": lambda a, b, c: min(a, 2**32 - a),
    "prmt.b32 %0, %1, %2, 0x5294": lambda a, b, c: (
        b & 0xFF | (a >> 15 & 1) * 0xFF00 | a & 0xFF0000 | (b >> 8 & 0xFF) << 24
    ),
    "shf.l.wrap.b32 %0, %1, %2, %3": lambda a, b, c: (b << 32 | a) << c % 32 >> 32,
    "shf.l.clamp.b32 %0, %1, %2, %3": lambda a, b, c: (b << 32 | a) << min(c, 32) >> 32,
    "shf.r.wrap.b32 %0, %1, %2, %3": lambda a, b, c: (b << 32 | a) >> c % 32,
    "shf.r.clamp.b32 %0, %1, %2, %3": lambda a, b, c: (b << 32 | a) >> min(c, 32),
    "bfi.b32 %0, %1, %2, 27, 12": lambda a, b, c: a << 27 | b & (1 << 27) - 1,
}


def test_bit_instructions_agree_with_integers_of_python():
    given = RNG.integers(0, 2**32, (3, 256), "u4")
    given[2, :64] = np.arange(64)
    operands = '"=r"(r) : "r"(a), "r"(b), "r"(c)'
    found = computed([("u32", f'asm("{what};" : {operands});') for what in WORDS], *given)
    for (what, f), y in zip(WORDS.items(), found, strict=True):
        wanted = [f(*v) % 2**32 for v in given.T.tolist()]
        np.testing.assert_array_equal(y, np.array(wanted, "u4"), what)


def drawn(kind: str, size: int = 256) -> np.ndarray:
    """Draw numbers of many magnitudes, so that sums lose digits."""
    v = RNG.standard_normal(size) * 2.0 ** RNG.integers(-12, 12, size)
    return v.astype(TYPES[kind][2])


def rounded(exact: list[Fraction], kind: str, mode: str) -> np.ndarray:
    """Round fractions that are neither 0 nor too large."""
    dtype = TYPES[kind][2]
    near = np.array([float(v) for v in exact]).astype(dtype)
    bits = near.view(f"i{near.itemsize}").astype("i8")
    bits = bits + np.outer([-1, 0, 1], np.where(bits >= 0, 1, -1))  # near, and its two neighbours
    around = bits.astype(f"i{near.itemsize}").view(dtype)
    wanted = []
    for v, three in zip(exact, around.T, strict=True):
        below = max(n for n in three if Fraction(float(n)) <= v)
        above = min(n for n in three if Fraction(float(n)) >= v)
        gap = (v - Fraction(float(below))) - (Fraction(float(above)) - v)
        is_even = below.view(f"u{below.itemsize}") % 2 == 0
        down = {"rm": True, "rp": False, "rz": v > 0, "rn": gap < 0 or (gap == 0 and is_even)}
        wanted.append(below if down[mode] else above)
    return np.array(wanted, dtype)


WHOLE = {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil}
EXACT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1 / a,
    "fma": lambda a, b, c: a * b + c,
    # A root is cut after 100 decimals. Roots with fewer decimals stay exact.
    "sqrt": lambda a: Fraction(math.isqrt(int(abs(a) * 10**200)), 10**100),
}


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("what", EXACT)
def test_arithmetic_is_rounded_as_the_instruction_says(what, kind):
    arrays = [drawn(kind) for _ in range(EXACT[what].__code__.co_argcount)]
    arrays = [np.abs(v) for v in arrays] if what == "sqrt" else arrays
    exact = [EXACT[what](*map(Fraction, map(float, v))) for v in zip(*arrays, strict=True)]
    found = run(kind, kind, [f"{what}.{mode}.{kind}" for mode in WHOLE], *arrays)
    for mode, y in zip(WHOLE, found, strict=True):
        np.testing.assert_array_equal(y, rounded(exact, kind, mode), mode)


def test_a_saturated_product_is_between_0_and_1_and_nan_becomes_0():
    a, b = np.array([(0.5, 0.25), (2, 3), (-2, 3), (np.inf, 0), (np.nan, 1)], "f4").T
    (found,) = run("f32", "f32", ["mul.sat.f32"], a.copy(), b.copy())
    np.testing.assert_array_equal(found, np.array([0.125, 1, 0, 0, 0], "f4"))


OF_HALVES = {what: EXACT[what] for what in ("add", "sub", "mul")} | {
    "fma.rn": EXACT["fma"],
    "min": lambda a, b: min(a, b),
    "max": lambda a, b: max(a, b),
    "neg": lambda a: -a,
    "abs": lambda a: abs(a),
}


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves_are_rounded_to_nearest_alone_and_in_pairs(kind):
    dtype = TYPES[kind][2]
    given = [RNG.uniform(*ends, 512).astype(dtype) for ends in ((-16, -8), (1, 7), (1, 7))]
    for what, exact in OF_HALVES.items():
        arrays = given[: exact.__code__.co_argcount]
        each = [exact(*map(Fraction, map(float, v))) for v in zip(*arrays, strict=True)]
        (alone,) = run(kind, kind, [f"{what}.{kind}"], *arrays)
        (pairs,) = run("u32", "u32", [f"{what}.{kind}x2"], *(v.view("u4") for v in arrays))
        for found in (alone, pairs.copy().view(dtype)):
            np.testing.assert_array_equal(found, rounded(each, kind, "rn"), what)
    a, b = (v.astype("f4") / 3 for v in given[:2])
    (pairs,) = run("u32", "f32", [f"cvt.rn.{kind}x2.f32"], a, b)
    pairs = pairs.copy().view(dtype).reshape(-1, 2)
    np.testing.assert_array_equal(pairs, np.stack([b, a], 1).astype(dtype))


@pytest.mark.parametrize(
    ("source", "targets"),
    [("f64", "f32 f16 bf16"), ("f32", "f16 bf16"), ("s64", "f32 f64"), ("u64", "f32 f64")],
)
def test_conversions_to_floating_point_round_once(source, targets):
    if source[0] == "f":
        v = drawn(source)
        v[:8] = 1 + np.array([2.0**-11, 2.0**-9, 3 * 2.0**-11, 3 * 2.0**-9] * 2) + 2.0**-40
    else:
        v = RNG.integers(1, np.iinfo(TYPES[source][2]).max, 256, TYPES[source][2])
    exact = [Fraction(n) for n in v.tolist()]
    for to in targets.split():
        (found,) = run(to, source, [f"cvt.rn.{to}.{source}"], v)
        np.testing.assert_array_equal(found, rounded(exact, to, "rn"), to)


@pytest.mark.parametrize("source", ["f64", "f32", "f16"])
@pytest.mark.parametrize("to", ["s64", "u64", "s32", "u32", "s16"])
def test_conversions_to_integers_clamp_to_their_limits(to, source):
    with np.errstate(over="ignore"):
        v = RNG.standard_normal(256) * 2.0 ** RNG.integers(-2, 70, 256)
        v = v.astype(TYPES[source][2])
    v[:6] = np.inf, -np.inf, 0.5, 1.5, -2.5, -0.0
    v[-1] = np.nan  # becomes 0 or, if either type has 64 bits, a 1 bit and then 0 bits
    limits = np.iinfo(TYPES[to][2])
    is_wide = source == "f64" or TYPES[to][2].itemsize == 8
    of_nan = (limits.min or limits.max // 2 + 1) if is_wide else 0
    found = run(to, source, [f"cvt.{mode}i.{to}.{source}" for mode in WHOLE], v)
    for round_, y in zip(WHOLE.values(), found, strict=True):
        wanted = [round_(n) if math.isfinite(n) else n for n in v[:-1].tolist()]
        wanted = [int(min(max(n, limits.min), limits.max)) for n in wanted]
        np.testing.assert_array_equal(y, np.array([*wanted, of_nan], TYPES[to][2]))


TINY = np.array([2.0**-130, -(2.0**-130), 2.0**-126, 1.5, np.nan, -0.0, -3.0, np.inf] * 4, "f4")


def test_numbers_are_flushed_or_saturated_if_the_instruction_says_so():
    flushed = np.where(np.abs(TINY) < 2.0**-126, np.copysign(np.float32(0), TINY), TINY)
    plain, found = run("f32", "f32", ["add.f32", "add.ftz.f32"], TINY, TINY)
    np.testing.assert_array_equal(plain, TINY * 2)
    np.testing.assert_array_equal(found, flushed * 2)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(flushed))
    (found,) = run("f64", "f32", ["cvt.ftz.f64.f32"], TINY)
    np.testing.assert_array_equal(found, flushed.astype("f8"))
    (found,) = run("f32", "f32", ["cvt.sat.f32.f32"], TINY)
    np.testing.assert_array_equal(found, np.clip(np.nan_to_num(TINY, nan=0, posinf=1), 0, 1))


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_comparisons_with_nan_are_those_of_numpy_and_min_returns_the_number(kind):
    values = np.meshgrid(*[[1, -2, np.nan, 0.0, -0.0, np.inf]] * 2)
    a, b = (v.ravel().astype(TYPES[kind][2]) for v in values)
    wanted = (a < b) | (a <= b) * 2 | (a == b) * 4 | (a != b) * 8 | ~(a >= b) * 16
    body = "r = (a < b) | (a <= b) * 2 | (a == b) * 4 | (a != b) * 8 | !(a >= b) * 16;"
    np.testing.assert_array_equal(computed([("s32", body)], a, b)[0], wanted)
    found = run(kind, kind, [f"min.{kind}", f"max.{kind}"], a, b)
    if kind == "f32":
        found += run(kind, kind, ["min.NaN.f32", "max.NaN.f32"], a, b)
    functions = np.fmin, np.fmax, np.minimum, np.maximum
    for y, of_numpy in zip(found, functions, strict=False):
        np.testing.assert_array_equal(y, of_numpy(a, b))


APPROXIMATE = {
    "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
}


def test_approximate_instructions_are_rounded_to_nearest():
    a = np.abs(drawn("f32"))[:128] / 32
    found = run("f32", "f32", [f"{what}.approx.f32" for what in APPROXIMATE], a)
    for (what, f), y in zip(APPROXIMATE.items(), found, strict=True):
        with np.errstate(over="ignore"):
            right = f(a.astype("f8")).astype("f4")
        np.testing.assert_array_equal(y, right, what)


FUNCTIONS = {
    "exp(a)": math.exp,
    "erfc(a)": math.erfc,
    "sqrt(fabs(a))": lambda a: math.sqrt(abs(a)),
    "rsqrt(fabs(a))": lambda a: 1 / math.sqrt(abs(a)),
    "tanh(a)": math.tanh,
    "1 / (1 + exp(-a))": lambda a: 1 / (1 + math.exp(-a)),
    "a > 0 ? a : -a": abs,
}


def test_functions_of_float64_agree_with_those_of_python():
    a = RNG.standard_normal(256) * 3
    found = computed([("f64", f"r = {what};") for what in FUNCTIONS], a)
    for (what, function), y in zip(FUNCTIONS.items(), found, strict=True):
        # CUDA promises a few units in the last place for erfc, the least accurate function.
        np.testing.assert_allclose(y, [function(v) for v in a], rtol=6 * 2.0**-52, err_msg=what)
