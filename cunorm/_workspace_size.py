# SPDX-License-Identifier: MIT
"""How much memory a call takes for what its kernels hand on, for callers that give it."""

from __future__ import annotations

from typing import Any, NamedTuple

from cunorm import _checks, _outputs
from cunorm._arrays import Form, describe
from cunorm._dtypes import FLOAT32, FLOAT64, parse_optional_dtype
from cunorm.group_norm._backward_plan import NEEDS as GROUP_NEEDS
from cunorm.group_norm._workspace_size import backward_size, forward_size
from cunorm.row_norm._backward_plan import NEEDS
from cunorm.row_norm._workspace import workspace_bytes

_FUNCTION = "workspace_size"


class _Told(NamedTuple):
    """The arguments that say how the function is called, as they are by default."""

    weight: Any = None
    bias: Any = None
    axis: Any = -1
    groups: Any = 1
    x_dtype: Any = None
    needs: Any = NEEDS
    num_groups: Any = None
    channel_axis: Any = -1


_OF_ROWS = ("axis", "groups")
_OF_CHANNELS = ("weight", "bias", "channel_axis")
# Of those arguments, what each function takes.
_TAKEN: dict[str, tuple[str, ...]] = {
    "normalize_backward": (*_OF_ROWS, "weight", "bias", "x_dtype", "needs"),
    "rms_norm_backward": (*_OF_ROWS, "weight", "x_dtype", "needs"),
    "layer_norm_backward": (*_OF_ROWS, "weight", "bias", "x_dtype", "needs"),
    "l2_norm_backward": _OF_ROWS,
    "group_norm": (*_OF_CHANNELS, "num_groups"),
    "instance_norm": _OF_CHANNELS,
    "group_norm_forward": (*_OF_CHANNELS, "num_groups"),
    "group_norm_backward": (*_OF_CHANNELS, "num_groups", "needs"),
}


def workspace_size(
    op: str,
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    axis: int = -1,
    groups: int = 1,
    x_dtype: Any = None,
    needs: tuple[str, ...] = NEEDS,
    num_groups: int | None = None,
    channel_axis: int = -1,
) -> int:
    """Return how large the workspace of a function has to be, in bytes.

    A row norm's backward adds up dweight and dbias in parts, as many as keep the device busy, and
    then adds up the parts. A group norm's kernels hand on the statistics of parts of a sample,
    those of its backward also the sums for dweight and dbias of each part of it. Of the arrays only
    shape, dtype, device and, of a group norm's x, the memory layout matter: the size is the same
    for each call on arrays of those, and so is enough for a training loop.

    Parameters
    ----------
    op : str
        The name of the function: "normalize_backward", "rms_norm_backward", "layer_norm_backward"
        or "l2_norm_backward", which has no parameters, and so takes no workspace; "group_norm",
        "instance_norm", "group_norm_forward" or "group_norm_backward".
    x, weight, bias : array
        As the function gets them; weight and bias are None where it gets none.
    axis, groups : int, optional
        As a row norm gets them.
    x_dtype : dtype, optional
        As a row norm gets it; or the dtype of ``out.dx``, if that says it.
    needs : tuple of str, optional
        As a backward gets it; the default means every operand that it has.
    num_groups, channel_axis : int, optional
        As a group norm gets them: all but "instance_norm" take num_groups.

    Returns
    -------
    int
        A number of bytes that the function takes as its `workspace`, whatever the dtypes and the
        strides of its other operands; on a CPU the least one. It is 0 where a row norm's backward
        computes neither dweight nor dbias, and may be for a group norm.

    Raises
    ------
    TypeError, ValueError
        As the function does, and if `op` is not among those names or does not take what is given.
    ImportError
        If x is on CUDA and CuPy is not installed.

    Examples
    --------
    Of the memory for the results and for the sums, nothing is allocated by the second call:

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

    An image of four channels in two groups is normalised in place, with no allocation at all:

    >>> image = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    >>> workspace = np.empty(cunorm.workspace_size("group_norm", image, num_groups=2), np.uint8)
    >>> cunorm.group_norm(image, 2, out=image, workspace=workspace)[0, 0, 0].round(2)
    array([-1.53, -1.39, -1.53, -1.39], dtype=float32)
    """
    _checks.choice(_FUNCTION, "op", op, _TAKEN)
    told = _Told(weight, bias, axis, groups, x_dtype, needs, num_groups, channel_axis)
    told = _checked(op, told)
    form = describe(_FUNCTION, "x", x).form
    told = told._replace(weight=_form("weight", weight), bias=_form("bias", bias))
    return (_of_rows if "axis" in _TAKEN[op] else _of_channels)(op, form, told)


def _checked(op: str, told: _Told) -> _Told:
    """Check the arguments by themselves, and that none is given that the function has not."""
    taken = _TAKEN[op]
    numbers = {
        name: _checks.integer(_FUNCTION, name, getattr(told, name))
        for name in ("axis", "groups", "channel_axis", "num_groups")
        if name != "num_groups" or name in taken
    }
    x_dtype = parse_optional_dtype(_FUNCTION, "x_dtype", told.x_dtype)
    told = told._replace(**numbers, x_dtype=x_dtype, needs=_needs(op, told.needs))
    for name, default in _Told._field_defaults.items():
        given = getattr(told, name)
        if name in taken or (given is default if default is None else given == default):
            continue
        if default is None:
            _outputs.refuse(_FUNCTION, name, given, f"{op} has none")
        raise ValueError(f"{_FUNCTION}: {name} is {given!r}, expected the default: {op} has none")
    return told


def _needs(op: str, given: Any) -> tuple[str, ...]:
    """Return the operands whose gradients are wanted, in the order of the default."""
    is_default = isinstance(given, tuple) and given == NEEDS
    has_gate = is_default or op != "group_norm_backward"
    wanted = _checks.names(_FUNCTION, "needs", given, NEEDS if has_gate else GROUP_NEEDS)
    return tuple(name for name in NEEDS if name in wanted)


def _form(name: str, parameter: Any) -> Form | None:
    return None if parameter is None else describe(_FUNCTION, name, parameter).form


def _of_rows(op: str, x: Form, told: _Told) -> int:
    where = _checks.geometry(_FUNCTION, x, told.axis, told.groups)
    parameters = 0
    for name, parameter in (("weight", told.weight), ("bias", told.bias)):
        _checks.param_shape(_FUNCTION, name, parameter, where)
        _checks.same_device(_FUNCTION, x, [(name, parameter)])
        parameters += parameter is not None and name in told.needs
    compute = FLOAT64 if FLOAT64 in (x.dtype, told.x_dtype) else FLOAT32
    return workspace_bytes(where, compute, parameters, x.device)


def _of_channels(op: str, x: Form, told: _Told) -> int:
    inputs, where = (x, told.weight, told.bias), (told.num_groups, told.channel_axis)
    if op != "group_norm_backward":
        return forward_size(_FUNCTION, inputs, *where)
    needs = tuple(name for name in told.needs if name in GROUP_NEEDS)
    return backward_size(_FUNCTION, inputs, *where, needs)
