# SPDX-License-Identifier: MIT
"""Norms of rows that are split over an axis of devices: `axis_name` of the row norms.

Forward, each device finds the moments of its part of a row, all devices gather them (12 bytes a row
for each device with center, else 4; twice as many in float64), and each combines them in the order
of the devices. So all devices have equal statistics. The gradient of x needs the sums over whole
rows, which are gathered likewise (8 bytes a row or 4).
"""

from __future__ import annotations  # keeps the names of type aliases in help()

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from cunorm._core.dtypes import DType, dtype_of
from cunorm._core.operands import present
from cunorm._core.plan import OpSpec
from cunorm._row_norm.combine_plan import COMBINE_MOMENTS
from cunorm._row_norm.plan import ROW_BACKWARD, ROW_FORWARD
from cunorm._row_norm.split import count_of
from cunorm._row_norm.split_plan import ROW_GIVEN, ROW_GIVEN_SUMS, ROW_MOMENTS, ROW_SUMS
from cunorm._row_norm.split_spec import (
    combine_spec,
    given_spec,
    given_sums_spec,
    moments_spec,
    sums_spec,
)
from cunorm.jax import _ffi
from cunorm.jax._call import OptionalArrays
from cunorm.jax._norm import (
    ArrayLike,
    Inputs,
    Norm,
    Outputs,
    Results,
    RowNorm,
    checked,
    run_traced,
)
from cunorm.jax._where import masked_norm

AxisName: TypeAlias = str | tuple[str, ...]

_WHOLE = RowNorm(ROW_FORWARD, ROW_BACKWARD)


def row_norm(
    axis_name: AxisName | None, where: ArrayLike | None = None
) -> Callable[[tuple[Any, ...], Inputs], Results]:
    """Return the norm of rows that are whole or, with a name, split over an axis of devices.

    With `where`, it is the norm with statistics of some elements of each row.
    """
    if where is not None:
        return partial(masked_norm, _WHOLE, where, axis_name)
    return _WHOLE if axis_name is None else SplitNorm(ROW_FORWARD, ROW_GIVEN_SUMS, axis_name)


@dataclass(frozen=True)
class SplitNorm(Norm):
    axis_name: AxisName
    size: int = 0  # the number of devices that share a row
    corrects = True

    def __call__(self, scalars: tuple[Any, ...], arrays: Inputs) -> Results:
        spec, arrays, _ = checked(self.forward, scalars, arrays)
        if spec.groups != 1:
            raise ValueError(
                f"{spec.function}: axis_name is {self.axis_name!r} and groups is {spec.groups}, "
                "expected groups=1: give each device whole groups, and leave axis_name out"
            )
        size = self._size_of_axis(spec)
        if size == 1:
            return _WHOLE(scalars, arrays)
        self._check_split(spec, arrays)
        return run_traced(replace(self, size=size), spec, arrays)

    def _size_of_axis(self, spec: OpSpec) -> int:
        """Return the number of devices that share a row."""
        # An axis of jax.vmap would do for y, but JAX runs the gradient outside of such an axis.
        axes, names = tuple(jax.sharding.get_abstract_mesh().manual_axes), self._names
        are_known = all(name in axes for name in names)
        if not names or not are_known or len(set(names)) < len(names):
            raise ValueError(
                f"{spec.function}: axis_name is {self.axis_name!r}, expected the name of an axis "
                "of jax.shard_map around this call, or a tuple of different names"
            )
        return jax.lax.axis_size(names)

    @property
    def _names(self) -> tuple[str, ...]:
        return self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)

    def _check_split(self, spec: OpSpec, arrays: Inputs) -> None:
        """Refuse rows that are known to be equal on all devices of the axis."""
        found = frozenset().union(*(_ffi.varying(one) for one in arrays if one is not None))
        for name in self._names:
            # With check_vma=False, no array is known to vary, not even an index.
            known = jax.eval_shape(partial(jax.lax.axis_index, name)).manual_axis_type
            if known is not None and name in known.varying - found:
                raise ValueError(
                    f"{spec.function}: axis_name is {self.axis_name!r}, but x does not vary over "
                    f"{name!r}, expected rows that are split over it: leave it out for whole rows"
                )

    def run(self, spec: Any, arrays: OptionalArrays, *, saves: bool) -> Outputs:
        del saves  # the statistics are always there
        given = dict(zip(self.forward.inputs, arrays, strict=True))
        x, gate, position = present(given["x"]), given["gate"], spec.gate_position
        inputs = (x, None if position == "post" else gate, given["residual"])
        moments = _ffi.run(ROW_MOMENTS, moments_spec(spec), inputs)
        statistics, stream = self._statistics(spec, moments, x), moments["residual"]
        given |= {"x": x if stream is None else stream, **statistics}
        if position == "branch":
            given["gate"] = None
        x_dtype = dtype_of(spec.function, "x", x.dtype)
        own = given_spec(spec, x_dtype, self.width(spec, x))
        y = _ffi.run(ROW_GIVEN, own, [*map(given.get, ROW_GIVEN.inputs)])
        return {**y, "residual": stream, **statistics}

    def width(self, spec: Any, x: Array) -> int:
        """Return the number of elements of a whole row."""
        return count_of(x, spec.axis, 1) * self.size

    def mean(self, rows: Array) -> Array:
        return jax.lax.pmean(rows.mean(-1, keepdims=True), self._names)

    def _statistics(self, spec: Any, moments: Outputs, x: Array) -> Outputs:
        """Return the statistics of whole rows from the moments of the parts."""
        names = ("mean", "correction", "m2") if spec.center else ("m2",)
        parts = self._gathered(moments, names)
        own = combine_spec(spec, self.width(spec, x), count_of(x, spec.axis, 1))
        inputs = [parts.get(one.removeprefix("moments.")) for one in COMBINE_MOMENTS.inputs]
        return _ffi.run(COMBINE_MOMENTS, own, inputs)

    def _gathered(self, arrays: Outputs, names: tuple[str, ...]) -> dict[str, Array]:
        """Return the arrays of all devices, on a new first axis, by one exchange."""
        own = jnp.stack([present(arrays[name]) for name in names])
        found = jax.lax.all_gather(own, self._names)
        return {name: found[:, number] for number, name in enumerate(names)}

    def derive(self, spec: Any, x_dtype: DType, needs: tuple[str, ...], given: Outputs) -> Outputs:
        needs_sums = "x" in needs or ("gate" in needs and spec.gate_position != "post")
        if needs_sums and given.get("sums.sum_r_dr") is None:
            given = given | self._sums(spec, given)
        count = self.width(spec, present(given["x"]))
        own = given_sums_spec(spec, count, x_dtype=x_dtype, needs=needs, accumulate=False)
        return _ffi.run(ROW_GIVEN_SUMS, own, [*map(given.get, ROW_GIVEN_SUMS.inputs)])

    def _sums(self, spec: Any, given: Outputs) -> Outputs:
        """Return the sums over whole rows, which are added in the same order on all devices."""
        inputs = {**given, "gate": None} if spec.gate_position == "branch" else given
        sums = _ffi.run(ROW_SUMS, sums_spec(spec), [*map(inputs.get, ROW_SUMS.inputs)])
        names = tuple(name for name, one in sums.items() if one is not None)
        parts = self._gathered(sums, names)
        return {f"sums.{name}": one.sum(0) for name, one in parts.items()}
