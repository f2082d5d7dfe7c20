# SPDX-License-Identifier: MIT
"""The results of the public functions, one of these for each kind of function."""

from __future__ import annotations

from typing import Any

from cunorm import _outputs
from cunorm.results import AddNorm, NormForward, NormGrads
from cunorm.row_norm import _backward, _forward

# What `Options` has of results: saves and streams.
ADDING = (False, True)
SAVING = (True, False)

_NOT_GIVEN = NormForward()
_NO_GRADIENTS = NormGrads()


def y_alone(said: _forward.Said, inputs: tuple[Any, ...], out: Any) -> Any:
    """Run a forward that returns nothing but y."""
    return _forward.run(said, (*inputs, out, None, None, None))[0]


def add_norm(said: _forward.Said, inputs: tuple[Any, ...], out: AddNorm | None) -> AddNorm:
    """Run a forward that returns y and the residual stream."""
    _outputs.check_type(said.told.function, out, AddNorm)
    given = (None, None) if out is None else out
    y, residual, *_ = _forward.run(said, (*inputs, *given, None, None))
    return AddNorm(y, residual)


def norm_forward(
    said: _forward.Said, inputs: tuple[Any, ...], out: NormForward | None
) -> NormForward:
    """Run a forward that returns all that its backward needs."""
    _outputs.check_type(said.told.function, out, NormForward)
    return NormForward(*_forward.run(said, (*inputs, *(out or _NOT_GIVEN))))


def norm_grads(
    said: _backward.Said, inputs: tuple[Any, ...], out: NormGrads | None, workspace: Any = None
) -> NormGrads:
    """Run a backward."""
    _outputs.check_type(said.told.function, out, NormGrads)
    results = _backward.run(said, (*inputs, *(out or _NO_GRADIENTS), workspace))
    return _backward.gradients(*results)
