# SPDX-License-Identifier: MIT
"""The results of the operators: named tuples of arrays of the caller's framework.

A field that does not apply to the call is None. `out=` takes the same tuples, with arrays in the
fields that are to be written in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class AddNorm(NamedTuple):
    """The results of the `add_` functions.

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
    """The results of a row norm's forward, which its backward needs.

    Attributes
    ----------
    y : array
        The normalised rows, of x's shape.
    residual : array or None
        The new residual stream, which was normalised; None where no residual, no dtype of it and
        no array for it was given.
    mean, rstd : array or None
        The rows' statistics, in the compute type, of shape ``x.shape[:axis]``, with a last axis of
        length `groups` if not 1; mean is None without centering.
    """

    y: Any = None
    residual: Any = None
    mean: Any = None
    rstd: Any = None


class NormGrads(NamedTuple):
    """The results of a row norm's backward: one gradient per operand.

    Attributes
    ----------
    dx : array or None
        Gradient of the branch x, of x's shape.
    dweight, dbias : array or None
        Gradients of the parameters, of the row's shape.
    dgate : array or None
        Gradient of the gate, of x's shape, even for an expanded gate, and in the gate's dtype.
    dresidual : array or None
        Gradient of the residual stream: the same as dx, in the stream's dtype.
    """

    dx: Any = None
    dweight: Any = None
    dbias: Any = None
    dgate: Any = None
    dresidual: Any = None


class GroupNormForward(NamedTuple):
    """The results of `group_norm_forward`, which the backward needs.

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
    """The results of `group_norm_backward`: one gradient per operand.

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
