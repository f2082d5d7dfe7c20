# SPDX-License-Identifier: MIT
"""The four kinds of calls: how each is planned, and what runs it where its arrays lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from cunorm import _backend, _checks
from cunorm._arrays import CPU, Device, Form
from cunorm._calls import Backward, BackwardForm, Forward
from cunorm._cpu import Kernels
from cunorm._cuda_plan import MOST_SMS
from cunorm._core.dtypes import DType
from cunorm.group_norm import _backward_plan as group_backward_plan
from cunorm.group_norm import _forward as group_forward_plan
from cunorm.group_norm import _run
from cunorm.group_norm._calls import GroupBackward, GroupForward, eps_of
from cunorm.jax._op import Op
from cunorm.row_norm import _backward_plan, _forward_plan
from cunorm.row_norm._variant import Numbers, Variant
from cunorm.row_norm._workspace import workspace_size


class Settled(NamedTuple):
    """A call that was planned and checked."""

    places: tuple[int, ...]  # of the inputs that there are, among all arrays
    made: tuple[tuple[int, Form], ...]  # the results to allocate, by their place among all arrays
    arrays: int  # how many there are, absent ones too, and a workspace, which is the last
    is_empty: bool  # there is nothing to run: results are zeros
    workspace: int  # bytes on a GPU, at most, whichever it is
    call: Callable[..., Any]  # what makes the call, of an operand or None for each array
    run: Callable[[Any], object]  # what runs it
    kernels: Callable[[], Kernels]  # what runs it on a CPU with a compiler, given pointers


@dataclass(frozen=True)
class Kind:
    """A kind of calls.

    Attributes
    ----------
    settle : function
        Plans an op on a device.
    inputs, results : tuple of str
        The names of all arrays, but for a workspace.
    x : int
        The place of x among the inputs.
    parameters : tuple of str
        The inputs that all examples of a batch have to share, for one call to serve them.
    gradients : tuple of str
        The results that are sums over all examples of a call.
    """

    settle: Callable[[Op, Device], Settled]
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    x: int
    parameters: tuple[str, ...] = ("weight", "bias")
    gradients: tuple[str, ...] = ("dweight", "dbias")


def settle(op: Op, device: Device = CPU) -> Settled:
    """Plan a call; wrong input is the error that the plain function raises."""
    return KINDS[op.kind].settle(op, device)


def name_of(dtype: DType | None) -> str | None:
    """Return a dtype as `Op.said` has it."""
    return None if dtype is None else dtype.name


def _places(op: Op) -> tuple[int, ...]:
    return tuple(place for place, array in enumerate(op.inputs) if array is not None)


def _row_forward(op: Op, device: Device) -> Settled:
    function, *variant, has_offset, dtype, residual_dtype, saves, streams = op.said
    options = _forward_plan.Options(dtype, residual_dtype, saves, streams)
    told = _forward_plan.asked(function, Variant(*variant), has_offset, options)
    results = len(_forward_plan.FIELDS)
    plan = _forward_plan.planned(told, op.forms(device) + (None,) * results)
    numbers, walk = Numbers.of_bits(op.numbers), plan.form.where.walk
    k, eps = _checks.scale(numbers.c, walk.width), numbers.eps
    if numbers.eps_of_sum:
        eps /= walk.width
    call: Callable[..., Forward] = partial(Forward, plan.form, k, eps, numbers.weight_offset)
    count = len(op.inputs) + results
    packed = call(*[None] * count).numbers()
    return Settled(
        _places(op),
        plan.made,
        count,
        not walk.rows,
        0,
        call,
        _backend.run_forward,
        partial(_backend.cpu_forward_kernels, plan.form, packed),
    )


def _row_backward(op: Op, device: Device) -> Settled:
    function, *variant, has_offset, x_dtype, needs = op.said
    told = _backward_plan.asked(function, Variant(*variant), has_offset, x_dtype, needs, False)
    results = len(_backward_plan.FIELDS)
    plan = _backward_plan.planned(told, op.forms(device) + (None,) * results)
    numbers, walk = Numbers.of_bits(op.numbers), plan.form.where.walk
    k = _checks.scale(numbers.c, walk.width)
    call: Callable[..., Backward] = partial(Backward, plan.form, k, numbers.weight_offset)
    count = len(op.inputs) + results + 1
    packed = call(*[None] * count).numbers()
    return Settled(
        _places(op),
        plan.made,
        count,
        plan.is_empty or not walk.rows,
        _row_workspace(plan.form),
        call,
        _backend.run_backward,
        partial(_backend.cpu_backward_kernels, plan.form, packed),
    )


def _row_workspace(form: BackwardForm) -> int:
    size = workspace_size(form.types.compute, form.where.walk, MOST_SMS)
    return form.parameters * size


def _group_forward(op: Op, device: Device) -> Settled:
    function, groups, *said = op.said
    groups = group_forward_plan.EACH_CHANNEL if groups is None else groups
    told = group_forward_plan.asked(function, groups, *said)
    results = len(group_forward_plan.FIELDS)
    plan = group_forward_plan.planned(told, op.forms(device) + (None,) * results)
    call = partial(GroupForward, plan.form, eps_of(op.numbers))
    return _settled_group(op, plan, call, op.numbers, results, is_empty=False)


def _group_backward(op: Op, device: Device) -> Settled:
    function, groups, activation, channel_axis, needs = op.said
    told = group_backward_plan.asked(function, groups, activation, channel_axis, needs, False)
    results = len(group_backward_plan.FIELDS)
    plan = group_backward_plan.planned(told, op.forms(device) + (None,) * results)
    call = partial(GroupBackward, plan.form)
    return _settled_group(op, plan, call, b"", results, is_empty=plan.is_empty)


def _settled_group(
    op: Op, plan: Any, call: Callable[..., Any], numbers: bytes, results: int, is_empty: bool
) -> Settled:
    return Settled(
        _places(op),
        plan.made,
        len(op.inputs) + results + 1,
        is_empty or not plan.form.where.samples,
        _run.most_workspace_bytes(plan.form),
        call,
        _run.run,
        partial(_run.cpu_kernels, plan.form, numbers),
    )


KINDS = {
    "row_forward": Kind(
        _row_forward, _forward_plan.Forms._fields, _forward_plan.FIELDS, x=0, gradients=()
    ),
    "row_backward": Kind(_row_backward, _backward_plan.Forms._fields, _backward_plan.FIELDS, x=1),
    "group_forward": Kind(
        _group_forward, group_forward_plan.INPUTS, group_forward_plan.FIELDS, x=0, gradients=()
    ),
    "group_backward": Kind(
        _group_backward, group_backward_plan.INPUTS, group_backward_plan.FIELDS, x=1
    ),
}
