# SPDX-License-Identifier: MIT
"""`workspace_size`: the bytes of workspace that a call needs, for callers that pass one."""

from __future__ import annotations  # keeps the names of type aliases in help()

from collections.abc import Collection
from inspect import signature
from itertools import product
from typing import Any

from cunorm import _group_norm, _row_norm
from cunorm._arrays.registry import view_all
from cunorm._core import validate
from cunorm._core.calls import check_operand
from cunorm._core.dtypes import DTYPES, compute_type, parse_optional_dtype
from cunorm._core.operands import Kind, Specs
from cunorm._core.plan import OpDef
from cunorm._core.tensor import contiguous
from cunorm._core.types import Axis, DTypeLike, GatePosition, Needs, SupportsDLPack
from cunorm._dispatch.loading import caps_for
from cunorm._group_norm.kernels import backward_inputs, forward_inputs
from cunorm._group_norm.layout import group_geometry
from cunorm._group_norm.plan import GROUP_BACKWARD, GROUP_FORWARD
from cunorm._group_norm.spec import EACH_CHANNEL, backward_scalars, forward_scalars
from cunorm._group_norm.spec import NEEDS as GROUP_NEEDS
from cunorm._row_norm.geometry import row_geometry
from cunorm._row_norm.kernels import PARAMETERS, TABLE
from cunorm._row_norm.plan import workspace_bound
from cunorm._row_norm.spec import CHECKS, NEEDS
from cunorm.results import GroupNormGrads

_FUNCTION = "workspace_size"
_ARRAYS = ("x", "weight", "bias", "gate")
_OPS = (
    *("normalize_backward", "rms_norm_backward", "layer_norm_backward", "l2_norm_backward"),
    *("group_norm", "instance_norm", "group_norm_forward", "group_norm_backward"),
)


def workspace_size(
    op: str,
    x: SupportsDLPack,
    weight: SupportsDLPack | None = None,
    bias: SupportsDLPack | None = None,
    *,
    axis: Axis = -1,
    groups: int = 1,
    x_dtype: DTypeLike | None = None,
    gate: SupportsDLPack | None = None,
    gate_position: GatePosition = "post",
    needs: Needs = NEEDS,
    num_groups: int | None = None,
    channel_axis: int = -1,
) -> int:
    """Return the bytes of workspace that a function needs.

    A backward keeps partial sums of dweight, dbias and a shared gate's dgate there. A group norm
    keeps the statistics of parts of a sample and, in a backward on a CPU, what the first pass
    stores for the last. The size depends on the shapes, dtypes and device of the arrays and, for a
    group norm, on the memory layout of x, so a training loop asks for it once.

    Parameters
    ----------
    op : str
        The name of the function: "normalize_backward", "rms_norm_backward", "layer_norm_backward",
        "l2_norm_backward" (which needs none), "group_norm", "instance_norm", "group_norm_forward"
        or "group_norm_backward".
    x, weight, bias, gate : array
        As the function gets them; None for an operand that it does not get.
    axis, groups, gate_position, needs, num_groups, channel_axis : optional
        As the function gets them. By default `needs` has every operand that there is.
    x_dtype : dtype, optional
        As a row norm gets it, or the dtype of ``out.dx``.

    Returns
    -------
    int
        Bytes that suffice for any dtypes and strides of the other operands; on a CPU, the minimum.
        0 for a row norm's backward without dweight and dbias, and for some group norms.

    Raises
    ------
    TypeError, ValueError
        As the function does, and if `op` is not one of these names or does not take an option.
    ImportError
        If x is on CUDA and CuPy is not installed.

    Examples
    --------
    This backward allocates no memory for results and sums:

    >>> import numpy as np
    >>> import cunorm
    >>> x, weight = np.array([[1, 7]], dtype=np.float32), np.ones(2, dtype=np.float32)
    >>> rstd = cunorm.rms_norm_forward(x, weight).rstd
    >>> size = cunorm.workspace_size("rms_norm_backward", x, weight)
    >>> workspace = np.empty(size, dtype=np.uint8)
    >>> out = cunorm.NormGrads(dx=np.empty_like(x), dweight=np.empty_like(weight))
    >>> grads = cunorm.rms_norm_backward(x, x, weight, rstd=rstd, out=out, workspace=workspace)
    >>> grads.dweight is out.dweight, out.dweight.round(4)
    (True, array([0.2, 9.8], dtype=float32))

    Four channels of an image, in two groups, are normalised in place without any allocation:

    >>> image = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    >>> workspace = np.empty(cunorm.workspace_size("group_norm", image, num_groups=2), np.uint8)
    >>> cunorm.group_norm(image, 2, out=image, workspace=workspace)[0, 0, 0].round(2)
    array([-1.53, -1.39, -1.53, -1.39], dtype=float32)
    """
    arguments = locals()
    validate.choice(_FUNCTION, "op", op, _OPS)
    options = {name: arguments[name] for name in _DEFAULTS}
    family = _group_norm if op in _group_norm.__all__ else _row_norm
    _check(op, options, signature(getattr(family, op)).parameters)
    views = view_all(_FUNCTION, _ARRAYS, (x, weight, bias, gate), (True, False, False, False))
    *specs, options["gate"] = [view and view.spec for view in views]
    if family is _row_norm:
        return _of_rows(specs, options)
    return (_of_group_backward if "backward" in op else _of_group_forward)(specs, options)


