# SPDX-License-Identifier: MIT
"""An instruction returns the exact result, rounded once."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.softgpu.launching import cupy, launch

# For each type of PTX: the type in C++, the letter in inline PTX, and the dtype.
TYPES = {
    "f64": ("double", "d", np.dtype("f8")),
    "f32": ("float", "f", np.dtype("f4")),
    "f16": ("unsigned short", "h", np.dtype("f2")),
    "bf16": ("unsigned short", "h", np.dtype(ml_dtypes.bfloat16)),
    "s64": ("long long", "l", np.dtype("i8")),
    "u64": ("unsigned long long", "l", np.dtype("u8")),
    "s32": ("int", "r", np.dtype("i4")),
    "u32": ("unsigned", "r", np.dtype("u4")),
    "s16": ("short", "h", np.dtype("i2")),
    "u16": ("unsigned short", "h", np.dtype("u2")),
}
RNG = np.random.default_rng(3)
BEGINNING = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def _drawn_alike():
    """Make a test draw the same numbers, whatever ran before."""
    RNG.bit_generator.state = BEGINNING


def run(to: str, source: str, instructions: list[str], *arrays: np.ndarray) -> list[np.ndarray]:
    """Return the results, of type `to`, of instructions on the elements of arrays of type `source`.

    %0 is the result, %1 and so on are the elements; the last operand is their index.
    """
    (of_result, letter, dtype), (of_source, of_operands, _) = TYPES[to], TYPES[source]
    size, count = arrays[0].size, len(arrays)
    operands = ", ".join(f"%{k}" for k in range(count + 1))
    inputs = ", ".join(f'"{of_operands}"(p{k}[i])' for k in range(count))
    text = "unsigned long long* y" + "".join(f", const {of_source}* p{k}" for k in range(count))
    text += ") { int i = threadIdx.x;"
    for k, name in enumerate(instructions):
        name = name if "%" in name else f"{name} {operands}"
        text += f'{{ {of_result} r; asm volatile("{name};" : "={letter}"(r) : {inputs}, "r"(i));'
        text += f"*({of_result}*)(y + {k * size} + i) = r; }}"
    raw = [cupy.asarray(v.view("u2") if v.itemsize == 2 else v) for v in arrays]
    y = cupy.zeros((len(instructions), size), "u8")
    launch(text + "}", y, *raw, block=size)
    return [row.view(dtype)[:: 8 // dtype.itemsize] for row in y.get()]


INTEGERS = {
    "add": lambda a, b, n: a + b,
    "sub": lambda a, b, n: a - b,
    "mul.lo": lambda a, b, n: a * b,
    "mad.lo {} %0, %1, %2, %1": lambda a, b, n: a * b + a,
    "div": lambda a, b, n: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "rem": lambda a, b, n: abs(a) % abs(b) * (-1 if a < 0 else 1),
    "min": lambda a, b, n: min(a, b),
    "max": lambda a, b, n: max(a, b),
    "shr {} %0, %1, %3": lambda a, b, n: a >> n,
}
OF_SIGNED = {"neg {} %0, %1": lambda a, b, n: -a}
OF_BITS = {
    "and": lambda a, b, n: a & b,
    "or": lambda a, b, n: a | b,
    "xor": lambda a, b, n: a ^ b,
    "not {} %0, %1": lambda a, b, n: ~a,
    "shl {} %0, %1, %3": lambda a, b, n: a << n,
}
INSERT = {"bfi {} %0, %1, %2, 27, 12": lambda a, b, n: (a & 0xFFF) << 27 | b & ~(0xFFF << 27)}


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_integer_instructions_agree_with_integers_of_python(kind):
    dtype, bits = TYPES[kind][2], int(kind[1:])
    a, b = RNG.integers(0, 2**bits, (2, 256), "u8").astype(dtype)
    b[b == 0], b[200:] = 1, b[200:] >> bits // 2
    a[:2], b[:2] = np.iinfo(dtype).min, (-1 if kind[0] == "s" else 1)
    high = {"mul.hi": lambda a, b, n: a * b >> bits}
    tables = {kind: INTEGERS | high | (OF_SIGNED if kind[0] == "s" else {}), f"b{bits}": OF_BITS}
    tables[f"b{bits}"] = OF_BITS | (INSERT if bits > 16 else {})
    cases = []
    for suffix, table in tables.items():
        for name, f in table.items():
            base, _, rest = name.partition(" {}")
            cases.append((f"{base}.{suffix}{rest or ' %0, %1, %2'}", f))
    found = run(kind, kind, [name for name, _ in cases], a, b)
    for (name, f), y in zip(cases, found, strict=True):
        wanted = [f(*v) % 2**bits for v in zip(a.tolist(), b.tolist(), range(256), strict=True)]
        np.testing.assert_array_equal(y.view(f"u{bits // 8}"), np.array(wanted, "u8"), name)
    if bits < 64:
        wide = kind[0] + str(2 * bits)
        (y,) = run(wide, kind, [f"mul.wide.{kind} %0, %1, %2"], a, b)
        np.testing.assert_array_equal(y, a.astype(y.dtype) * b.astype(y.dtype))


def drawn(kind: str, size: int = 256) -> np.ndarray:
    """Draw numbers of many magnitudes, so that sums lose digits."""
    v = RNG.standard_normal(size) * 2.0 ** RNG.integers(-12, 12, size)
    return v.astype(TYPES[kind][2])


def rounded(exact: list[Fraction], kind: str, mode: str = "rn") -> np.ndarray:
    """Round fractions, neither 0 nor too large, to nearest, down (rm) or up (rp)."""
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
        is_below = {"rn": gap < 0 or (gap == 0 and is_even), "rm": True, "rp": False}
        wanted.append(below if is_below[mode] else above)
    return np.array(wanted, dtype)


EXACT = {
    "add.rn": lambda a, b: a + b,
    "sub.rn": lambda a, b: a - b,
    "mul.rn": lambda a, b: a * b,
    "div.rn": lambda a, b: a / b,
    "rcp.rn": lambda a: 1 / a,
    "fma.rn": lambda a, b, c: a * b + c,
    "fma.rm": lambda a, b, c: a * b + c,
    "fma.rp": lambda a, b, c: a * b + c,
    # A root is cut after 100 decimals. Roots with fewer decimals stay exact.
    "sqrt.rn": lambda a: Fraction(math.isqrt(int(abs(a) * 10**200)), 10**100),
}


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("what", EXACT)
def test_arithmetic_is_rounded_as_the_instruction_says(what, kind):
    arrays = [drawn(kind) for _ in range(EXACT[what].__code__.co_argcount)]
    arrays = [np.abs(v) for v in arrays] if "sqrt" in what else arrays
    exact = [EXACT[what](*map(Fraction, map(float, v))) for v in zip(*arrays, strict=True)]
    (found,) = run(kind, kind, [f"{what}.{kind}"], *arrays)
    np.testing.assert_array_equal(found, rounded(exact, kind, what[-2:]))


@pytest.mark.parametrize(
    ("source", "targets"),
    [("f64", "f32 f16 bf16"), ("f32", "f16 bf16"), ("f16", "f32"), ("bf16", "f32")]
    + [(kind, "f32 f64") for kind in ("s16", "u16", "s32", "u32", "s64", "u64")],
)
def test_conversions_to_floating_point_round_once(source, targets):
    if "f" in source:
        v = drawn(source)
        ties = 1 + np.array([2.0**-11, 2.0**-9, 3 * 2.0**-11, 3 * 2.0**-9])
        v[:12] = np.concatenate([ties - 2.0**-40, ties, ties + 2.0**-40]).astype(v.dtype)
    else:
        v = RNG.integers(1, np.iinfo(TYPES[source][2]).max, 256, TYPES[source][2])
    exact = [Fraction(n) for n in v.tolist()]
    for to in targets.split():
        mode = "" if source.endswith("f16") else ".rn"
        (found,) = run(to, source, [f"cvt{mode}.{to}.{source} %0, %1"], v)
        np.testing.assert_array_equal(found, rounded(exact, to), to)


def test_integers_are_cut_or_extended_by_their_sign():
    for source in ("s16", "u16", "s32", "u32", "s64"):
        v = RNG.integers(0, 2**64, 256, "u8").astype(TYPES[source][2])
        for to in ("s16", "u16", "s32", "u32", "s64", "u64"):
            (found,) = run(to, source, [f"cvt.{to}.{source} %0, %1"], v)
            np.testing.assert_array_equal(found, v.astype(TYPES[to][2]), f"{source} to {to}")


def test_a_float64_is_converted_to_an_int64_toward_0_within_its_limits():
    v = RNG.standard_normal(256) * 2.0 ** RNG.integers(-2, 70, 256)
    v[:5] = np.inf, -np.inf, 1.5, -2.5, np.nan  # a NaN becomes a 1 bit and then 0 bits
    wanted = [min(max(math.trunc(n), -(2**63)), 2**63 - 1) for n in v[5:].tolist()]
    (found,) = run("s64", "f64", ["cvt.rzi.s64.f64 %0, %1"], v)
    assert found.tolist() == [2**63 - 1, -(2**63), 1, -2, -(2**63), *wanted]


def test_floats_are_rounded_to_whole_numbers():
    v = np.append(drawn("f32"), np.array([0.5, 1.5, -2.5, np.inf], "f4"))
    for mode, of_numpy in {"rni": np.rint, "rzi": np.trunc}.items():
        (found,) = run("f32", "f32", [f"cvt.{mode}.f32.f32 %0, %1"], v)
        np.testing.assert_array_equal(found, of_numpy(v), mode)


@pytest.mark.parametrize("source", ["f32", "f64"])
def test_floats_become_the_nearest_integer_within_the_limits_of_its_type(source):
    v = np.append(drawn(source), drawn(source) * 2.0**20).astype(TYPES[source][2])
    v[:200] = np.arange(-140, 260)[:200] + 0.5
    v[200:206] = 127.5, -128.5, np.inf, -np.inf, 1e30, np.nan
    for to, sat in {"s8": ".sat", "s32": ""}.items():
        limits = np.iinfo(to.replace("s", "int"))
        wanted = np.clip(np.rint(v.astype("f8")), limits.min, limits.max)
        wanted[205] = 0 if source == "f32" else limits.min
        asked = [f"cvt.rni{ftz}{sat}.{to}.{source} %0, %1" for ftz in ("", ".ftz")]
        for y in run("s32", source, asked[: 1 + (source == "f32")], v):
            np.testing.assert_array_equal(y, wanted, to)


TINY = np.array([2.0**-130, -(2.0**-130), 2.0**-126, 1.5, np.nan, -0.0, -3.0, np.inf] * 4, "f4")


def test_numbers_are_flushed_or_saturated_if_the_instruction_says_so():
    flushed = np.where(np.abs(TINY) < 2.0**-126, np.copysign(np.float32(0), TINY), TINY)
    plain, found = run("f32", "f32", ["add.f32", "add.ftz.f32"], TINY, TINY)
    np.testing.assert_array_equal(plain, TINY * 2)
    np.testing.assert_array_equal(found, flushed * 2)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(flushed))
    (found,) = run("f64", "f32", ["cvt.ftz.f64.f32 %0, %1"], TINY)
    np.testing.assert_array_equal(found, flushed.astype("f8"))
    (found,) = run("f32", "f64", ["cvt.rn.ftz.f32.f64 %0, %1"], TINY.astype("f8"))
    np.testing.assert_array_equal(found, flushed)
    (found,) = run("f32", "f32", ["cvt.sat.f32.f32 %0, %1"], TINY)
    np.testing.assert_array_equal(found, np.clip(np.nan_to_num(TINY, nan=0, posinf=1), 0, 1))
    a, b = np.array([(0.5, 0.25), (2, 3), (-2, 3), (np.inf, 0), (np.nan, 1)], "f4").T
    (found,) = run("f32", "f32", ["mul.sat.f32"], a.copy(), b.copy())
    np.testing.assert_array_equal(found, np.array([0.125, 1, 0, 0, 0], "f4"))


COMPARISONS = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "eq": lambda a, b: a == b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "neu": lambda a, b: a != b,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "geu": lambda a, b: ~(a < b),
    "gtu": lambda a, b: ~(a <= b),
    "leu": lambda a, b: ~(a > b),
    "ltu": lambda a, b: ~(a >= b),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_comparisons_with_nan_are_those_of_numpy_and_min_returns_the_number(kind):
    values = np.meshgrid(*[[1, -2, np.nan, 0.0, -0.0, np.inf]] * 2)
    a, b = (v.ravel().astype(TYPES[kind][2]) for v in values)
    asked = [
        f"{{.reg .pred p; setp.{name}.{kind} p, %1, %2; selp.u32 %0, 1, 0, p;}}"
        for name in COMPARISONS
    ]
    found = run("u32", kind, asked, a, b)
    for (name, of_numpy), y in zip(COMPARISONS.items(), found, strict=True):
        np.testing.assert_array_equal(y, of_numpy(a, b), name)
    found = run(kind, kind, [f"{name}.{kind}" for name in ("min", "max", "copysign")], a, b)
    for y, wanted in zip(found, (np.fmin(a, b), np.fmax(a, b), np.copysign(b, a)), strict=True):
        np.testing.assert_array_equal(y, wanted)


def test_min_and_max_return_nan_for_a_nan_if_the_instruction_says_so():
    """Compare bits: a NaN is 0x7fffffff whatever the operand's bits, and -0 is less than 0."""
    some = [1, -2, np.nan, -np.nan, 0.0, -0.0, np.inf, -np.inf, 2.0**-130, -(2.0**-130)]
    a, b = (v.ravel() for v in np.meshgrid(*[np.array(some, "f4")] * 2))
    for ftz in ("", ".ftz"):
        least = np.float32(2.0**-126 if ftz else 0)
        flushed = [np.where(np.abs(v) < least, np.copysign(np.float32(0), v), v) for v in (a, b)]
        pairs = np.transpose(flushed)
        found = run("f32", "f32", [f"{f.__name__}{ftz}.NaN.f32" for f in (min, max)], a, b)
        for f, y in zip((min, max), found, strict=True):
            wanted = [f(two, key=lambda v: (v, np.copysign(1, v))) for two in pairs]
            bits = np.array(wanted, "f4").view("u4")
            bits[np.isnan(a) | np.isnan(b)] = 0x7FFFFFFF
            np.testing.assert_array_equal(y.view("u4"), bits, f"{f.__name__}{ftz}")


APPROXIMATE = {
    "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "ex2": np.exp2,
}


def test_approximate_instructions_are_rounded_to_nearest():
    a = np.abs(drawn("f32"))[:128] / 32
    found = run("f32", "f32", [f"{what}.approx.f32 %0, %1" for what in APPROXIMATE], a)
    for (what, f), y in zip(APPROXIMATE.items(), found, strict=True):
        with np.errstate(over="ignore"):
            right = f(a.astype("f8")).astype("f4")
        np.testing.assert_array_equal(y, right, what)


def test_the_largest_divisors_of_an_approximate_division_give_0():
    a, b = np.array(
        [(3, 2.0**127), (-3, 2.0**127), (np.inf, 2.0**127), (1, 4), (1, np.inf)], "f4"
    ).T
    (found,) = run("f32", "f32", ["div.approx.f32"], a.copy(), b.copy())
    np.testing.assert_array_equal(found, np.array([0, 0, np.nan, 0.25, 0], "f4"))
