# SPDX-License-Identifier: MIT
"""Every differentiable row norm: its forward, and its gradients in reverse mode."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero

from cunorm import _checks
from cunorm.jax import _launch
from cunorm.jax._arguments import check, described
from cunorm.jax._kinds import name_of, settle
from cunorm.jax._op import Op
from cunorm.results import AddNorm, NormForward, NormGrads
from cunorm.row_norm._backward import GradArrays, gradients
from cunorm.row_norm._forward import Arrays, Norm
from cunorm.row_norm._forward_plan import Options, asked
from cunorm.row_norm._variant import Numbers, Variant, checked_offset


class _Said(NamedTuple):
    """All that a caller says but for arrays."""

    function: str
    variant: Variant
    has_offset: bool
    numbers: bytes
    dtype: str | None
    residual_dtype: str | None
    adds: bool  # to a residual stream, which is returned too


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("x", "rstd", "mean", "gate", "weight", "bias"),
    meta_fields=("x_dtype", "has_residual", "needs"),
)
@dataclass
class _Saved:
    """What the backward needs: of arrays, none of x's shape but what was given or returned."""

    x: Any  # what was normalised
    rstd: Any
    mean: Any
    gate: Any
    weight: Any
    bias: Any
    x_dtype: str
    has_residual: bool
    needs: tuple[str, ...]  # the operands whose gradients are wanted


def row_norm(norm: Norm, arrays: Arrays, options: Options) -> Any:
    """Return y; with a residual stream, an AddNorm."""
    function = norm.function
    check(function, Arrays._fields, arrays, required=1)
    numbers = Numbers(
        _checks.length(function, norm.c),
        checked_offset(function, norm.weight_offset, arrays.weight),
        _checks.epsilon(function, norm.eps),
        norm.eps_of_sum,
    )
    told = asked(function, norm.variant, numbers.weight_offset != 0.0, options)
    dtypes = name_of(told.options.dtype), name_of(told.options.residual_dtype)
    adds = bool(options.streams)
    said = _Said(function, told.variant, told.has_offset, numbers.bits(), *dtypes, adds)
    y, stream = _traced(said, arrays)
    return AddNorm(y, stream) if adds else y


@partial(jax.jit, static_argnums=0, inline=True)
def _traced(said: _Said, arrays: Arrays) -> Any:
    settle(_forward_op(said, arrays, saves=False))
    return _norm(said, Arrays(*_launch.alike(arrays)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(said: _Said, arrays: Arrays) -> tuple[Any, Any]:
    """Return y and the new stream, None where there is none."""
    result = _forward(said, arrays, saves=False)
    return result.y, _stream(said, arrays, result)


def _norm_and_saved(said: _Said, primals: Arrays) -> tuple[tuple[Any, Any], _Saved]:
    arrays = Arrays(*(None if primal is None else primal.value for primal in primals))
    wanted = [
        name
        for name, primal in zip(Arrays._fields, primals, strict=True)
        if primal is not None and primal.perturbed
    ]
    needs = tuple(sorted({"x" if name == "residual" else name for name in wanted}))
    result = _forward(said, arrays, saves=True)
    normalised = arrays.x if result.residual is None else result.residual
    saved = _Saved(
        *(normalised, result.rstd, result.mean, arrays.gate, arrays.weight, arrays.bias),
        *(arrays.x.dtype.name, arrays.residual is not None, needs),
    )
    return (result.y, _stream(said, arrays, result)), saved


def _gradients(said: _Said, saved: _Saved, cotangents: tuple[Any, Any]) -> tuple[Arrays]:
    """Return the gradient of each operand, None for one of which it is not wanted, or zero."""
    dy, d_residual = (None if type(given) is SymbolicZero else given for given in cotangents)
    if dy is not None:
        grads = _backward(said, saved, dy, d_residual)
    elif d_residual is not None:  # of the results, nothing but the stream was used
        grads = NormGrads(d_residual.astype(saved.x_dtype), dresidual=d_residual)
    else:
        grads = NormGrads()
    dresidual = grads.dresidual if saved.has_residual else None
    return (Arrays(grads.dx, dresidual, grads.dgate, grads.dweight, grads.dbias),)


def _backward(said: _Said, saved: _Saved, dy: Any, d_residual: Any) -> NormGrads:
    arrays = GradArrays(
        dy, saved.x, saved.rstd, saved.mean, d_residual, saved.gate, saved.weight, saved.bias
    )
    op = Op(
        "row_backward",
        (said.function, *said.variant, said.has_offset, saved.x_dtype, saved.needs),
        said.numbers,
        described(said.function, GradArrays._fields, arrays),
    )
    return gradients(*_launch.run(op, arrays))


_norm.defvjp(_norm_and_saved, _gradients, symbolic_zeros=True)


def _forward(said: _Said, arrays: Arrays, saves: bool) -> NormForward:
    return NormForward(*_launch.run(_forward_op(said, arrays, saves), arrays))


def _forward_op(said: _Said, arrays: Arrays, saves: bool) -> Op:
    dtypes = (said.dtype, said.residual_dtype)
    return Op(
        "row_forward",
        (said.function, *said.variant, said.has_offset, *dtypes, saves, said.adds),
        said.numbers,
        described(said.function, Arrays._fields, arrays),
    )


def _stream(said: _Said, arrays: Arrays, result: NormForward) -> Any:
    if not said.adds:
        return None
    return arrays.x if result.residual is None else result.residual
