# SPDX-License-Identifier: MIT
"""A norm that JAX differentiates: its forward, and its gradients in reverse mode."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from cunorm._core.dtypes import DType, dtype_of
from cunorm._core.memo import memoize
from cunorm._core.plan import OpDef
from cunorm._core.validate import array_hint, of_type
from cunorm._dispatch import parse
from cunorm.jax import _ffi
from cunorm.jax._call import Call, changed

Arrays = tuple[Any, ...]
Results = tuple[Any, Any]  # y, and the new residual stream or None

_ARRAYS = (jax.Array, np.ndarray)


@dataclass(frozen=True, eq=False)
class Norm:
    """The operators of a norm. They name a gradient as its operand, with a d before it."""

    forward: OpDef
    backward: OpDef
    # Of the forward's OpSpec, x's dtype and the operands whose gradients are wanted.
    backward_spec: Callable[[Any, DType, tuple[str, ...]], Any]

    def __call__(self, params: tuple[Any, ...], arrays: Arrays) -> Results:
        """Call the forward, with scalars as the caller gives them."""
        op = self.forward
        for place, array in enumerate(arrays):
            if not (isinstance(array, _ARRAYS) or (array is None and place >= op.required)):
                where, got = f"{params[0]}: {op.inputs[place]}", of_type(type(array))
                hint = array_hint(params[0], op.inputs[place], array)
                raise TypeError(f"{where} is {got}, expected a JAX or NumPy array{hint}")
        try:
            spec = parse(op, params)
        except TypeError as error:
            raise _of_traced_scalars(error, params) from None
        results: Results = _compiled(self, spec)(arrays)
        return results


def _of_traced_scalars(error: TypeError, params: tuple[Any, ...]) -> TypeError:
    """Return the error of wrong scalars; where JAX traces the wrong one, one that says what to do.

    jax.jit traces all that is passed at the call.
    """
    for one in params:
        scalar = one[0] if isinstance(one, tuple) and one else one  # c is its `typed_key`
        wrong = f" is {scalar!r}, "
        if isinstance(scalar, jax.core.Tracer) and wrong in str(error):
            text = str(error).replace(wrong, " is traced by JAX, ")
            remedy = "under jax.jit, bind it with functools.partial or name it in static_argnames"
            return TypeError(f"{text}: {remedy}")
    return error


@partial(
    jax.tree_util.register_dataclass, data_fields=("arrays",), meta_fields=("x_dtype", "wanted")
)
@dataclass
class _Saved:
    """What is kept from the forward for the backward."""

    arrays: dict[str, Any]  # by their names in the backward: inputs, the new stream, mean and rstd
    x_dtype: DType
    wanted: tuple[str, ...]  # the operands whose gradients are wanted


@memoize()
def _compiled(norm: Norm, spec: Any) -> Callable[[Arrays], Results]:
    """Return the function of arrays that JAX compiles for each of their shapes and dtypes."""

    def function(arrays: Arrays) -> Results:
        _ = Call.of(norm.forward, spec, arrays).plan  # refuses wrong input
        results: Results = _norm(norm, spec, _ffi.match_varying_axes(arrays))
        return results

    compiled: Callable[[Arrays], Results] = jax.jit(function, inline=True)
    return compiled


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(norm: Norm, spec: Any, arrays: Arrays) -> Results:
    outputs = _ffi.run(norm.forward, spec, arrays)
    return outputs["y"], outputs.get("residual")


def _norm_and_saved(norm: Norm, spec: Any, primals: Arrays) -> tuple[Results, _Saved]:
    pairs = list(zip(norm.forward.inputs, primals, strict=True))
    inputs: dict[str, Any] = {name: primal and primal.value for name, primal in pairs}
    wanted = [name for name, primal in pairs if primal is not None and primal.perturbed]
    outputs = _ffi.run(norm.forward, changed(spec, saves=True), tuple(inputs.values()))
    y, stream = outputs["y"], outputs.get("residual")
    known = inputs | outputs | {"x": inputs["x"] if stream is None else stream}
    arrays = {name: known[name] for name in norm.backward.inputs if name in known}
    x_dtype = dtype_of(spec.function, "x", inputs["x"].dtype)
    return (y, stream), _Saved(arrays, x_dtype, tuple(wanted))


def _gradients(norm: Norm, spec: Any, saved: _Saved, cotangents: Results) -> tuple[Arrays]:
    """Return the gradient of each operand, None where it is zero or not wanted."""
    dy, d_residual = (None if type(one) is SymbolicZero else one for one in cotangents)
    gradients: dict[str, Any] = {}
    if dy is not None:
        needs = {"x" if name == "residual" else name for name in saved.wanted}
        backward_spec = norm.backward_spec(spec, saved.x_dtype, tuple(sorted(needs)))
        arrays = {"dy": dy, "d_residual": d_residual, **saved.arrays}
        inputs = [arrays[name] for name in norm.backward.inputs]
        gradients = _ffi.run(norm.backward, backward_spec, inputs)
    elif d_residual is not None:  # of the results, only the stream was used
        gradients = {"dx": d_residual.astype(saved.x_dtype.name), "dresidual": d_residual}
    names = norm.forward.inputs
    return (tuple([gradients.get(f"d{one}") if one in saved.wanted else None for one in names]),)


_norm.defvjp(_norm_and_saved, _gradients, symbolic_zeros=True)
