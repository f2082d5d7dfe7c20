# SPDX-License-Identifier: MIT
"""Which builds the calls of a norm need, planned as the calls themselves are, with no arrays."""

from __future__ import annotations

from typing import NamedTuple

from cunorm import _backend
from cunorm._arrays import Device, Form, contiguous_form
from cunorm._builds import Build, Launch
from cunorm._calls import BackwardForm, ForwardForm
from cunorm._cpu_plan import CPU_SHARED_PARTS, CPU_SHARED_ROWS
from cunorm._dtypes import DType
from cunorm.group_norm import _planned_builds as _of_groups
from cunorm.group_norm._planned_builds import GroupLayer
from cunorm.row_norm import _backward_plan, _forward_plan
from cunorm.row_norm._variant import Variant, checked_offset

_MANY = 1 << 31


class Layer(NamedTuple):
    """A norm as its forward is called, and what its backward is told beside."""

    function: str  # named in errors
    variant: Variant
    x: DType
    weight: DType | None = None
    bias: DType | None = None
    residual: DType | None = None
    gate: DType | None = None
    y: DType | None = None
    residual_dtype: DType | None = None
    weight_offset: float = 0.0
    d_residual: DType | bool | None = None  # None: where there is a stream; True: of its dtype
    needs: frozenset[str] = frozenset()
    accumulate: bool = False


def builds(
    name: str, layer: Layer | GroupLayer, rows: list[int] | None, width: int, device: Device
) -> list[Build]:
    """Return what a function needs for so many rows of a width, or samples of so many channels.

    None is any number of them. Every array is aligned.
    """
    is_backward = name.endswith("_backward")
    if isinstance(layer, GroupLayer):
        of_groups = _of_groups.backward_builds if is_backward else _of_groups.forward_builds
        return of_groups(layer, rows, width, device)
    return [launch.build for launch in launches(name, layer, rows, width, device)]


def launches(
    name: str, layer: Layer, rows: list[int] | None, width: int, device: Device
) -> list[Launch]:
    """Return what a row norm starts, of the builds that `builds` returns."""
    planned = _backward_launches if name.endswith("_backward") else _forward_launches
    shapes = [(count, width) for count in rows or _rows(layer.variant.groups)]
    return [launch for shape in shapes for launch in planned(layer, shape, device)]


def _rows(groups: int) -> list[int]:
    """Return numbers of rows that need, together, what any number of them does.

    A CPU has builds for results that its caches hold, and for larger, and of long rows for few of
    them: the fewest, and the most that its cores share in a backward and in a forward, one more.
    """
    forward = CPU_SHARED_ROWS // groups
    backward = min(CPU_SHARED_PARTS, forward)
    most = (1, backward, backward + 1, forward, forward + 1, _MANY)
    return sorted({max(1, rows) for rows in most})


def _forward_launches(layer: Layer, shape: tuple[int, int], device: Device) -> list[Launch]:
    """Return what the forward starts for an x of (rows, width)."""
    return _backend.forward_launches(_forward_form(layer, shape, device), device)


def _backward_launches(layer: Layer, shape: tuple[int, int], device: Device) -> list[Launch]:
    """Return what the backward starts, given what the forward returns and a dy like its y."""
    form = _backward_form(layer, _forward_form(layer, shape, device), device)
    return [] if form is None else _backend.backward_launches(form, device)


def _forward_form(layer: Layer, shape: tuple[int, int], device: Device) -> ForwardForm:
    names = (_name(layer.y), _name(layer.residual_dtype))
    inputs = _forward_plan.Forms(
        x=contiguous_form(shape, layer.x, device),
        residual=_form(shape, layer.residual, device),
        gate=_form(shape, layer.gate, device),
        weight=_form(shape[1:], layer.weight, device),
        bias=_form(shape[1:], layer.bias, device),
    )
    options = _forward_plan.Options(*names, saves=True)
    has_offset = checked_offset(layer.function, layer.weight_offset, inputs.weight) != 0.0
    asked = _forward_plan.asked(layer.function, layer.variant, has_offset, options)
    given = (None,) * len(_forward_plan.FIELDS)
    return _forward_plan.planned(asked, (*inputs, *given)).form


def _backward_form(layer: Layer, forward: ForwardForm, device: Device) -> BackwardForm | None:
    """Return the form of the backward's call; None where no gradient is wanted."""
    where, types = forward.where, forward.types
    statistic = contiguous_form(where.leading_shape, types.compute, device)
    inputs = _backward_plan.Forms(
        dy=contiguous_form(where.shape, types.y, device),
        x=contiguous_form(where.shape, types.new_residual or types.x, device),
        rstd=statistic,
        mean=statistic if types.formula.center else None,
        d_residual=_form(where.shape, _d_residual(layer, forward), device),
        gate=_form(where.shape, types.gate, device),
        weight=_form(where.row_shape, types.weight, device),
        bias=_form(where.row_shape, types.bias, device),
    )
    asked = _backward_plan.asked(
        layer.function,
        layer.variant,
        checked_offset(layer.function, layer.weight_offset, inputs.weight) != 0.0,
        types.x.name,
        layer.needs,
        layer.accumulate,
    )
    sums = {"dweight": inputs.weight, "dbias": inputs.bias} if layer.accumulate else {}
    given = {
        name: _form(where.row_shape, types.compute, device)
        for name, parameter in sums.items()
        if parameter is not None and name[1:] in layer.needs
    }
    outputs = tuple(map(given.get, _backward_plan.FIELDS))
    plan = _backward_plan.planned(asked, (*inputs, *outputs))
    return None if plan.is_empty else plan.form


def _d_residual(layer: Layer, forward: ForwardForm) -> DType | None:
    stream = forward.types.new_residual
    if layer.d_residual is None:
        return stream
    if isinstance(layer.d_residual, bool):
        return (stream or forward.types.x) if layer.d_residual else None
    return layer.d_residual


def _form(shape: tuple[int, ...], dtype: DType | None, device: Device) -> Form | None:
    return None if dtype is None else contiguous_form(shape, dtype, device)


def _name(dtype: DType | None) -> str | None:
    return None if dtype is None else dtype.name
