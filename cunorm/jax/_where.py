# SPDX-License-Identifier: MIT
"""Row norms with `where`: statistics of some elements of a row, computed by XLA."""

from __future__ import annotations  # keeps the names of type aliases in help()

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from cunorm._core.dtypes import compute_type, dtype_of
from cunorm._core.operands import present
from cunorm._core.validate import shown
from cunorm._row_norm.order import row_order
from cunorm.jax import _ffi
from cunorm.jax._call import Call
from cunorm.jax._formulas import rounded
from cunorm.jax._norm import ArrayLike, Inputs, Norm, Results, checked


def masked_norm(
    norm: Norm, where: ArrayLike, axis_name: Any, scalars: tuple[Any, ...], arrays: Inputs
) -> Results:
    """Return y of a norm whose statistics are those of the elements where `where` is True."""
    spec, arrays, _ = checked(norm.forward, scalars, arrays)
    own = [None if one is None else jnp.asarray(one) for one in arrays]
    call = Call.on(norm.forward, spec, own)
    _ffi.check_x64(call)  # its plan also refuses wrong input
    given = dict(zip(norm.forward.inputs, own, strict=True))
    _check_alone(spec, axis_name, given["gate"])
    x = present(given["x"])
    y_dtype = present(dict(call.plan.outputs)[norm.forward.first_output]).dtype.name
    mask = _checked_where(spec.function, where, x.shape)
    return _formula(spec, y_dtype, mask, x, given["weight"], given["bias"]), None


def _check_alone(spec: Any, axis_name: Any, gate: Array | None) -> None:
    """Refuse what `where` does not combine with."""
    for name, is_given, expected in (
        ("axis_name", axis_name is not None, None),
        ("gate", gate is not None, None),
        ("groups", spec.groups != 1, 1),
    ):
        if is_given:
            raise ValueError(
                f"{spec.function}: {name} is given beside where, expected {name}={expected}"
            )


def _checked_where(function: str, where: ArrayLike, shape: tuple[int, ...]) -> Array:
    """Return `where` with x's shape."""
    try:
        mask = jnp.asarray(where)
    except TypeError:
        raise TypeError(f"{function}: where is {shown(where)}, expected a bool array") from None
    if mask.dtype != bool:
        raise TypeError(f"{function}: where has dtype {mask.dtype}, expected bool: pass where != 0")
    try:
        return jnp.broadcast_to(mask, shape)
    except ValueError:
        raise ValueError(
            f"{function}: where has shape {mask.shape}, expected one that broadcasts to {shape}, "
            "the shape of x"
        ) from None


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _formula(
    spec: Any, y_dtype: str, where: Array, x: Array, weight: Array | None, bias: Array | None
) -> Array:
    """Return y; every sum is over the True elements of a row, every other step over all."""
    order, leading_axes = row_order(spec.function, x.shape, spec.axis)
    axes = (order or tuple(range(x.ndim)))[leading_axes:]
    compute = compute_type(dtype_of(spec.function, "x", x.dtype)).name
    count = where.sum(axes, keepdims=True, dtype="int32").astype(compute)

    def mean(values: Array) -> Array:
        return jnp.where(where, values, 0).sum(axes, keepdims=True) / count

    q = x.astype(compute)
    if spec.center:
        q = q - mean(q)
        q = q - mean(q)  # what rounding left of the mean
    n = q * jax.lax.rsqrt(mean(q * q) + spec.eps)
    n = n if spec.c is None else n * (spec.c / jnp.sqrt(count))
    if spec.round_before_weight and x.dtype.name != compute:
        n = rounded(x.dtype.name, n)
    n = n if weight is None else n * (_beside(x, axes, weight).astype(compute) + spec.weight_offset)
    n = n if bias is None else n + _beside(x, axes, bias).astype(compute)
    return n.astype(y_dtype)


def _beside(x: Array, axes: tuple[int, ...], parameter: Array) -> Array:
    """Return a parameter, which may be a row, in a shape that broadcasts to x's."""
    if parameter.shape != tuple(x.shape[axis] for axis in axes):
        return parameter
    return jnp.expand_dims(parameter, [axis for axis in range(x.ndim) if axis not in axes])
