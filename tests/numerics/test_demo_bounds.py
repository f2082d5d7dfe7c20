# SPDX-License-Identifier: MIT
"""The bounds of `python -m cunorm demo`, which the package cannot take from the tests."""

import numpy as np
import pytest

from cunorm import reference
from cunorm.results import AddNorm
from tests.support import bounds, group_bounds
from tests.support.internals import (
    FLOAT32,
    GroupOracle,
    Oracle,
    demo_tolerance,
    group_operators_of,
    group_tolerance,
    operators_of,
    worst_error,
)
from tests.support.operands import NORMS, draw, parameters


@pytest.mark.parametrize("operator", operators_of(FLOAT32), ids=str)
def test_the_demos_bounds_are_those_of_the_tests_or_somewhat_wider(operator):
    dtype, most = "bfloat16" if operator.form == "Llama" else "float32", demo_tolerance.LARGEST_GATE
    rows = ("x", "residual", "dy", "d_residual", "gate")
    operands = {name: draw(name, (7, 48), dtype) for name in rows}
    operands |= parameters(NORMS["layer_norm"], 48, "float32")
    operands["gate"] = np.clip(2 * operands["gate"], -most, most)
    exact, rows = operator.forward(reference, operands), Oracle(operator, operands).rows
    grads = operator.backward(reference, operands, exact)
    stream = operands["d_residual"] if operator.has_residual else None
    demo = demo_tolerance.forward_bounds(rows, exact, dtype)
    demo |= demo_tolerance.backward_bounds(rows, grads, operands["dy"], stream)

    width = 48 if operator.base == "l2_norm" else 1
    told = {"center": operator.center, "c": operator.c, "eps": operator.eps / width}
    told |= operator.options(operands)
    given = [operands[n] if n in operator.parameters else None for n in ("weight", "bias")]
    residual = operands["residual"] if operator.has_residual else None
    x = exact.residual if operator.has_residual else operands["x"]
    forward = bounds.of_forward(operands["x"], *given, residual, **told)
    backward = bounds.of_backward(operands["dy"], x, *given, stream, **told)
    names = {"y", "rstd", "dx"} | {f"d{name}" for name in operator.parameters}
    names |= {"dgate"} if operator.has_gate else set()
    for name in names:
        held = forward if name in ("y", "rstd") else backward
        stored = dtype if name in ("y", "dx", "dgate") else "float32"
        ratio = demo[name][1] / held.bound(name, stored)
        assert 0.999 < ratio.min() <= ratio.max() < 8.0, name


@pytest.mark.parametrize("operator", group_operators_of(FLOAT32), ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demos_bounds_of_group_norms_are_those_of_the_tests_or_a_little_wider(operator, dtype):
    rows = {name: draw(name, (48, 40), dtype) for name in ("x", "dy")}
    operands = operator.taken(rows | parameters(NORMS["layer_norm"], 40, "float32"))
    exact, groups = operator.forward(reference, operands), GroupOracle(operator, operands).groups
    grads = operator.backward(reference, operands, exact)
    demo = group_tolerance.forward_bounds(groups, exact, dtype)
    demo |= group_tolerance.backward_bounds(groups, grads, operands["dy"])

    given = [operands["x"], operator.groups(operands), operands["weight"], operands["bias"]]
    told = {"eps": 1e-5, "channel_axis": operator.channel_axis, "activation": operator.activation}
    forward = group_bounds.of_group_forward(*given, **told)
    backward = group_bounds.of_group_backward(operands["dy"], *given, **told)
    assert demo.keys() == forward.errors.keys() | backward.errors.keys()
    for name, (_, bound) in demo.items():
        held = forward if name in forward.errors else backward
        ratio = bound / held.bound(name, dtype if name in ("y", "dx") else "float32")
        assert 0.999 < ratio.min() <= ratio.max() < 1.1, name


def test_a_missing_or_infinite_result_is_no_small_error():
    bounds = {"y": (np.array([[1.0, 2.0]]), np.array([[1e-6, 1e-6]]))}
    for wrong in (np.nan, np.inf, -np.inf):
        assert worst_error(AddNorm(np.float32([[1.0, wrong]])), bounds, ["y"]) == np.inf
    assert worst_error(AddNorm(np.float32([[1.0, 2.0]])), bounds, ["y"]) == 0.0
    assert worst_error(AddNorm(), bounds, ["y"]) == np.inf