_PARAMETERS = signature(workspace_size).parameters
_DEFAULTS = {name: one.default for name, one in _PARAMETERS.items() if name not in ("op", "x")}


def _check(op: str, options: dict[str, Any], taken: Collection[str]) -> None:
    """Check and parse each option, and check that the function takes the options that are set."""
    needs, reason = options["needs"], f"{op} has none"
    options["axis"] = validate.axes(_FUNCTION, "axis", options["axis"])
    for name in ("groups", "channel_axis", "num_groups"):
        if name != "num_groups" or name in taken:
            options[name] = validate.integer(_FUNCTION, name, options[name])
    choice = CHECKS["gate_position"]
    options["gate_position"] = choice(_FUNCTION, "gate_position", options["gate_position"])
    options["x_dtype"] = parse_optional_dtype(_FUNCTION, "x_dtype", options["x_dtype"])
    is_default = isinstance(needs, tuple) and needs == NEEDS
    allowed = NEEDS if is_default or op != "group_norm_backward" else GROUP_NEEDS
    options["needs"] = validate.names(_FUNCTION, "needs", needs, allowed)
    for name, default in _DEFAULTS.items():
        value = options[name]
        if name not in taken and default is None:
            validate.absent(_FUNCTION, name, value, reason)
        elif name not in taken and value != default:
            raise ValueError(f"{_FUNCTION}: {name} is {value!r}, expected the default: {reason}")


def _of_rows(specs: list[Any], options: dict[str, Any]) -> int:
    x, weight, bias = specs
    compute, position = compute_type(x.dtype, options["x_dtype"]), options["gate_position"]
    if options["gate"] is None and position != "post":
        raise ValueError(
            f"{_FUNCTION}: gate_position is {position!r}, expected 'post' as gate is None"
        )
    is_branch = position == "branch"
    rows = options["axis"], options["groups"]
    geometry = row_geometry(_FUNCTION, x, compute, *rows, branch_gate=is_branch)
    named: Specs = {"weight": weight, "bias": bias, "gate": options["gate"]}
    for slot in TABLE.forward_inputs:
        if slot.name in named:
            check_operand(_FUNCTION, slot.argument, slot, named[slot.name], geometry)
    validate.same_device(_FUNCTION, x, named.items())
    gate = named.pop("gate") if is_branch and "gate" in options["needs"] else None
    given = {name: named[name] for name in PARAMETERS if named[name]}
    segments = geometry.segments_with(_FUNCTION, given, gate)
    own = {*(segments.of_row if segments else ())}
    wanted = len((given.keys() - own) & {*options["needs"]})
    wanted += gate is not None and not geometry.is_of_row(gate)
    return workspace_bound(geometry, wanted, segments, caps_for(None, x.device)) if wanted else 0


def _of_group_forward(specs: list[Any], options: dict[str, Any]) -> int:
    """Return the largest size over all dtypes of y."""
    x, weight, bias = specs
    groups = EACH_CHANNEL if options["num_groups"] is None else options["num_groups"]
    norm = _FUNCTION, groups, None, options["channel_axis"]
    arrays = (*forward_inputs(x, weight=weight, bias=bias), *GROUP_FORWARD.no_outputs)
    return max(
        _planned_size(GROUP_FORWARD, forward_scalars(*norm, dtype=dtype), arrays)
        for dtype in DTYPES
    )


def _of_group_backward(specs: list[Any], options: dict[str, Any]) -> int:
    """Return the largest size over all dtypes of dy and dx."""
    x, weight, bias = specs
    needs = tuple(name for name in options["needs"] if name in GROUP_NEEDS)
    groups, axis = options["num_groups"], options["channel_axis"]
    geometry = group_geometry(_FUNCTION, x, groups, axis)
    statistic = contiguous(geometry.shape_of(Kind.STATISTIC), geometry.compute, x.device)
    operands = {"weight": weight, "bias": bias, "mean": statistic, "rstd": statistic}
    scalars = backward_scalars(_FUNCTION, groups, None, axis, needs=needs)
    like_x = [geometry.new_output(x, Kind.LIKE_X, dtype, x.shape) for dtype in DTYPES.values()]
    return max(
        _planned_size(
            GROUP_BACKWARD, scalars, (*backward_inputs(dy, x, **operands), *GroupNormGrads(dx))
        )
        for dy, dx in product(like_x, like_x if "x" in needs else [None])
    )


def _planned_size(op: OpDef[Any], scalars: tuple[Any, ...], specs: tuple[Any, ...]) -> int:
    plan = op.plan(op.parse(*scalars), specs)
    return plan.workspace_bound(caps_for(plan, specs[op.x].device))
