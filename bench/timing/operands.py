# SPDX-License-Identifier: MIT
"""The operands of the timings and of their checks."""

from __future__ import annotations

import math

import numpy as np

from bench.timing.cases import DTYPES, Operands, Operator, Shape

# The largest x that is checked against the oracle. It has few rows, because torch's layer norm on a
# CPU sums gradients of bfloat16 parameters in bfloat16: with thousands of rows these sums are wrong
# by a tenth.
CHECKED_ROWS = 64
CHECKED_ELEMENTS = 1 << 19
DRAWN_ELEMENTS = 1 << 20  # the most elements of x that are drawn, but at least a row or sample


def host_operands(operator: Operator, dtype: str, shape: Shape, seed: int = 0) -> Operands:
    """Draw the operands of forward and backward on the host, all of one dtype.

    The means of x and weight are not 0, and dy is correlated with x. So no term of a formula is
    close to 0, and the check finds a provider that omits a term.
    """
    rng = np.random.default_rng(seed)
    row_sized = ["x", "dy", *(("residual", "d_residual") if operator.has_residual else ())]
    row_sized += ["gate"] if operator.gate_position else []
    of_parameter = operator.parameter_shape(shape)
    shapes = dict.fromkeys(row_sized, shape) | dict.fromkeys(operator.parameters, of_parameter)
    values = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    values["x"] = 1.5 * values["x"] + 0.75
    values["dy"] += values["x"] / 2
    if "weight" in values:
        values["weight"] = 1 + values["weight"] / 2
    operands = {name: value.astype(DTYPES[dtype]) for name, value in values.items()}
    if operator.memory == "NHWC":
        for name in row_sized:
            operands[name] = np.moveaxis(np.moveaxis(operands[name], 1, -1).copy(), -1, 1)
    return operands


def drawn(operator: Operator, dtype: str, shape: Shape) -> tuple[Operands, int]:
    """Draw the operands of some rows or samples, and return how often to repeat them."""
    rows, *row = shape
    few = math.gcd(rows, max(1, DRAWN_ELEMENTS // math.prod(row)))
    return host_operands(operator, dtype, (few, *row)), rows // few


def checked_shape(shape: Shape, fewest: int = 1) -> Shape:
    """Return the shape of x on which providers are checked before they are timed on `shape`.

    It has fewer rows or samples, but not less than `fewest` if there are so many, and, if a sample
    alone is too large, fewer rows or less height.
    """
    first, *others = shape
    most = min(CHECKED_ROWS, CHECKED_ELEMENTS // math.prod(others))
    first = min(first, max(fewest, most))
    if len(shape) == 3:
        others[0] = min(others[0], CHECKED_ROWS)
    if len(shape) == 4:
        channels, height, width = others
        others[1] = max(1, min(height, CHECKED_ELEMENTS // (channels * width)))
    return (first, *others)
