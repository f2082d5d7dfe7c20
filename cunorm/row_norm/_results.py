# SPDX-License-Identifier: MIT
"""The results of the public functions, one of these for each kind of function."""

from __future__ import annotations

from typing import Any

from cunorm import _outputs
from cunorm.results import AddNorm, NormForward, NormGrads
from cunorm.row_norm._backward import GradArrays, NormBackward, backward
from cunorm.row_norm._forward import Arrays, Norm, forward
from cunorm.row_norm._forward_plan import Options


def y_alone(norm: Norm, arrays: Arrays, options: Options, out: Any) -> Any:
    """Run a forward that returns nothing but y."""
    return forward(norm, arrays, options, None if out is None else NormForward(out)).y


def add_norm(norm: Norm, arrays: Arrays, options: Options, out: AddNorm | None) -> AddNorm:
    """Run a forward that returns y and the residual stream."""
    _outputs.check_type(norm.function, out, AddNorm)
    given = None if out is None else NormForward(out.y, out.residual)
    result = forward(norm, arrays, options, given)
    return AddNorm(result.y, result.residual)


def norm_forward(
    norm: Norm, arrays: Arrays, options: Options, out: NormForward | None
) -> NormForward:
    """Run a forward that returns all that its backward needs."""
    _outputs.check_type(norm.function, out, NormForward)
    return forward(norm, arrays, options, out)


def norm_grads(
    norm: NormBackward, arrays: GradArrays, out: NormGrads | None, workspace: Any = None
) -> NormGrads:
    """Run a backward."""
    _outputs.check_type(norm.function, out, NormGrads)
    return backward(norm, arrays, out, workspace)
