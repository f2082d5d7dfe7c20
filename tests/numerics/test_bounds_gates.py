# SPDX-License-Identifier: MIT
"""The bounds with gates, groups, offsets and rounding before weight: for good kernels, not bad."""

from __future__ import annotations

import numpy as np
import pytest

from cunorm import reference
from cunorm.reference.activations import ACTIVATIONS
from cunorm.results import NormForward
from tests.support.arithmetic import backward, forward
from tests.support.bounds import check_backward, check_forward
from tests.support.operands import DTYPES, at

BFLOAT16 = DTYPES["bfloat16"]

# --- kernels done well ----------------------------------------------------------------------------


def draw_case(seed):
    """Draw everything there is to choose, and the operands; return them by name."""
    rng = np.random.default_rng(seed)
    dtype, *others = (DTYPES[name] for name in rng.choice([*DTYPES, "float32", "bfloat16"], 4))
    groups = int(rng.choice([1, 1, 2, 4]))
    width = groups * int(rng.choice([1, 2, 33, 1000]))
    rows = int(rng.choice([1, 3, 20]))
    far = 100.0 if dtype.itemsize >= 4 and rng.random() < 0.3 else 0.0

    def operand(shape, dtype, mean=0.0, deviation=1.0):
        return (mean + deviation * rng.standard_normal(shape)).astype(dtype)

    def maybe(array):
        return array if rng.random() < 0.7 else None

    options = {
        "eps": float(rng.choice([1e-6, 1e-3])),
        "c": [None, 3.0][rng.integers(2)],
        "center": bool(rng.integers(2)),
        "groups": groups,
        "round_before_weight": bool(rng.random() < 0.4),
        "gate": maybe(operand((rows, width), others[0], deviation=float(rng.choice([1.0, 5.0])))),
        "gate_activation": str(rng.choice(list(ACTIVATIONS))),
        "gate_position": str(rng.choice(["pre", "post"])),
    }
    weight = maybe(operand(width, others[1], mean=1.0, deviation=0.5))
    options["weight_offset"] = 0.0 if weight is None else float(rng.choice([0.0, 1.0]))
    return {
        "x": operand((rows, width), dtype, far),
        "weight": weight,
        "bias": maybe(operand(width, others[1])),
        "residual": maybe(operand((rows, width), others[2])),
        "dy": operand((rows, width), dtype),
        "d_residual": maybe(operand((rows, width), others[2])),
        "options": options,
    }


def run(case):
    """Run the arithmetic on a case and hold it to the bounds; return what share of them it took."""
    x, weight, bias, residual = (case[name] for name in ("x", "weight", "bias", "residual"))
    operands, options = (x, weight, bias, residual), case["options"]
    f = forward(*operands, **options)
    worst = check_forward(f, *operands, **options)
    s = x if residual is None else f.residual
    operands = (case["dy"], s, weight, bias, case["d_residual"])
    grads = backward(*operands, x_dtype=x.dtype, **options)
    return worst | check_backward(grads, *operands, x_dtype=x.dtype, **options)


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_a_good_kernel_is_within_the_bounds(first):
    for seed in range(first, first + 50):
        case = draw_case(seed)
        with at(f"seed {seed}"):
            worst = run(case)
        options = case["options"]
        expected = {"y", "rstd", "dx", "dresidual"} | ({"mean"} if options["center"] else set())
        expected |= {"dgate"} if options["gate"] is not None else set()
        expected |= {name for name in ("residual",) if case[name] is not None}
        expected |= {f"d{name}" for name in ("weight", "bias") if case[name] is not None}
        assert set(worst) == expected


# --- and done wrong -------------------------------------------------------------------------------


