# SPDX-License-Identifier: MIT
"""Moments, statistics and sums of rows that are split, as the public functions document them."""

from __future__ import annotations  # keeps the names of type aliases in help()

import numpy as np
from numpy.typing import DTypeLike

from cunorm.reference import rows
from cunorm.reference.generic import gate_factors, weight_factor
from cunorm.reference.rows import Array
from cunorm.results import Moments, Statistics, Sums


@np.errstate(all="ignore")
def row_moments(
    x: Array,
    *,
    residual: Array | None = None,
    residual_dtype: DTypeLike | None = None,
    center: bool = False,
    axis: int = -1,
    groups: int = 1,
    gate: Array | None = None,
    gate_activation: str = "silu",
    gate_position: str = "pre",
) -> Moments[Array]:
    """Return the moments of the rows of p; the mean is float64 and has no correction.

    >>> import numpy as np
    >>> from cunorm import reference
    >>> reference.row_moments(np.array([[1.0, 3.0]]), center=True)[:3]
    (array([2.]), array([2.]), 2)
    """
    of_branch, before, _ = gate_factors(gate, gate_activation, gate_position)
    residual_out = rows.residual_stream(x, residual, residual_dtype, of_branch)
    s = rows.as_float64(x if residual_out is None else residual_out)
    p = rows.as_rows(s * before, axis, groups)
    mean, q = rows.centered(p, p.mean(axis=-1, keepdims=True)) if center else (None, p)
    shape = x.shape[:axis] + ((groups,) if groups > 1 else ())
    m2 = (q * q).sum(axis=-1).reshape(shape)
    return Moments(
        None if mean is None else mean.reshape(shape), m2, p.shape[-1], residual=residual_out
    )


@np.errstate(all="ignore")
def combine_moments(moments: Moments[Array], *, eps: float) -> Statistics[Array]:
    """Combine the moments of parts by Chan's formula; the mean is float64, without correction.

    >>> import numpy as np
    >>> from cunorm import Moments, reference
    >>> parts = Moments(mean=np.array([[2.0], [6.0]]), m2=np.array([[2.0], [2.0]]), count=2)
    >>> [*reference.combine_moments(parts, eps=0.0)]
    [array([4.]), array([0.4472136]), None]
    """
    counts = np.broadcast_to(np.asarray(moments.count, np.float64), len(moments.m2))
    mean = rstd = np.zeros(moments.m2.shape[1:])
    count, m2 = 0.0, np.zeros_like(rstd)
    for part, of_part in enumerate(counts):
        share = of_part / (count + of_part)
        m2 = m2 + moments.m2[part].astype(np.float64)
        if moments.mean is not None:
            delta = moments.mean[part].astype(np.float64) - mean
            if moments.correction is not None:
                delta = delta + moments.correction[part].astype(np.float64)
            mean, m2 = mean + delta * share, m2 + delta * delta * (count * share)
        count += of_part
    rstd = 1.0 / np.sqrt(m2 / count + eps)
    return Statistics(None if moments.mean is None else mean, rstd)


@np.errstate(all="ignore")
def normalize_backward_sums(
    dy: Array,
    x: Array,
    weight: Array | None = None,
    *,
    rstd: Array,
    mean: Array | None = None,
    correction: Array | None = None,
    center: bool = False,
    axis: int = -1,
    groups: int = 1,
    weight_offset: float = 0.0,
    gate: Array | None = None,
    gate_activation: str = "silu",
    gate_position: str = "post",
) -> Sums[Array]:
    """Return the sums over rows that `normalize_backward` takes.

    >>> import numpy as np
    >>> from cunorm import reference
    >>> dy, x = np.array([[1.0, 2.0]]), np.array([[3.0, 5.0]])
    >>> reference.normalize_backward_sums(dy, x, rstd=np.array([0.5])).sum_r_dr
    array([6.5])
    """
    _, before, after = gate_factors(gate, gate_activation, gate_position)
    p = rows.as_rows(rows.as_float64(x) * before, axis, groups)
    r = rows.less_mean(p, mean, correction) * rows.per_row(rstd, groups)
    dn = rows.as_float64(dy) * after
    dr = rows.as_rows(dn * weight_factor(weight, weight_offset), axis, groups)
    shape = rstd.shape
    sum_dr = dr.sum(axis=-1).reshape(shape) if center else None
    return Sums(sum_dr, (r * dr).sum(axis=-1).reshape(shape))
