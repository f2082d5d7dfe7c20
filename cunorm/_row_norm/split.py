# SPDX-License-Identifier: MIT
"""The pieces of row norms, for rows that are split and for statistics that others computed."""

from __future__ import annotations  # keeps the names of type aliases in help()

from math import prod
from numbers import Number
from typing import Any

from cunorm._arrays.registry import view
from cunorm._core import validate
from cunorm._core.tensor import Arrays
from cunorm._core.types import Activation, ArrayT, DTypeLike, GatePosition, SupportsDLPack
from cunorm._dispatch import dispatch
from cunorm._row_norm.combine_plan import COMBINE_MOMENTS
from cunorm._row_norm.spec import Scalars, forward_scalars
from cunorm._row_norm.split_plan import ROW_GIVEN, ROW_GIVEN_SUMS, ROW_MOMENTS, ROW_SUMS
from cunorm.results import Moments, NormGrads, Statistics, Sums

_RSTD = ROW_GIVEN.inputs.index("rstd")


def row_moments(
    x: ArrayT,
    *,
    residual: SupportsDLPack | None = None,
    residual_dtype: DTypeLike | None = None,
    center: bool = False,
    axis: int = -1,
    groups: int = 1,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "pre",
    out: Moments[SupportsDLPack | None] | None = None,
) -> Moments[ArrayT]:
    """Return the moments of rows, or of the parts of rows that are in x.

    mean() and sum() are over the part of a row that is in x::

        s = x + residual    rounded to its dtype: the new stream; without residual, s = x
        s = x * g(gate) + residual              instead, if the gate is that of the branch
        p = s * g(gate)     if there is a pre-gate, else s
        m2 = sum((p - mean(p))**2)              without center, sum(p**2)

    `combine_moments` makes the statistics of whole rows from the moments of all their parts, and
    `normalize` takes these statistics. The source and errors are those of `normalize`.

    Parameters
    ----------
    x : array
    residual, residual_dtype, center, axis, groups, gate, gate_activation : optional
        As for `normalize_forward`.
    gate_position : str, optional
        "pre" or "branch"; a post-gate changes no moment.
    out : Moments, optional
        For each result, an array to write instead of a new one, or None; its count is not read.
        The new stream may be exactly x or residual, as in `add_normalize`.

    Returns
    -------
    Moments
        Its docstring describes the fields. The mean is a sum of two numbers: its error is small
        beside the deviation of p, however large the mean is, so that no digit of y is lost.

    Notes
    -----
    Rounding: as for `normalize_forward`; mean, correction and m2 are in the compute type. x is read
    once. No bit depends on other rows or on strides.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x = np.array([[1, 3, 10001, 10003]], dtype=np.float32)
    >>> cunorm.row_moments(x[:, 2:], center=True)[:3]
    (array([10002.], dtype=float32), array([2.], dtype=float32), 2)

    Normalise rows of which two arrays have one half each:

    >>> parts = [cunorm.row_moments(half, center=True) for half in (x[:, :2], x[:, 2:])]
    >>> mean, m2, count, correction = (np.stack(one) for one in list(zip(*parts))[:4])
    >>> moments = cunorm.Moments(mean, m2, count.astype(np.float32), correction)
    >>> found = cunorm.combine_moments(moments, eps=0.0)
    >>> cunorm.layer_norm(x[:, 2:], **found._asdict()).round(4)
    array([[0.9998, 1.0002]], dtype=float32)
    >>> cunorm.layer_norm(x, eps=0.0).round(4)
    array([[-1.0002, -0.9998,  0.9998,  1.0002]], dtype=float32)
    """
    validate.out_type("row_moments", out, Moments)
    options = (axis, groups, 0.0, False, gate_activation, gate_position)
    scalars = forward_scalars("row_moments", options, 0.0, None, residual_dtype, center=center)
    mean, m2, _, correction, stream = out or Moments()
    arrays = (x, gate, residual, mean, m2, correction, stream, None)
    mean, m2, correction, stream = dispatch(ROW_MOMENTS, scalars, arrays)
    like_x = x if hasattr(x, "shape") else view("row_moments", "x", x).spec
    return Moments(mean, m2, count_of(like_x, axis, groups), correction, stream)


def count_of(x: Any, axis: int, groups: int) -> int:
    """Return how many elements of x are in a row."""
    return int(prod(x.shape[axis:])) // groups