def a_case(dtype, stream_dtype=None, rows=60, width=512, **options):
    rng = np.random.default_rng(0)
    names = ("x", "residual", "dy", "d_residual", "gate")
    case = {name: rng.standard_normal((rows, width)).astype(DTYPES[dtype]) for name in names}
    for name in ("weight", "bias"):
        case[name] = (1 + rng.standard_normal(width)).astype(DTYPES[dtype])
    for name in ("residual", "d_residual"):
        case[name] = case[name].astype(DTYPES[stream_dtype or dtype])
    options = {"eps": 1e-6, "gate": 2 * case.pop("gate"), **options}
    return case | {"options": options}


NARROW = {"dtype": "bfloat16", "stream_dtype": "float32", "round_before_weight": True}
PRE = {"gate_position": "pre"}
OFFSET = {"weight_offset": 1.0}
WRONG = [
    ("gate is left out", {}),
    ("gate is left out", PRE),
    ("gate is on the other side", {}),
    ("gate is on the other side", PRE),
    ("activation is another", {}),
    ("activation is another", PRE),
    ("g is half", {}),
    ("g is half", PRE),
    ("gelu is from 1 + erf", {"gate_activation": "gelu"}),
    ("gelu_tanh lacks its cube", {"gate_activation": "gelu_tanh"}),
    ("groups share a statistic", {"groups": 4}),
    ("all groups have the first one's weight", {"groups": 4}),
    ("k is of the whole width", {"groups": 4, "c": 3.0}),
    ("offset is not added", OFFSET),
    ("offset is not added", OFFSET | NARROW),
    ("rounding before weight is otherwise", {"dtype": "bfloat16"}),
    ("rounding before weight is otherwise", NARROW),
    ("rounded as the stream is", NARROW),
]
WRONG_BACKWARD = [
    ("g' lacks a term", {}),
    ("g' lacks a term", PRE),
    ("g' lacks a term", {"gate_activation": "gelu"}),
    ("tanh' is 1 - tanh**2", {"gate_activation": "tanh"}),
    ("dn is not gated", {}),
    ("sums are not gated", {}),
    ("d_residual is gated", PRE),
    ("no d_residual", PRE),
    ("no mean(r * dr)", PRE | {"groups": 4}),
    ("no mean(dq)", PRE | {"center": True}),
    ("dgate forgets bias", {}),
    ("dgate has y for n", {}),
    ("dgate is of the other group", {"groups": 2}),
]


def label(value):
    return value if isinstance(value, str) else "+".join(value)


@pytest.mark.parametrize(("wrong", "told"), WRONG, ids=label)
def test_bounds_catch_a_norm_where(wrong, told):
    case = a_case(**{"dtype": "float32", **told})
    run(case)
    x, options = case["x"], case["options"]
    operands = (x, case["weight"], case["bias"], case["residual"])
    with pytest.raises(AssertionError):
        check_forward(forward(*operands, **options, wrong=wrong), *operands, **options)
    check_backward_notices(case, wrong)


@pytest.mark.parametrize(("wrong", "told"), WRONG_BACKWARD, ids=label)
def test_bounds_catch_a_backward_where(wrong, told):
    case = a_case(**{"dtype": "float32", **told})
    run(case)
    check_backward_notices(case, wrong)


def check_backward_notices(case, wrong):
    operands = [case[name] for name in ("dy", "residual", "weight", "bias", "d_residual")]
    options = case["options"] | {"x_dtype": case["x"].dtype}
    with pytest.raises(AssertionError):
        check_backward(backward(*operands, **options, wrong=wrong), *operands, **options)


@pytest.mark.parametrize("told", [{}, PRE, {"groups": 4}, NARROW], ids=label)
def test_bounds_catch_an_error_in_any_element_of_dgate(told):
    case = a_case(**{"dtype": "float32", "rows": 2, "width": 64, **told})
    operands = [case[name] for name in ("dy", "residual", "weight", "bias", "d_residual")]
    options = case["options"] | {"x_dtype": case["x"].dtype}
    grads = backward(*operands, **options)
    check_backward(grads, *operands, **options)
    for index in np.ndindex(grads.dgate.shape):
        off = grads.dgate.astype(np.float64)
        off[index] += 1e-2 * np.abs(off).max()
        with pytest.raises(AssertionError, match=r"^dgate\["):
            check_backward(grads._replace(dgate=off), *operands, **options)


