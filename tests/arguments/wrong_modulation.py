# SPDX-License-Identifier: MIT
"""The table of wrong input around parameters that vary over rows and gates on the branch."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from cunorm import GroupNormGrads, NormGrads
from tests.arguments.wrong_input import (
    DTYPES,
    EXPAND,
    HINT,
    LIKE_X,
    NO_ARRAY,
    NO_GATE,
    OF_LEAD,
    ROWS,
    Cases,
    hint_of,
    shaped,
)
from tests.support.calls import BACKWARDS, GROUP_NORMS, functions_taking
from tests.support.refused import Table, each

PLAIN = ("rms_norm", "layer_norm", "normalize")
GATED = functions_taking("gate_position")
WITH_BRANCH = [name for name in GATED if name not in PLAIN]
BRANCHED = functions_taking("branch")
BRANCH = {"gate_position": "branch"}
OTHER_BRANCH = "a branch is what add_{} adds to the stream"
NO_BRANCH = "branch is given, expected None: there is no gate on the branch"
LACKS_BRANCH = (
    "branch is None, expected the x that the forward added to the stream, as gate is in needs"
)
EXPANDED = f", or {EXPAND.removeprefix(': ')}"
MAY_BE_1 = ": each axis before the row, and the whole row, may be 1"
ALTERNATE = (
    "{} has shape (2, 1, 2, 1, 8), whose axes of 1 alternate too often with others, expected at "
    "most three runs of axes: expand it to (2, 3, 2, 3, 8)"
)
APART = (
    "weight (2, 1, 1, 1, 1, 8) and bias (1, 1, 2, 1, 1, 8) and gate (1, 1, 1, 1, 2, 8) are shared "
    "along different axes of x, (2, 2, 2, 2, 2, 8), expected at most two runs of axes along "
    "which one of them has several rows"
)
OF_X = ("x", "dy", "residual", "gate", "d_residual", "branch")


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def like_x(*shape: int) -> dict[str, Any]:
    """Return all operands of x's shape, and the statistics of its rows."""
    return dict.fromkeys(OF_X, ones(*shape)) | dict.fromkeys(("mean", "rstd"), ones(*shape[:-1]))


def parameters() -> Cases:
    """Yield errors for leading axes that are neither 1 nor x's, and for more axes than x has."""
    yield from shaped(
        ROWS, "weight bias", [(4, 8), (1, 5, 8), (5, 5, 8)], f"(8,){OF_LEAD.format((5,))}"
    )
    three, apart = like_x(2, 3, 8), like_x(2, 3, 2, 3, 8)
    wrong = [(3, 3, 8), (2, 2, 8), (1, 1, 3, 8), (3, 1, 8), (2, 3)]
    for argument in ("weight", "bias"):
        alone = {"weight": None, "bias": None, "axis": -1}
        of_three = f"(8,){OF_LEAD.format((2, 3))}"
        yield from shaped(ROWS, argument, wrong, of_three, **three | alone)
        of_channels = f"{of_three}: pass axis=(1,) for rows of the channels, axis 1"
        yield from shaped(ROWS, argument, [(3,)], of_channels, **three | alone)
        of_samples = f"{of_three}: pass {argument}.reshape(2, 1, 8)"
        yield from shaped(ROWS, argument, [(2, 8)], of_samples, **three | alone)
        many = apart | alone | {argument: ones(2, 1, 2, 1, 8)}
        taking = [name for name in ROWS if name in functions_taking(argument)]
        yield from each(taking, ValueError, ALTERNATE.format(argument), **many)
        channels = f"(8,){hint_of('group_norm', argument)}"
        yield from shaped(GROUP_NORMS, argument, [(2, 8), (1, 2, 8), (3, 7)], channels)


def positions() -> Cases:
    text = "gate_position is 'branch', expected 'post' as gate is None: leave it out"
    yield from each(GATED, ValueError, text, **NO_GATE | BRANCH)
    for name in PLAIN:
        text = f"gate_position is 'branch', expected 'pre' or 'post': {OTHER_BRANCH.format(name)}"
        for shape in ((5, 8), (5, 1), (8,)):
            yield from each([name], ValueError, text, gate=ones(*shape), **BRANCH)


