# SPDX-License-Identifier: MIT
"""A norm, its kernels in both directions, and its calls on arrays that JAX may trace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from cunorm._core.dtypes import DType
from cunorm._core.memo import memoize
from cunorm._core.operands import present
from cunorm._core.plan import OpDef, OpSpec, SpecT, backward_spec
from cunorm._core.tensor import HostArray
from cunorm._core.validate import array_hint, describe_type, shown
from cunorm._dispatch import parse
from cunorm._group_norm.plan import GROUP_JVP
from cunorm._group_norm.spec import jvp_spec as group_jvp_spec
from cunorm._row_norm.jvp_plan import ROW_JVP, ROW_SECOND
from cunorm._row_norm.jvp_spec import jvp_spec as row_jvp_spec
from cunorm._row_norm.jvp_spec import second_spec
from cunorm.jax import _ffi
from cunorm.jax._call import Call, OptionalArrays, gates_branch, replace_interned
from cunorm.jax._derivatives import Forward, push_by_formula
from cunorm.jax._formulas import group_formula, row_formula, second_by_formula
from cunorm.jax._linear import Named


class SupportsJaxArray(Protocol):
    """An object that jax.numpy accepts as an array, such as Flax's nnx.Param."""

    def __jax_array__(self) -> Array: ...


ArrayLike: TypeAlias = Array | HostArray | SupportsJaxArray
Inputs = tuple[Any, ...]  # an ArrayLike or None for each operand
Results = tuple[Array, Any]  # y, and the new residual stream or None
Outputs = dict[str, Array | None]

_ARRAYS = (Array, np.ndarray)


@dataclass(frozen=True, eq=False)
class Norm:
    forward: OpDef[Any]
    backward: OpDef[Any]
    corrects = False  # whether statistics have a correction of the mean
    formula = row_formula

    def __call__(self, scalars: tuple[Any, ...], arrays: Inputs) -> Results:
        spec, arrays, is_traced = checked(self.forward, scalars, arrays)
        if is_traced:
            return run_traced(self, spec, arrays)
        return _compiled(self.forward, spec)(arrays)

    def run(self, spec: Any, arrays: OptionalArrays, *, saves: bool) -> Outputs:
        """Return y and the new stream, with `saves` also the statistics of rows."""
        own = replace_interned(spec, saves=True) if saves else spec
        return _ffi.run(self.forward, own, arrays)

    def derive(self, spec: Any, x_dtype: DType, needs: tuple[str, ...], given: Outputs) -> Outputs:
        """Return the gradients of the operands in `needs`; `given` has the backward's inputs."""
        of_backward = backward_spec(self.backward, spec, x_dtype, needs)
        return _ffi.run(self.backward, of_backward, [*map(given.get, self.backward.inputs)])

    def push(self, call: Call, given: Named, saved: Named) -> Array:
        """Return y's tangent for those of x (the array that is normalised) and of others."""
        return push_by_formula(self, call, given, saved)

    def needs_bias(self, spec: Any, wanted: tuple[str, ...]) -> bool:
        """Return whether derivatives by the wanted operands need the bias."""
        return "gate" in wanted and spec.gate_position == "post"

    def second(self, spec: Any, arrays: Sequence[Array], statistics: Named) -> Array:
        """Return the derivative of a backward's dx without weight, for arrays dy, x_tangent, x."""
        return second_by_formula(self, spec, *arrays)

    def mean(self, rows: Array) -> Array:
        """Return the mean of each row, which is the last axis."""
        return rows.mean(-1, keepdims=True)

    def width(self, spec: Any, x: Array) -> int:
        """Return the number of elements of a row of x."""
        return prod(x.shape[spec.axis :]) // spec.groups


@dataclass(frozen=True, eq=False)
class RowNorm(Norm):
    """A norm of rows that are whole."""

    def push(self, call: Call, given: Named, saved: Named) -> Array:
        own = row_jvp_spec(call.spec, _y_dtype(call), present(call.inputs[0]).dtype)
        saved = saved | {"gate": None} if gates_branch(call.spec) else saved
        return _pushed(ROW_JVP, own, given, saved)

    def second(self, spec: Any, arrays: Sequence[Array], statistics: Named) -> Array:
        given = statistics | dict(zip(("dy", "x_tangent", "x"), arrays, strict=True))
        return _only_result(ROW_SECOND, second_spec(spec), given)


