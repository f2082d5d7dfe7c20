# SPDX-License-Identifier: MIT
"""A norm that JAX differentiates: its forward, and its gradients in reverse mode."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from cunorm._core.dtypes import DType, dtype_of
from cunorm._core.memo import memoize
from cunorm._core.plan import OpDef, OpSpec, SpecT, backward_spec
from cunorm._core.tensor import HostArray
from cunorm._core.validate import array_hint, describe_type, shown
from cunorm._dispatch import parse
from cunorm.jax import _ffi
from cunorm.jax._call import Call, OptionalArrays, gates_branch, replace_interned


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

    The function is for arrays that nobody differentiates. It has no `custom_vjp`, because several
    calls share it, and derivatives must not share what a `custom_vjp` notes of a trace.
    """

    def function(arrays: Inputs) -> Results:
        return _y_and_stream(_ffi.run(op, spec, _ffi.match_varying_axes(arrays)))

    return jax.jit(function, inline=True)


def run_traced(norm: Norm, spec: OpSpec, arrays: Inputs) -> Results:
    """Return the results for arrays that JAX transforms, perhaps for a derivative."""
    _ = Call.on(norm.forward, spec, arrays).plan  # this refuses wrong input
    function: Callable[[Inputs], Results] = partial(_norm, norm, spec)
    if jax.sharding.get_abstract_mesh().manual_axes:
        # Outside of jit, shard_map takes a `custom_vjp` with symbolic zeros only in a compiled
        # function. Only this call uses the function, so no other derivative shares it.
        function = jax.jit(function)
    return function(_ffi.match_varying_axes(arrays))


def _y_and_stream(outputs: dict[str, Any]) -> Results:
    return outputs["y"], outputs.get("residual")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(norm: Norm, spec: OpSpec, arrays: Inputs) -> Results:
    return _y_and_stream(norm.run(spec, arrays, saves=False))


# The saved arrays by their names in the backward (inputs, the new stream, mean and rstd), and empty
# arrays of the dtypes of x and residual. The first one's shape is 0, then for each operand 1 if its
# gradient is wanted, else 0: whichever gradients are wanted, the pytree structure is the same. So a
# gated branch that no gradient needs is saved as an empty array.
_Saved = tuple[dict[str, Array | None], Array | HostArray, Array | HostArray]


def _norm_and_saved(norm: Norm, spec: OpSpec, primals: Inputs) -> tuple[Results, _Saved]:
    inputs = [primal and primal.value for primal in primals]
    outputs = norm.run(spec, inputs, saves=True)
    y, stream = _y_and_stream(outputs)
    operands = dict(zip(norm.forward.inputs, inputs, strict=True))
    known, x_dtype = operands | outputs, operands["x"].dtype
    like_residual = np.empty(0, getattr(operands.get("residual"), "dtype", x_dtype))
    wanted = [int(primal is not None and primal.perturbed) for primal in primals]
    note = np.empty((0, *wanted), x_dtype)
    if gates_branch(spec):
        needs_branch = wanted[norm.forward.inputs.index("gate")]
        known["branch"] = operands["x"] if needs_branch else np.empty(0, x_dtype)
    if stream is not None:
        known["x"] = stream
    arrays = {name: known[name] for name in norm.backward.inputs if name in known}
    return (y, stream), (arrays, note, like_residual)


# Of a backward's inputs, those that the norm reads.
_OF_NORM = ("x", "weight", "mean", "correction", "rstd")


def _gradients(norm: Norm, spec: OpSpec, saved: _Saved, cotangents: Results) -> tuple[Inputs]:
    """Return the gradient of each operand, or None if it is zero or not wanted."""
    dy, d_residual = (None if type(one) is SymbolicZero else one for one in cotangents)
    (arrays, note, like_residual), names = saved, norm.forward.inputs
    wanted = [name for name, flag in zip(names, note.shape[1:], strict=True) if flag]
    needs = {"x" if name == "residual" else name for name in wanted}
    gradients: Outputs = {}
    if dy is None and d_residual is not None:  # of the results, only the stream was used
        if gates_branch(spec):  # all that the norm reads is 0: 0 * inf would be NaN
            arrays = {
                name: jnp.zeros_like(one) if one is not None and name in _OF_NORM else one
                for name, one in arrays.items()
            }
            arrays |= {"sums.sum_dr": arrays.get("mean"), "sums.sum_r_dr": arrays["rstd"]}
            dy, needs = arrays["x"], needs & {"x", "gate"}
        else:
            gradients = {"dx": d_residual.astype(note.dtype), "dresidual": d_residual}
    if dy is not None and needs:
        x = dtype_of(spec.function, "x", note.dtype)
        given = {**arrays, "dy": dy, "d_residual": d_residual}
        if "gate" not in needs:
            given["branch"] = None
        gradients = norm.derive(spec, x, tuple(sorted(needs)), given)
    dresidual = gradients.get("dresidual")
    if dresidual is not None:  # it has the dtype of the new stream
        gradients["dresidual"] = dresidual.astype(like_residual.dtype)
    return (tuple([gradients.get(f"d{one}") if one in wanted else None for one in names]),)


_norm.defvjp(_norm_and_saved, _gradients, symbolic_zeros=True)
