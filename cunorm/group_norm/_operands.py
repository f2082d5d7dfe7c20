# SPDX-License-Identifier: MIT
"""Checks of a group norm's operands, and operands on their way into its kernels."""

from __future__ import annotations

from typing import Any

from cunorm import _checks
from cunorm._activations import checked_activation
from cunorm._arrays import Form, Operand, describe_memory, in_c_order
from cunorm._dtypes import DType
from cunorm._layout import WHOLE
from cunorm._outputs import check_own_memory
from cunorm.group_norm._calls import GroupForm, Lines
from cunorm.group_norm._layout import GroupGeometry, back, in_order
from cunorm.group_norm._run import workspace_bytes

ABSENT: Lines = (0, 0)


def optional_activation(function: str, activation: Any) -> str:
    """Return the name in the sources of an activation, None being none."""
    name = "identity" if activation is None else activation
    return checked_activation(function, "activation", name)


def check_shape(
    function: str, argument: str, form: Form | None, shape: tuple[int, ...], of: str
) -> None:
    """Check the shape of an operand."""
    if form is not None and form.shape != shape:
        raise ValueError(f"{function}: {argument} has shape {form.shape}, expected {shape}, {of}")


def check_statistic(
    function: str, argument: str, form: Form | None, where: GroupGeometry, compute: DType
) -> None:
    """Check mean or rstd: an element for each group of each sample, in the compute type."""
    of = "one element for each group of each sample"
    check_shape(function, argument, form, where.statistic_shape, of)
    if form is not None and form.dtype is not compute:
        raise TypeError(
            f"{function}: {argument} has dtype {form.dtype}, expected {compute}, the compute type: "
            "float64 if x is, else float32"
        )


def check_result(function: str, argument: str, form: Form | None, where: GroupGeometry) -> None:
    """Check an array given for a result that has an element for each of x."""
    if form is None:
        return
    check_shape(function, argument, form, where.shape, "the shape of x")
    check_own_memory(function, argument, form)
    if where.where.elements and where.lines(form) is None:
        layout = "channels last" if where.where.channels_last else "channels first"
        raise ValueError(
            f"{function}: {argument} has strides {form.strides}, expected the memory layout of x, "
            f"{layout}, with one stride for all of its lines"
        )


def lines(form: Form | None, where: GroupGeometry) -> Lines:
    """Return where an operand's lines are; where it must be copied, in the copy."""
    if form is None:
        return ABSENT
    found = where.lines(form)
    if found is None:
        copy = in_c_order(in_order(form, where.axes))
        found = where.lines(in_order(copy, back(where.axes)))
        assert found is not None, "a dense copy has lines"
    return found


def must_be_copied(name: str, form: Form | None, where: GroupGeometry) -> bool:
    """Whether the kernels cannot follow an input's strides."""
    if form is None:
        return False
    if name in ("x", "dy"):
        return where.lines(form) is None
    return WHOLE.layout(form) is None


def copied(
    names: tuple[str, ...], operands: list[Any], to_copy: tuple[str, ...], where: GroupGeometry
) -> list[Any]:
    """Return the operands, those that are named copied: x and dy in the kernel's order of axes."""
    axes = {"x": where.axes, "dy": where.axes}
    return [
        _copied(operand, axes.get(name)) if name in to_copy else operand
        for name, operand in zip(names, operands, strict=True)
    ]


def _copied(operand: Operand, axes: tuple[int, ...] | None) -> Operand:
    if axes is None:
        return operand.framework.contiguous(operand)
    framework, owner = operand.framework, operand.owner
    in_kernel_order = Operand(
        operand.pointer, in_order(operand.form, axes), owner, framework, writable=False
    )
    copy = framework.contiguous(in_kernel_order)
    copy.form = in_order(copy.form, back(axes))
    return copy


def given_workspace(function: str, workspace: Any, x: Operand, form: GroupForm) -> Operand:
    """Describe the memory that the caller gives for what passes hand on."""
    operand = describe_memory(function, "workspace", workspace, workspace_bytes(form, x.device))
    if operand.device is not x.device:
        _checks.same_device(function, x.form, [("workspace", operand.form)])
    return operand