def combine_moments(
    moments: Moments[ArrayT],
    *,
    eps: float,
    out: Statistics[SupportsDLPack | None] | None = None,
) -> Statistics[ArrayT]:
    """Return the statistics of rows from the moments of their parts, in the order of the parts.

    For each part, by Chan's formula, from the first on::

        delta = mean of the part - mean
        share = count of the part / (count + count of the part)
        m2 += m2 of the part + delta**2 * count * share
        mean += delta * share
        count += count of the part
        rstd = 1 / sqrt(m2 / count + eps)       after the last part

    Source: T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm
    for Computing Sample Variances" (1979). There is no mean where `moments` has none.

    Parameters
    ----------
    moments : Moments
        The moments of all parts, stacked on a new first axis; residual is not read. m2 is float32
        or float64, the other arrays have its dtype. count is an int, if all parts have so many
        elements, or an array with one number, at least 1, for each part.
    eps : float
        The number, at least 0, that is added to the mean square. `l2_norm` adds its eps to the sum
        of squares: give eps / d, for rows of d elements.
    out : Statistics, optional
        For each result, an array to write instead of a new one, or None.

    Returns
    -------
    Statistics
        ``mean + correction`` is the mean of p, as in `Moments`.

    Notes
    -----
    Rounding: all is computed in float64, means as sums of two float64. Each result is rounded once.
    Equal moments in equal order give equal bits: every device that has all moments gets the same
    statistics.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> mean, m2 = np.float32([[10002], [10006]]), np.float32([[2], [2]])  # two parts of one row
    >>> cunorm.combine_moments(cunorm.Moments(mean, m2, count=2), eps=0.0)[:2]
    (array([10004.], dtype=float32), array([0.4472136], dtype=float32))
    """
    validate.out_type("combine_moments", out, Statistics)
    if not isinstance(moments, Moments):
        got = validate.describe_type(type(moments))
        raise TypeError(f"combine_moments: moments is {got}, expected a Moments")
    mean, m2, count, correction, _ = moments
    is_number = isinstance(count, Number)
    if count is None:
        raise ValueError("combine_moments: moments.count is None, expected a number or an array")
    scalars = ("combine_moments", eps, count if is_number else None)
    arrays = (m2, mean, correction, None if is_number else count, *(out or Statistics()), None)
    return Statistics(*dispatch(COMBINE_MOMENTS, scalars, arrays))


def normalize_backward_sums(
    dy: SupportsDLPack,
    x: ArrayT,
    weight: SupportsDLPack | None = None,
    *,
    rstd: SupportsDLPack,
    mean: SupportsDLPack | None = None,
    correction: SupportsDLPack | None = None,
    center: bool = False,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    gate: SupportsDLPack | None = None,
    gate_activation: Activation = "silu",
    gate_position: GatePosition = "post",
    out: Sums[SupportsDLPack | None] | None = None,
) -> Sums[ArrayT]:
    """Return the sums over rows, or over their parts in x, that the gradient of x needs.

    In the notation of `normalize_backward`, but with the given mean and without the factor k::

        r = (p - mean - correction) * rstd      without center, p * rstd
        dr = dn * (weight + weight_offset)
        sum_dr = sum(dr)                        only with center
        sum_r_dr = sum(r * dr)

    Add the sums of all parts of a row, and give them to `normalize_backward`. The source and errors
    are those of `normalize_backward`.

    Parameters
    ----------
    dy, x, weight : array
    center, axis, groups, weight_offset, gate, gate_activation, gate_position : optional
        As for `normalize_backward`. A gate of the branch is left out: it changes no sum.
    rstd, mean, correction : array
        The statistics with which rows were normalised; float64 if x is, else float32 or float64,
        in which the sums are then computed. mean is given with center, and only then; without
        correction, it is exact.
    out : Sums, optional
        For each result, an array to write instead of a new one, or None.

    Returns
    -------
    Sums
        Arrays of rstd's shape and dtype.

    Examples
    --------
    >>> import numpy as np
    >>> import cunorm
    >>> x, dy = np.array([[3, 4]], dtype=np.float32), np.array([[1, 0]], dtype=np.float32)
    >>> rstd = cunorm.rms_norm_forward(x, eps=0.0).rstd
    >>> halves = [(dy[:, :1], x[:, :1]), (dy[:, 1:], x[:, 1:])]
    >>> parts = [cunorm.normalize_backward_sums(*half, rstd=rstd).sum_r_dr for half in halves]
    >>> sums = cunorm.Sums(sum_r_dr=parts[0] + parts[1])
    >>> cunorm.rms_norm_backward(*halves[0], rstd=rstd, sums=sums, count=2).dx.round(4)
    array([[0.181]], dtype=float32)
    >>> cunorm.rms_norm_backward(dy, x, rstd=rstd).dx.round(4)
    array([[ 0.181 , -0.1358]], dtype=float32)
    """
    validate.out_type("normalize_backward_sums", out, Sums)
    options = (axis, groups, weight_offset, False, gate_activation, gate_position)
    scalars = ("normalize_backward_sums", *options, center, None)
    arrays = (dy, x, weight, gate, mean, rstd, correction, *(out or Sums()), None)
    return Sums(*dispatch(ROW_SUMS, scalars, arrays))


def given_norm(
    scalars: Scalars, arrays: Arrays, count: object = None, x_dtype: object = None
) -> Any:
    """Return y of a norm that is given statistics; `arrays` are those of ROW_GIVEN."""
    if arrays[_RSTD] is None:
        raise TypeError(
            f"{scalars[0]}: rstd is None, expected an array, as mean, correction, count or "
            "x_dtype is given"
        )
    return dispatch(ROW_GIVEN, (*scalars, count, x_dtype), (*arrays, None))[0]


def given_backward(
    scalars: Scalars,
    inputs: Arrays,
    of_rows: tuple[Any, Any, Any],  # sums, correction, count
    outputs: Arrays,  # and the workspace
) -> NormGrads[Any]:
    """Return the gradients of a norm from sums over whole rows."""
    function, (sums, correction, count) = scalars[0], of_rows
    if not isinstance(sums, Sums):
        what = "of whole rows, as correction or count is given" if sums is None else ""
        got = validate.describe_type(type(sums))
        raise TypeError(f"{function}: sums is {got}, expected a Sums {what}".rstrip())
    arrays = (*inputs, correction, *sums, *outputs)
    return NormGrads(*dispatch(ROW_GIVEN_SUMS, (*scalars, count), arrays))
