# SPDX-License-Identifier: MIT
"""The kernels' work done by the NumPy reference, for CPU arrays where there is no C++ compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cunorm import reference
from cunorm._arrays import Operand, numpy_view
from cunorm._dtypes import numpy_dtype

if TYPE_CHECKING:
    from cunorm._calls import Backward, Forward
    from cunorm.group_norm._calls import GroupBackward, GroupCall, GroupForward


def forward(call: Forward) -> None:
    """Do what row_norm_forward does."""
    new_residual = call.new_residual
    result = reference.normalize_forward(
        numpy_view(call.x),
        _view(call.weight),
        _view(call.bias),
        residual=_view(call.residual),
        residual_dtype=None if new_residual is None else numpy_dtype(new_residual.dtype),
        gate=_view(call.gate),
        eps=call.eps,
        **_formula(call),
    )
    _store(new_residual, result.residual)
    _store(call.y, result.y)
    _store(call.mean, result.mean)
    _store(call.rstd, result.rstd)


def backward(call: Backward) -> None:
    """Do what row_norm_backward and param_grad do."""
    needed = {"x": call.dx or call.dresidual, "weight": call.dweight, "bias": call.dbias}
    needed["gate"] = call.dgate
    rounded = call.form.types.formula.rounded
    result = reference.normalize_backward(
        numpy_view(call.dy),
        numpy_view(call.x),
        _view(call.weight),
        _view(call.bias),
        rstd=_view(call.rstd),
        mean=_view(call.mean),
        d_residual=_view(call.d_residual),
        gate=None if call.form.types.gate is None else _view(call.gate),
        x_dtype=None if rounded is None else numpy_dtype(rounded),
        needs=tuple(name for name, wanted in needed.items() if wanted is not None),
        **_formula(call),
    )
    _store(call.dx, result.dx)
    _store(call.dresidual, result.dresidual)
    _store(call.dgate, result.dgate)
    added = call.form.param_types.accumulate
    _store(call.dweight, result.dweight, added)
    _store(call.dbias, result.dbias, added)


def group_forward(call: GroupForward) -> None:
    """Do what group_norm_forward does."""
    result = reference.group_norm_forward(
        numpy_view(call.x),
        weight=_view(call.weight),
        bias=_view(call.bias),
        eps=call.eps,
        **_group(call),
    )
    _store(call.y, result.y)
    _store(call.mean, result.mean)
    _store(call.rstd, result.rstd)


def group_backward(call: GroupBackward) -> None:
    """Do what group_norm_backward and param_grad do."""
    needed = {"x": call.dx, "weight": call.dweight, "bias": call.dbias}
    result = reference.group_norm_backward(
        numpy_view(call.dy),
        numpy_view(call.x),
        weight=_view(call.weight),
        bias=_view(call.bias),
        mean=numpy_view(call.mean),
        rstd=numpy_view(call.rstd),
        needs=tuple(name for name, wanted in needed.items() if wanted is not None),
        **_group(call),
    )
    _store(call.dx, result.dx)
    added = call.form.param_types.accumulate
    _store(call.dweight, result.dweight, added)
    _store(call.dbias, result.dbias, added)


def _group(call: GroupCall) -> dict[str, Any]:
    """Return what both directions tell the reference of a group norm."""
    form = call.form
    return {
        "num_groups": form.where.groups,
        "activation": form.types.activation,
        "channel_axis": form.channel_axis,
    }


def _formula(call: Forward | Backward) -> dict[str, Any]:
    """Return what both directions tell the reference of the norm."""
    where, formula = call.form.where, call.form.types.formula
    return {
        "c": call.k * float(np.sqrt(where.walk.width)),
        "center": formula.center,
        "axis": where.leading_axes,
        "groups": where.walk.groups,
        "weight_offset": call.weight_offset,
        "round_before_weight": formula.rounded is not None,
        "gate_activation": formula.activation,
        "gate_position": "pre" if formula.pre_gate else "post",
    }


def _view(operand: Operand | None) -> Any:
    return None if operand is None else numpy_view(operand)


@np.errstate(over="ignore", invalid="ignore")
def _store(operand: Operand | None, result: Any, added: bool = False) -> None:
    if operand is not None:
        view = numpy_view(operand)
        exact = view + result if added else result
        view[...] = reference.round_to(exact, numpy_dtype(operand.dtype))