# --- ties, and rows of different sizes ------------------------------------------------------------


@pytest.mark.parametrize("position", ["pre", "post"])
def test_a_kernel_may_round_to_either_side_of_a_tie_but_not_otherwise(position):
    rng = np.random.default_rng(0)
    x, gate = (rng.standard_normal((200, 1000)).astype(BFLOAT16) for _ in range(2))
    weight = rng.standard_normal(1000).astype(BFLOAT16)
    options = {"eps": 1e-6, "gate_position": position, "gate": gate}
    pre = options if position == "pre" else {"eps": 1e-6}
    kr = reference.normalize_forward(x, **pre).y
    g = 1.0 if position == "pre" else ACTIVATIONS["silu"].value(gate.astype(np.float64))
    nearest = reference.round_to(kr, BFLOAT16).astype(np.float64)
    other = reference.round_to(2 * kr - nearest, BFLOAT16).astype(np.float64)  # if a tie is near
    to_tie = np.where(other == nearest, np.nan, np.abs((nearest + other) / 2 - kr))

    def check(other_side):
        y = np.where(other_side, other, nearest) * weight.astype(np.float64) * g
        y = NormForward(y.astype(np.float32))
        return check_forward(y, x, weight, None, round_before_weight=True, **options)

    near, far = to_tie < 2.0**-22 * np.abs(kr), to_tie > 1e-4
    assert min(np.count_nonzero(near), np.count_nonzero(far)) > 10
    check(near)
    for index in np.argwhere(far)[:20]:
        one = np.zeros(x.shape, bool)
        one[tuple(index)] = True
        with pytest.raises(AssertionError, match=r"1 of 200000 elements"):
            check(one)


def test_each_group_is_held_to_its_own_size():
    case = a_case("float32", groups=2, gate_position="pre", rows=4, width=64)
    for name in ("weight", "bias"):
        case[name][:32] *= np.float32(1e-4)
    x, weight, bias, residual = (case[name] for name in ("x", "weight", "bias", "residual"))
    f = forward(x, weight, bias, residual, **case["options"])
    off = f.y.copy()
    off[:, 0] += np.float32(1e-6) * np.abs(f.y).max()  # little in one group, much in the other
    with pytest.raises(AssertionError, match=r"^y\[., 0\]"):
        check_forward(f._replace(y=off), x, weight, bias, residual, **case["options"])
    off = f.y.copy()
    off[:, -1] += np.float32(1e-7) * np.abs(f.y).max()
    check_forward(f._replace(y=off), x, weight, bias, residual, **case["options"])


def test_where_a_post_gate_is_small_so_is_the_bound():
    case = a_case("float32", rows=4, width=64)
    case["options"]["gate"][:, 0] = -12.0
    x, weight, bias, residual = (case[name] for name in ("x", "weight", "bias", "residual"))
    f = forward(x, weight, bias, residual, **case["options"])
    check_forward(f, x, weight, bias, residual, **case["options"])
    f.y[:, 0] += np.float32(1e-9) * np.abs(f.y).max()
    with pytest.raises(AssertionError, match=r"^y\[., 0\]"):
        check_forward(f, x, weight, bias, residual, **case["options"])


def test_dgate_without_a_gate_is_refused():
    case = a_case("float32", rows=2, width=8, gate=None)
    operands = [case[name] for name in ("dy", "x", "weight", "bias")]
    grads = backward(*operands, **case["options"])
    check_backward(grads, *operands, **case["options"])
    with pytest.raises(AssertionError, match="dgate"):
        check_backward(grads._replace(dgate=grads.dx), *operands, **case["options"])
