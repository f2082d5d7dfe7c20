# SPDX-License-Identifier: MIT
"""How much memory a backward takes for partial sums, for callers that give it."""

from __future__ import annotations

from typing import Any

from cunorm import _checks, _outputs
from cunorm._arrays import describe
from cunorm._dtypes import FLOAT32, FLOAT64, parse_optional_dtype
from cunorm.row_norm._backward_plan import NEEDS
from cunorm.row_norm._workspace import workspace_bytes

# Of the arguments below, what each function takes.
_TAKEN: dict[str, tuple[str, ...]] = {
    "normalize_backward": ("weight", "bias", "x_dtype", "needs"),
    "rms_norm_backward": ("weight", "x_dtype", "needs"),
    "layer_norm_backward": ("weight", "bias", "x_dtype", "needs"),
    "l2_norm_backward": (),
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
) -> int:
    """Return how large the workspace of a backward has to be, in bytes.

    A backward adds up dweight and dbias in parts, as many as keep the device busy, and then adds up
    the parts. Of the arrays only shape, dtype and device matter: the size is the same for each call
    on arrays of those, and so is enough for a training loop.

    Parameters
    ----------
    op : str
        The name of the function: "normalize_backward", "rms_norm_backward", "layer_norm_backward"
        or "l2_norm_backward", which has no parameters, and so takes no workspace.
    x, weight, bias : array
        As the function gets them; weight and bias are None where it gets none.
    axis, groups, needs : int, int and tuple of str, optional
        As the function gets them.
    x_dtype : dtype, optional
        As the function gets it; or the dtype of ``out.dx``, if that says it.

    Returns
    -------
    int
        The least number of bytes that the function takes as its `workspace`; 0 where neither
        dweight nor dbias is computed. It may use fewer.

    Raises
    ------
    TypeError, ValueError
        As `normalize` does, and if `op` is not among those names or does not take what is given.
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
    """
    function = "workspace_size"
    taken = _TAKEN[_checks.choice(function, "op", op, _TAKEN)]
    axis = _checks.integer(function, "axis", axis)
    groups = _checks.integer(function, "groups", groups)
    asked_dtype = parse_optional_dtype(function, "x_dtype", x_dtype)
    wanted = _checks.names(function, "needs", needs, NEEDS)
    for name, given in (("weight", weight), ("bias", bias), ("x_dtype", x_dtype)):
        if name not in taken:
            _outputs.refuse(function, name, given, f"{op} has none")
    if "needs" not in taken and wanted != set(NEEDS):
        raise ValueError(f"{function}: needs is {needs!r}, expected the default: {op} has none")
    form = describe(function, "x", x).form
    where = _checks.geometry(function, form, axis, groups)
    parameters = 0
    for name, array in (("weight", weight), ("bias", bias)):
        if array is None:
            continue
        parameter = describe(function, name, array).form
        _checks.param_shape(function, name, parameter, where)
        _checks.same_device(function, form, [(name, parameter)])
        parameters += name in wanted
    compute = FLOAT64 if FLOAT64 in (form.dtype, asked_dtype) else FLOAT32
    return workspace_bytes(where, compute, parameters, form.device)