@dataclass(frozen=True, eq=False)
class GroupNorm(Norm):
    formula = group_formula

    def push(self, call: Call, given: Named, saved: Named) -> Array:
        given = {"x": jnp.zeros_like(saved["x"])} | given  # the kernel needs x's tangent
        return _pushed(GROUP_JVP, group_jvp_spec(call.spec, _y_dtype(call)), given, saved)

    def needs_bias(self, spec: Any, wanted: tuple[str, ...]) -> bool:
        return spec.activation != "identity"


def _pushed(op: OpDef[Any], spec: Any, given: Named, saved: Named) -> Array:
    tangents = {f"{name}_tangent": one for name, one in given.items()}
    return _only_result(op, spec, saved | tangents)


def _only_result(op: OpDef[Any], spec: Any, given: Named) -> Array:
    (found,) = _ffi.run(op, spec, [*map(given.get, op.inputs)]).values()
    return present(found)


def _y_dtype(call: Call) -> DType:
    return present(dict(call.plan.outputs)[call.op.first_output]).dtype


def checked(
    op: OpDef[SpecT], scalars: tuple[Any, ...], arrays: Inputs
) -> tuple[SpecT, Inputs, bool]:
    """Return the OpSpec of a call, its arrays as JAX's or NumPy's, and whether one is traced."""
    is_traced = False
    for slot, array in enumerate(arrays):
        if array is None and not op.required[slot]:
            continue
        if isinstance(array, Tracer):
            is_traced = True
        elif not isinstance(array, _ARRAYS):
            if hasattr(array, "__jax_array__"):  # jax.numpy converts nnx.Param by this method
                own = array.__jax_array__()
                return checked(op, scalars, (*arrays[:slot], own, *arrays[slot + 1 :]))
            argument, got = f"{scalars[0]}: {op.inputs[slot]}", describe_type(type(array))
            hint = array_hint(scalars[0], op.inputs[slot], array)
            raise TypeError(f"{argument} is {got}, expected a JAX or NumPy array{hint}")
    try:
        return parse(op, scalars), arrays, is_traced
    except TypeError as error:
        raise _of_traced_scalars(error, scalars) from None


def _of_traced_scalars(error: TypeError, scalars: tuple[Any, ...]) -> TypeError:
    """Return the error or, if JAX traces the wrong scalar, an error that says this and a remedy."""
    for one in scalars:
        scalar = one[0] if isinstance(one, tuple) and one else one  # c's `typed_key` begins with c
        wrong = f" is {shown(scalar)}, "
        if isinstance(scalar, Tracer) and wrong in str(error):
            text = str(error).replace(wrong, " is traced by JAX, ")
            remedy = "under jax.jit, bind it with functools.partial or name it in static_argnames"
            return TypeError(f"{text}: {remedy}")
    return error


@memoize()
def _compiled(op: OpDef[SpecT], spec: SpecT) -> Callable[[Inputs], Results]:
    """Return the forward as a function that JAX compiles for each set of shapes and dtypes.

    The function is for arrays that nobody differentiates.
    """

    def function(arrays: Inputs) -> Results:
        return _y_and_stream(_ffi.run(op, spec, _ffi.match_varying_axes(arrays)))

    return jax.jit(function, inline=True)


def run_traced(norm: Norm, spec: OpSpec, arrays: Inputs) -> Results:
    """Return the results for arrays that JAX transforms, perhaps for a derivative."""
    own = [jnp.asarray(one) if isinstance(one, np.ndarray) else one for one in arrays]
    given = _ffi.match_varying_axes(own)
    call = Call.on(norm.forward, spec, given)
    _ffi.check_x64(call)  # its plan also refuses wrong input
    function = Forward(norm, call)
    found = function.bind(*[one for one in given if one is not None])
    return _y_and_stream(dict(zip(function.names, found, strict=True)))


def _y_and_stream(outputs: dict[str, Any]) -> Results:
    return outputs["y"], outputs.get("residual")
