# SPDX-License-Identifier: MIT
"""The norms of `flax.nnx` as subclasses whose computation is cunorm's; they need Flax.

`LayerNorm`, `RMSNorm`, `GroupNorm` and `InstanceNorm` have the arguments, parameters, state and
dtypes of Flax's classes, so a checkpoint loads both ways. A call goes to the function of
`cunorm.jax` with the same name if that has the formula:

- `reduction_axes` of row norms are one axis or neighbours, and `feature_axes` are among them;
- a group norm reduces all axes but the first; an instance norm has one feature axis, 1 or the last;
- `mask` is given only to a row norm, whose statistics XLA then computes (see `cunorm.jax`);
- `axis_name` is None, x has an element, and x and the parameters are promoted to float16, bfloat16,
  float32 or float64.

Any other call is computed by Flax. `use_fast_variance` has no effect on cunorm's calls, which are
as if it were False: the variance is the mean of squared differences from the mean.

>>> import jax.numpy as jnp, numpy as np
>>> from flax import nnx
>>> import cunorm.jax.nnx
>>> norm = cunorm.jax.nnx.LayerNorm(2, rngs=nnx.Rngs(0))
>>> np.asarray(norm(jnp.array([[3.0, 7.0]]))).round(3)
array([[-1.,  1.]], dtype=float32)
"""

from __future__ import annotations  # keeps the names of type aliases in help()

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from cunorm._core.dtypes import DTYPES
from cunorm.jax import _functions as norms
from cunorm.jax._norm import ArrayLike

__all__ = ["GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm"]


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm`, computed by `cunorm.jax.layer_norm`; the module says when."""

    def __call__(self, x: ArrayLike, *, mask: ArrayLike | None = None) -> Array:
        """Return y; with a mask, statistics are those of the elements where it is True."""
        call = _row_call(self, x, mask, weight=self.scale, bias=self.bias)
        return super().__call__(x, mask=mask) if call is None else norms.layer_norm(**call)


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm`, computed by `cunorm.jax.rms_norm`; the module says when."""

    def __call__(self, x: ArrayLike, mask: ArrayLike | None = None) -> Array:
        """Return y; with a mask, statistics are those of the elements where it is True."""
        call = _row_call(self, x, mask, weight=self.scale)
        return super().__call__(x, mask=mask) if call is None else norms.rms_norm(**call)


class GroupNorm(nnx.GroupNorm):
    """`flax.nnx.GroupNorm`, computed by `cunorm.jax.group_norm`; the module says when."""

    def __call__(self, x: ArrayLike, *, mask: ArrayLike | None = None) -> Array:
        """Return y; with a mask, Flax computes it."""
        call = _call(self, x, weight=self.scale, bias=self.bias)
        if call is not None and mask is None:
            *samples, channels = call["x"].shape
            usual, axes = range(1, len(samples) + 1), self.reduction_axes
            is_usual = axes is None or _axes(axes, len(samples) + 1) == [*usual]
            if is_usual and channels == self.num_groups * self.group_size:
                return norms.group_norm(num_groups=self.num_groups, **call)
        return super().__call__(x, mask=mask)


class InstanceNorm(nnx.InstanceNorm):
    """`flax.nnx.InstanceNorm`, computed by `cunorm.jax.instance_norm`; the module says when."""

    def __call__(self, x: ArrayLike, *, mask: ArrayLike | None = None) -> Array:
        """Return y; with a mask, Flax computes it."""
        call = _call(self, x, weight=self.scale, bias=self.bias)
        if call is not None and mask is None:
            ndim = call["x"].ndim
            axes = _axes(self.feature_axes, ndim)
            if axes in ([1], [ndim - 1]):
                return norms.instance_norm(channel_axis=axes[0], **call)
        return super().__call__(x, mask=mask)


def _call(norm: Any, x: ArrayLike, **parameters: Any) -> dict[str, Any] | None:
    """Return the arguments of a norm, promoted as Flax does; None if cunorm has no such norm."""
    given = (x, *(None if one is None else one[...] for one in parameters.values()))
    operands = dict(
        zip(("x", *parameters), norm.promote_dtype(given, dtype=norm.dtype), strict=True)
    )
    dtypes = [one.dtype.name for one in operands.values() if one is not None]
    y_dtype = jnp.dtype(norm.dtype or jnp.result_type(*dtypes)).name
    # In cunorm float64 is the type of the arithmetic if x has it; in Flax also if only y has it.
    is_same_type = (dtypes[0] == "float64") == (y_dtype == "float64")
    is_known = is_same_type and {*dtypes, y_dtype} <= {*DTYPES}
    if norm.axis_name is not None or not is_known or operands["x"].size == 0:
        return None
    return {**operands, "eps": norm.epsilon, "dtype": y_dtype}


def _row_call(
    norm: Any, x: ArrayLike, mask: ArrayLike | None, **parameters: Any
) -> dict[str, Any] | None:
    """Return the arguments of a row norm; None if cunorm has no such norm."""
    call = _call(norm, x, **parameters)
    if call is None:
        return None
    ndim, row = call["x"].ndim, _axes(norm.reduction_axes, call["x"].ndim)
    features = _axes(norm.feature_axes, ndim)
    if not row or row != [*range(row[0], row[-1] + 1)] or not {*features} <= {*row}:
        return None
    sizes = [call["x"].shape[axis] for axis in row]
    of_features = [size if axis in features else 1 for axis, size in zip(row, sizes, strict=True)]
    for name in parameters:
        if call[name] is not None:  # one parameter may serve several axes of a row
            call[name] = jnp.broadcast_to(call[name].reshape(of_features), sizes)
    axis = -len(row) if row[-1] == ndim - 1 else tuple(row)
    return {**call, "axis": axis, "where": mask}


def _axes(axes: int | Iterable[int], ndim: int) -> list[int]:
    """Return the axes counted from the first one, in order, as Flax does."""
    given = axes if isinstance(axes, Iterable) else (axes,)
    return sorted({axis + ndim if axis < 0 else axis for axis in given})
