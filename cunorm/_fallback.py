# SPDX-License-Identifier: MIT
"""The kernels' work done by the NumPy reference, for CPU arrays where there is no C++ compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cunorm import reference
from cunorm._arrays import Operand, numpy_view
from cunorm._dtypes import numpy_dtype

if TYPE_CHECKING:
    from cunorm._backend import Backward, Forward


def forward(call: Forward) -> None:
    """Do what row_norm_forward does."""
    where, new_residual = call.form.where, call.new_residual
    result = reference.normalize_forward(
        numpy_view(call.x),
        _view(call.weight),
        _view(call.bias),
        residual=_view(call.residual),
        residual_dtype=None if new_residual is None else numpy_dtype(new_residual.dtype),
        c=call.k * float(np.sqrt(where.width)),
        center=call.form.types.center,
        eps=call.eps,
        axis=where.leading_axes,
    )
    _store(new_residual, result.residual)
    _store(call.y, result.y)
    _store(call.mean, result.mean)
    _store(call.rstd, result.rstd)


def backward(call: Backward) -> None:
    """Do what row_norm_backward and param_grad do."""
    where = call.form.where
    needed = {"x": call.dx or call.dresidual, "weight": call.dweight, "bias": call.dbias}
    zeros = np.zeros(where.row_shape)
    result = reference.normalize_backward(
        numpy_view(call.dy),
        numpy_view(call.x),
        _view(call.weight),
        zeros if call.dbias is not None else None,
        rstd=numpy_view(call.rstd),
        mean=_view(call.mean),
        d_residual=_view(call.d_residual),
        c=call.k * float(np.sqrt(where.width)),
        center=call.form.types.center,
        axis=where.leading_axes,
        needs=tuple(name for name, wanted in needed.items() if wanted is not None),
    )
    _store(call.dx, result.dx)
    _store(call.dresidual, result.dx)
    _store(call.dweight, result.dweight)
    _store(call.dbias, result.dbias)


def _view(operand: Operand | None) -> Any:
    return None if operand is None else numpy_view(operand)


@np.errstate(over="ignore", invalid="ignore")
def _store(operand: Operand | None, result: Any) -> None:
    if operand is not None:
        numpy_view(operand)[...] = reference.round_to(result, numpy_dtype(operand.dtype))
