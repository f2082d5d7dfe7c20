# SPDX-License-Identifier: MIT
"""What the operators return: named tuples of arrays of the caller's framework.

A function always returns the same type; a field that does not apply to the call is None. The same
tuples, with arrays only in the fields that are to be placed, are what `out=` takes.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class AddNorm(NamedTuple):
    """What the `add_` functions return.

    Attributes
    ----------
    y : array
        The normalised rows, of x's shape.
    residual : array
        The new residual stream, x + residual, of x's shape.
    """

    y: Any = None
    residual: Any = None


class NormForward(NamedTuple):
    """What a row norm's forward returns: the result and what its backward needs.

    Attributes
    ----------
    y : array
        The normalised rows, of x's shape.
    residual : array or None
        The new residual stream, which is what was normalised; None where no residual,
        no dtype of it and no array for it was given.
    mean, rstd : array or None
        The statistics of the rows, in the compute type, of shape ``x.shape[:axis]``, with a last
        axis of length `groups` if those are not 1; mean is None unless the rows are centred.
    """

    y: Any = None
    residual: Any = None
    mean: Any = None
    rstd: Any = None


class NormGrads(NamedTuple):
    """What a row norm's backward returns: one gradient per operand.

    Attributes
    ----------
    dx : array or None
        Gradient of the branch x, of x's shape.
    dweight, dbias : array or None
        Gradients of the parameters, of the row's shape.
    dgate : array or None
        Gradient of the gate, of x's shape (also where the gate is an expanded view) and in the
        gate's dtype.
    dresidual : array or None
        Gradient of the residual stream: the same as dx, in the stream's dtype.
    """

    dx: Any = None
    dweight: Any = None
    dbias: Any = None
    dgate: Any = None
    dresidual: Any = None


class GroupNormForward(NamedTuple):
    """What `group_norm_forward` returns: the result and what its backward needs.

    Attributes
    ----------
    y : array
        The normalised groups, activated, of x's shape.
    mean, rstd : array
        The statistics of the groups, in the compute type, of shape ``(N, num_groups)``.
    """

    y: Any = None
    mean: Any = None
    rstd: Any = None


class GroupNormGrads(NamedTuple):
    """What `group_norm_backward` returns: one gradient per operand.

    Attributes
    ----------
    dx : array or None
        Gradient of x, of x's shape.
    dweight, dbias : array or None
        Gradients of the parameters, of shape ``(C,)``.
    """

    dx: Any = None
    dweight: Any = None
    dbias: Any = None
