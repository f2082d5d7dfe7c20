# SPDX-License-Identifier: MIT
"""The bounds hold for arithmetic done well and fail for each way of doing it wrong.

The kernels here are those of `arithmetic`; a way of doing it wrong is one of those that it knows by
name, or to compute something else than was asked for.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cunorm.reference.activations import ACTIVATIONS
from tests.support.numpy_kernels import Kernel, group, row
from tests.support.operands import DTYPES, at

# --- kernels done well ----------------------------------------------------------------------------


def drawn_row(seed: int) -> Kernel:
    """Draw everything there is to choose, and the operands."""
    rng = np.random.default_rng(seed)
    dtype, *others = (DTYPES[name] for name in rng.choice([*DTYPES, "float32", "bfloat16"], 4))
    groups = int(rng.choice([1, 1, 2, 4]))
    width, rows = groups * int(rng.choice([1, 2, 3, 33, 1000])), int(rng.choice([1, 3, 20]))
    far = float(rng.choice([0.0, 100.0, 1e4])) if dtype.itemsize >= 4 else 0.0

    def operand(shape, dtype, mean=0.0, deviation=1.0):
        return (mean + deviation * rng.standard_normal(shape)).astype(dtype)

    def maybe(array):
        return array if rng.random() < 0.7 else None

    operands = {
        "x": operand((rows, width), dtype, far),
        "weight": maybe(operand(width, others[1], mean=1.0, deviation=0.5)),
        "bias": maybe(operand(width, others[1])),
        "residual": maybe(operand((rows, width), others[2])),
        "dy": operand((rows, width), dtype),
        "d_residual": maybe(operand((rows, width), others[2])),
    }
    told = {
        "eps": float(rng.choice([1e-6, 1e-3])),
        "c": [None, 3.0][rng.integers(2)],
        "center": bool(rng.integers(2)),
        "groups": groups,
        "round_before_weight": bool(rng.random() < 0.4),
        "gate": maybe(operand((rows, width), others[0], deviation=float(rng.choice([1.0, 5.0])))),
        "gate_activation": str(rng.choice(list(ACTIVATIONS))),
        "gate_position": str(rng.choice(["pre", "post"])),
        "weight_offset": 0.0 if operands["weight"] is None else float(rng.choice([0.0, 1.0])),
    }
    if far == 1e4 and told["gate"] is not None and told["gate_position"] == "pre":
        told["gate"] = None  # a far mean is one of p, not of s
    return Kernel(operands, told)


def drawn_group(seed: int) -> Kernel:
    rng = np.random.default_rng(seed)
    dtype = str(rng.choice([*DTYPES, "float32", "float32"]))
    far = DTYPES[dtype].itemsize >= 4 and rng.random() < 0.6
    groups, channel_axis = int(rng.choice([1, 2, 3, 4])), int(rng.choice([-1, 1]))
    channels, samples = groups * int(rng.choice([1, 2, 3, 8])), int(rng.choice([1, 2, 5]))
    positions = [int(size) for size in rng.choice([1, 2, 3, 7, 31], rng.integers(3))]
    shape = [samples, *positions]
    shape.insert(1 if channel_axis == 1 else len(shape), channels)
    told = {
        "mean": float(rng.choice([1.0, 100.0, 1e4])) if far else 0.0,
        "activation": [None, *sorted(set(ACTIVATIONS) - {"swish"})][rng.integers(8)],
        "eps": float(rng.choice([1e-5, 1e-3])),
    }
    absent = [name for name in ("weight", "bias") if rng.random() < 0.3]
    kernel = group(dtype, shape=shape, num_groups=groups, channel_axis=channel_axis, **told)
    return Kernel(kernel.operands | dict.fromkeys(absent), kernel.told)


@pytest.mark.parametrize("first", range(0, 200, 50))
@pytest.mark.parametrize("draw", [drawn_row, drawn_group])
def test_arithmetic_done_well_is_within_the_bounds(draw, first):
    for seed in range(first, first + 50):
        kernel = draw(seed)
        with at(f"seed {seed}"):
            worst = kernel.check_both()
        given = {name for name, array in kernel.operands.items() if array is not None}
        expected = {"y", "rstd", "dx"} | {f"d{name}" for name in given & {"weight", "bias"}}
        if kernel.is_row:
            expected |= {"dresidual"} | given & {"residual"}
            expected |= {"dgate"} if kernel.told["gate"] is not None else set()
        if not kernel.is_row or kernel.told["center"]:
            expected |= {"mean"}
        assert set(worst) == expected


WELL = {
    "wide rows": partial(row, width=20000, rows=4, gate=0, center=True, mean=1e4),
    "many rows": partial(row, width=3, rows=10_000, gate=0, center=True),
    "wide groups": partial(group, shape=(2, 64, 64, 8), num_groups=1, mean=1e4, activation="silu"),
    "wider groups": partial(group, shape=(8, 1, 20000), num_groups=1, activation="gelu"),
    "narrow groups, all over relu's corner": partial(
        group, shape=(3000, 3, 4), mean=1e6, activation="relu"
    ),
}


@pytest.mark.parametrize("make", WELL.values(), ids=WELL)
def test_arithmetic_done_well_is_within_the_bounds_of_extreme_shapes(make):
    make().check_both()


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu_tanh"])
@pytest.mark.parametrize("value", [1 / 3, 1e4 + 0.1])
def test_arithmetic_done_well_is_within_the_bounds_of_constant_groups(value, activation):
    kernel = group(activation=activation)
    kernel.operands["x"][:2] = value
    kernel.check_both()


# --- and done wrong -------------------------------------------------------------------------------

CENTER, PRE, NARROW = {"center": True}, {"gate_position": "pre"}, {"dtype": "bfloat16"}
STREAM = NARROW | {"stream": "float32", "round_before_weight": True}
PLAIN, FAR = {"gate": 0}, {"mean": 1e4}
SILU, RELU, GELU = ({"activation": name} for name in ("silu", "relu", "gelu"))
BOTH = ("forward", "backward")
WRONG = [  # of which norm, told what, in which direction, which way
    *((row, PLAIN | CENTER | FAR, (d,), "mean is not corrected") for d in BOTH),
    *((group, told, ("forward",), "mean is not corrected") for told in (FAR, FAR | SILU)),
    *((group, told, ("backward",), "mean is not corrected") for told in (FAR, FAR | SILU)),
    (group, FAR | {"shape": (2, 3, 4)}, ("backward",), "mean is not corrected"),
    (row, PLAIN | CENTER | {"mean": 100.0}, BOTH[:1], "variance is E[x*x] - E[x]**2"),
    (group, {"mean": 100.0}, BOTH[:1], "variance is E[x*x] - E[x]**2"),
    (row, PLAIN | CENTER, BOTH, "variance divides by d - 1"),
    *((group, told, BOTH[:1], "variance divides by d - 1") for told in ({}, SILU)),
    *((make, PLAIN if make is row else {}, BOTH[:1], {"eps": 0.0}) for make in (row, group)),
    (row, PLAIN | {"c": 3.0}, BOTH, {"c": None}),
    (row, PLAIN | {"c": 3.0, "groups": 4}, BOTH, {"c": 1.5}),  # as if of the whole width
    *((make, {}, BOTH[:1], "rstd has half its bits") for make in (row, group)),
    (row, NARROW | PLAIN, BOTH[:1], "norm reads the unrounded sum"),
    *((row, told, BOTH, {"gate": None}) for told in ({}, PRE)),
    (row, {}, BOTH, {"gate_position": "pre"}),
    (row, PRE, BOTH, {"gate_position": "post"}),
    *((row, told, BOTH, {"gate_activation": "sigmoid"}) for told in ({}, PRE)),
    (row, {"gate_activation": "gelu"}, BOTH, "gelu is from 1 + erf"),
    (row, {"gate_activation": "gelu_tanh"}, BOTH, "gelu_tanh lacks its cube"),
    *((row, told | {"weight_offset": 1.0}, BOTH, {"weight_offset": 0.0}) for told in ({}, STREAM)),
    (row, NARROW, BOTH, {"round_before_weight": True}),
    (row, STREAM, BOTH, {"round_before_weight": False}),
    (row, STREAM, BOTH[1:], {"x_dtype": np.float32}),  # rounded as the stream is
    *((row, t, BOTH[1:], "g' lacks a term") for t in ({}, PRE, {"gate_activation": "gelu"})),
    *((group, told, BOTH[1:], "g' lacks a term") for told in (SILU, GELU, SILU | FAR)),
    (row, {"gate_activation": "tanh"}, BOTH[1:], "tanh' is 1 - tanh**2"),
    (group, {"activation": "tanh", "spread": 5.0}, BOTH[1:], "tanh' is 1 - tanh**2"),
    (row, {}, BOTH[1:], "dn is not gated"),
    (row, {}, BOTH[1:], "sums are not gated"),
    (row, PRE, BOTH[1:], "d_residual is gated"),
    (row, PRE, BOTH[1:], {"d_residual": None}),
    *((row, told | {"groups": 4}, BOTH[1:], "no mean(r * dr)") for told in (PLAIN, PRE)),
    *((row, told | CENTER, BOTH[1:], "no mean(dr)") for told in (PLAIN, PRE)),
    *((group, told, BOTH[1:], "no mean(r * dr)") for told in ({}, SILU)),
    *((group, told, BOTH[1:], "no mean(dr)") for told in ({}, SILU)),
    (row, {}, BOTH[1:], {"bias": None}),
    (row, {}, BOTH[1:], "dgate has y for n"),
    (row, PLAIN | {"c": 3.0}, BOTH[1:], "dweight without k"),
    *((m, NARROW, BOTH[1:], "sums are kept in the parameter's dtype") for m in (row, group)),
    *((make, NARROW, BOTH[1:], "a sum misses a term") for make in (row, group)),
    *((make, NARROW, BOTH, "rounded twice") for make in (row, group)),
    *((group, t, BOTH, "cut off instead of rounded") for t in (NARROW, SILU | NARROW)),
    *((group, told, BOTH, {"activation": None}) for told in (SILU, RELU)),
    (group, SILU, BOTH, {"activation": "sigmoid"}),
    (group, GELU | {"spread": 3.0}, BOTH[:1], "gelu is from 1 + erf"),
    (group, {"activation": "gelu_tanh"}, BOTH, "gelu_tanh lacks its cube"),
    (group, SILU | NARROW, BOTH[:1], "n is rounded before phi"),
    (group, {"mean": 300.0}, BOTH[1:], "sums are about 0"),
    *((group, told, BOTH[1:], "phi' is that of y") for told in (SILU, {"activation": "tanh"})),
    *(
        (group, told, BOTH[1:], "phi' has the mean off by an ulp")
        for told in (SILU | FAR, SILU | {"mean": 100.0}, RELU | {"mean": 1e5})
    ),
]


def label(value):
    if callable(value):
        return value.__name__
    if isinstance(value, dict):
        return ",".join(f"{name}={v}" for name, v in value.items()) or "plain"
    return value if isinstance(value, str) else "+".join(value)


@pytest.mark.parametrize(("make", "told", "directions", "way"), WRONG, ids=label)
def test_bounds_catch(make, told, directions, way):
    kernel = make(**told)
    kernel.check_both()
    changed = {"wrong": way} if isinstance(way, str) else way
    for direction in directions:
        result = getattr(kernel, direction)(**changed)
        with pytest.raises(AssertionError, match="times the bound"):
            getattr(kernel, f"check_{direction}")(result)


CASES = {
    "row": partial(row, rows=2, width=64, center=True),
    "pre-gate": partial(row, rows=2, width=64, **PRE),
    "rounded": partial(row, rows=2, width=64, **STREAM),
    "group": partial(group, shape=(2, 8, 6, 8)),
    "bfloat16 group": partial(group, shape=(2, 8, 6, 8), **SILU, **NARROW),
    "channels first": partial(group, shape=(2, 8, 6, 8), channel_axis=1),
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_bounds_catch_an_error_in_any_element_of_any_field(make):
    kernel = make()
    for direction in BOTH:
        result, check = getattr(kernel, direction)(), getattr(kernel, f"check_{direction}")
        worst = check(result)
        for name in worst:
            exact = getattr(result, name).astype(np.float64)
            for index in np.random.default_rng(0).permutation(exact.size)[:10]:
                off = exact.copy()
                off.flat[index] += 1e-2 * np.abs(exact).max()
                off = off.astype(result.residual.dtype) if name == "residual" else off
                with pytest.raises(AssertionError, match=f"^{name}\\["):
                    check(result._replace(**{name: off}))
        assert check(result._replace(**dict.fromkeys(worst))) == {}


def test_a_result_that_does_not_apply_is_refused():
    kernel = row(rows=2, width=8, gate=0)
    kernel.operands |= {"residual": None, "weight": None, "bias": None}
    f, grads = kernel.forward(), kernel.backward()
    for name in ("mean", "residual"):
        with pytest.raises(AssertionError, match=f"{name} does not apply"):
            kernel.check_forward(f._replace(**{name: f.y}))
    for name in ("dgate", "dweight", "dbias"):
        with pytest.raises(AssertionError, match=f"{name} does not apply"):
            kernel.check_backward(grads._replace(**{name: grads.dx}))