def gates() -> Cases:
    """Yield errors for gates on the branch; those of which a row is partly 1 are the last."""
    for shape in ((4, 8), (4, 1), (2, 8), (5, 4), (1, 5, 8), (1, 1, 1)):
        yield from shaped(WITH_BRANCH, "gate", [shape], LIKE_X + MAY_BE_1, **BRANCH)
    alone = {"weight": None, "bias": None} | BRANCH
    three = like_x(2, 3, 8) | alone | {"axis": -1}
    for gate, full in [((2, 8), (2, 1, 8)), ((2,), (2, 1, 1)), ((2, 3), (2, 3, 1))]:
        text = f"(2, 3, 8), the shape of x: pass gate.reshape{full}"
        yield from shaped(WITH_BRANCH, "gate", [gate], text, **three)
    for axis, shape, gates in [
        (0, (5, 8), [(1, 8), (5, 1), (8,), (5,)]),
        (-2, (2, 4, 8), [(2, 1, 8), (1, 4, 1), (8,), (4, 1)]),
    ]:
        for gate in gates:
            text = f"{shape}, the shape of x{MAY_BE_1}{EXPANDED if gate != (5,) else ''}"
            yield from shaped(
                WITH_BRANCH, "gate", [gate], text, **like_x(*shape) | alone, axis=axis
            )
    many = like_x(2, 3, 2, 3, 8) | alone | {"gate": ones(2, 1, 2, 1, 8), "axis": -1}
    yield from each(WITH_BRANCH, ValueError, ALTERNATE.format("gate"), **many)


def branches() -> Cases:
    yield from each(BRANCHED, ValueError, NO_BRANCH, branch=ones(5, 8))
    yield from each(BRANCHED, ValueError, NO_BRANCH, branch=ones(5, 8), gate=None)
    yield from each(BRANCHED, ValueError, LACKS_BRANCH, **BRANCH)
    yield from each(BRANCHED, ValueError, LACKS_BRANCH, needs=("gate",), **BRANCH)
    wrong = [(1, 8), (8,), (5, 1), (4, 8), (1, 5, 8)]
    yield from shaped(BRANCHED, "branch", wrong, LIKE_X, **BRANCH)
    text = f"branch has dtype int16, expected {DTYPES}: pass branch.astype('float32')"
    yield from each(BRANCHED, TypeError, text, branch=np.ones((5, 8), np.int16), **BRANCH)
    text = f"branch is of type list, expected {NO_ARRAY}{HINT.format('branch')}"
    yield from each(BRANCHED, TypeError, text, branch=[1.0], **BRANCH)


def along_different_axes() -> Cases:
    shapes = {"weight": (2, 1, 1, 1, 1, 8), "bias": (1, 1, 2, 1, 1, 8), "gate": (1, 1, 1, 1, 2, 8)}
    given = {name: ones(*shape) for name, shape in shapes.items()}
    change = like_x(2, 2, 2, 2, 2, 8) | given | BRANCH | {"axis": -1, "out": None}
    yield from each(BRANCHED, ValueError, APART, **change)


def gradients() -> Cases:
    """Yield errors for gradients in `out` that have another shape than their operands."""
    for operand, shapes in [
        ("weight", [(8,), (5, 8), (1, 8)]),
        ("bias", [(8,), (5, 8), (1, 8)]),
        ("gate", [(8,), (1, 8), (5, 8), (5, 1), (1, 1)]),
    ]:
        more = BRANCH | {"branch": ones(5, 8)} if operand == "gate" else {}
        names = [name for name in BACKWARDS if name in functions_taking(operand)]
        for right in shapes:
            for wrong in {*shapes, (8, 1), (1, *right)} - {right}:
                out = NormGrads(**{f"d{operand}": ones(*wrong)})
                text = f"out.d{operand} has shape {wrong}, expected {right}"
                change = more | {operand: ones(*right), "out": out}
                yield from each(names, ValueError, text, **change)
    for operand in ("weight", "bias"):
        for right, wrong in [((3, 8), (8,)), ((1, 8), (8,)), ((8,), (1, 8)), ((3, 8), (1, 8))]:
            out = GroupNormGrads(**{f"d{operand}": ones(*wrong)})
            text = f"out.d{operand} has shape {wrong}, expected {right}"
            change = {operand: ones(*right), "out": out}
            yield from each(["group_norm_backward"], ValueError, text, **change)


PARTS = {
    "parameters that vary over rows": [parameters()],
    "gate_position is 'branch'": [positions(), gates()],
}
OF_BACKWARDS = {
    "branch": [branches(), along_different_axes()],
    "shapes of gradients": [gradients()],
}
# For all front ends, and for the plain backwards only.
TABLE: Table = {title: [*chain(*parts)] for title, parts in PARTS.items()}
BACKWARD: Table = {title: [*chain(*parts)] for title, parts in OF_BACKWARDS.items()}
