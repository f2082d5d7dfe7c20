# SPDX-License-Identifier: MIT
"""The results of the operators: named tuples of arrays of the caller's framework.

A field that does not apply to the call is None. `out=` takes these tuples, with an array in each
field that is to be written in place; the fields' defaults are for `out`. The type of a field
includes None unless every call that leaves out `needs` fills the field.
"""

import sys
import typing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

T_co = TypeVar("T_co", covariant=True)

if not TYPE_CHECKING and sys.version_info < (3, 11):  # older NamedTuples take no second base
    NamedTuple = SimpleNamespace(__mro_entries__=lambda bases: (typing._NamedTuple,))


class AddNorm(NamedTuple, Generic[T_co]):
    """The results of the `add_` functions, both of x's shape.

    y has the normalised rows, residual is the new residual stream: x + residual, or
    x * g(gate) + residual with a gate of the branch.
    """

    y: T_co = None  # type: ignore[assignment]
    residual: T_co = None  # type: ignore[assignment]


class QuantizedNorm(NamedTuple, Generic[T_co]):
    """The results of a norm with a quantised result: y is about q * scale.

    q has x's shape. scale has one element for each row or block of columns, or is the scale that
    was given. y, the rounded rows before quantisation, is None unless it is asked for. residual is
    the new residual stream, as in `NormForward`.
    """

    q: T_co = None  # type: ignore[assignment]
    scale: T_co = None  # type: ignore[assignment]
    y: T_co | None = None
    residual: T_co | None = None


class NormForward(NamedTuple, Generic[T_co]):
    """The results of a row norm's forward, which its backward needs.

    y has the normalised rows. residual is the new residual stream, which was normalised; it is None
    without residual, `residual_dtype`, `out.residual` and a gate of the branch. Both have x's
    shape. mean and rstd are the rows' statistics, in the compute type, of shape ``x.shape[:axis]``,
    with a last axis of length `groups` if that is not 1; mean is None without centering.
    """

    y: T_co = None  # type: ignore[assignment]
    residual: T_co | None = None
    mean: T_co | None = None
    rstd: T_co = None  # type: ignore[assignment]


class NormGrads(NamedTuple, Generic[T_co]):
    """The results of a row norm's backward: one gradient per operand, or None.

    dx and dresidual have x's shape; dweight, dbias and dgate have the shape of weight, bias and
    gate, as sums over the rows or elements that share them. dgate has the gate's dtype. dresidual,
    the gradient of the residual stream, equals dx in the stream's dtype, unless the gate is that of
    the branch: then dx is dresidual * g(gate).
    """

    dx: T_co = None  # type: ignore[assignment]
    dweight: T_co | None = None
    dbias: T_co | None = None
    dgate: T_co | None = None
    dresidual: T_co = None  # type: ignore[assignment]


class Moments(NamedTuple, Generic[T_co]):
    """The moments of rows, or of the parts into which rows are split.

    m2 is the sum of (p - mean)**2 over a row or, without centering, the sum of p**2. The mean of p
    is mean + correction: mean is rounded, correction is the rest. Without centering both are None;
    a correction of None is 0. They are in the compute type, of shape ``x.shape[:axis]``, with a
    last axis of length `groups` if that is not 1. count is the number of elements over which they
    are taken. residual is the new residual stream, as in `NormForward`.

    `combine_moments` takes the moments of several parts, stacked on a new first axis; its count is
    a number, or an array with one number for each part.
    """

    mean: T_co | None = None
    m2: T_co = None  # type: ignore[assignment]
    count: T_co | int = None  # type: ignore[assignment]
    correction: T_co | None = None
    residual: T_co | None = None


class Statistics(NamedTuple, Generic[T_co]):
    """The statistics of rows, with which `normalize` normalises them.

    rstd is 1 / sqrt(m2 / count + eps). The mean of p is mean + correction; without centering both
    are None. ``**statistics._asdict()`` gives them to `normalize` and `layer_norm`.
    """

    mean: T_co | None = None
    rstd: T_co = None  # type: ignore[assignment]
    correction: T_co | None = None


class Sums(NamedTuple, Generic[T_co]):
    """The sums over rows that the gradient of a row norm needs: see `normalize_backward_sums`.

    Both have the shape and the dtype of rstd; sum_dr is None without centering.
    """

    sum_dr: T_co | None = None
    sum_r_dr: T_co = None  # type: ignore[assignment]


class GroupNormForward(NamedTuple, Generic[T_co]):
    """The results of `group_norm_forward`, which the backward needs.

    y has the normalised groups after the activation, in x's shape. mean and rstd are the groups'
    statistics, in the compute type, of shape ``(N, num_groups)``.
    """

    y: T_co = None  # type: ignore[assignment]
    mean: T_co = None  # type: ignore[assignment]
    rstd: T_co = None  # type: ignore[assignment]


class GroupNormGrads(NamedTuple, Generic[T_co]):
    """The results of `group_norm_backward`: one gradient per operand, or None.

    dx has x's shape; dweight and dbias have the shape of their parameter, ``(C,)``, ``(1, C)`` or
    ``(N, C)``.
    """

    dx: T_co = None  # type: ignore[assignment]
    dweight: T_co | None = None
    dbias: T_co | None = None
