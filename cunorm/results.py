# SPDX-License-Identifier: MIT
"""The results of the operators: named tuples of arrays of the caller's framework.

A field that does not apply to the call is None. `out=` takes the same tuples, with arrays in the
fields that are to be written in place.
"""

from typing import Any, NamedTuple


class AddNorm(NamedTuple):
    """The results of the `add_` functions, both of x's shape.

    y has the normalised rows; residual is the new residual stream, x + residual.
    """

    y: Any = None
    residual: Any = None


class NormForward(NamedTuple):
    """The results of a row norm's forward, which its backward needs.

    y has the normalised rows, of x's shape. residual, of the same shape, is the new residual
    stream, which was normalised; None where no residual, no dtype of it and no array for it was
    given. mean and rstd are the rows' statistics, in the compute type, of shape ``x.shape[:axis]``,
    with a last axis of length `groups` if not 1; mean is None without centering.
    """

    y: Any = None
    residual: Any = None
    mean: Any = None
    rstd: Any = None


class NormGrads(NamedTuple):
    """The results of a row norm's backward: one gradient per operand, or None.

    dx, of the branch x, dgate, even of an expanded gate, and dresidual have x's shape; dweight and
    dbias have the shape of a row. dgate has the gate's dtype. dresidual, of the residual stream, is
    the same as dx, in the stream's dtype.
    """

    dx: Any = None
    dweight: Any = None
    dbias: Any = None
    dgate: Any = None
    dresidual: Any = None


class GroupNormForward(NamedTuple):
    """The results of `group_norm_forward`, which the backward needs.

    y has the normalised groups, activated, of x's shape. mean and rstd are the groups' statistics,
    in the compute type, of shape ``(N, num_groups)``.
    """

    y: Any = None
    mean: Any = None
    rstd: Any = None


class GroupNormGrads(NamedTuple):
    """The results of `group_norm_backward`: one gradient per operand, or None.

    dx has x's shape; dweight and dbias have shape ``(C,)``.
    """

    dx: Any = None
    dweight: Any = None
    dbias: Any = None
