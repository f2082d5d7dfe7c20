# SPDX-License-Identifier: MIT
"""The differentiable group norm: its forward, and its gradients in reverse mode."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero

from cunorm import _checks
from cunorm.group_norm._calls import eps_bits
from cunorm.group_norm._forward import asked
from cunorm.jax import _launch
from cunorm.jax._arguments import check, described
from cunorm.jax._kinds import name_of, settle
from cunorm.jax._op import Op
from cunorm.results import GroupNormForward, GroupNormGrads


class Arrays(NamedTuple):
    """The arrays that the caller gave."""

    x: Any
    weight: Any = None
    bias: Any = None


class _Said(NamedTuple):
    """All that a caller says but for arrays."""

    function: str
    num_groups: int | None  # None: as many as channels
    activation: str
    channel_axis: int
    eps: bytes
    dtype: str | None


class _GradArrays(NamedTuple):
    dy: Any
    x: Any
    mean: Any
    rstd: Any
    weight: Any
    bias: Any


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("x", "mean", "rstd", "weight", "bias"),
    meta_fields=("needs",),
)
@dataclass
class _Saved:
    """What the backward needs: of arrays, none of x's shape but x."""

    x: Any
    mean: Any
    rstd: Any
    weight: Any
    bias: Any
    needs: tuple[str, ...]  # the operands whose gradients are wanted


def group_norm(
    function: str,
    arrays: Arrays,
    num_groups: Any,
    activation: Any,
    channel_axis: Any,
    eps: Any,
    dtype: Any,
) -> Any:
    """Return y; `num_groups` may be EACH_CHANNEL."""
    check(function, Arrays._fields, arrays, required=1)
    told = asked(function, num_groups, activation, channel_axis, dtype, False)
    numbers = eps_bits(_checks.epsilon(function, eps))
    settled = (told.num_groups, told.activation, told.channel_axis, numbers, name_of(told.dtype))
    return _traced(_Said(function, *settled), arrays)


@partial(jax.jit, static_argnums=0, inline=True)
def _traced(said: _Said, arrays: Arrays) -> Any:
    settle(_forward_op(said, arrays, saves=False))
    return _norm(said, Arrays(*_launch.alike(arrays)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(said: _Said, arrays: Arrays) -> Any:
    return _forward(said, arrays, saves=False).y


def _norm_and_saved(said: _Said, primals: Arrays) -> tuple[Any, _Saved]:
    arrays = Arrays(*(None if primal is None else primal.value for primal in primals))
    needs = tuple(
        name
        for name, primal in zip(Arrays._fields, primals, strict=True)
        if primal is not None and primal.perturbed
    )
    result = _forward(said, arrays, saves=True)
    return result.y, _Saved(arrays.x, result.mean, result.rstd, arrays.weight, arrays.bias, needs)


def _gradients(said: _Said, saved: _Saved, dy: Any) -> tuple[Arrays]:
    """Return the gradient of each operand, None for one of which it is not wanted, or zero."""
    if type(dy) is SymbolicZero:
        return (Arrays(None),)
    arrays = _GradArrays(dy, saved.x, saved.mean, saved.rstd, saved.weight, saved.bias)
    groups = saved.mean.shape[1]
    op = Op(
        "group_backward",
        (said.function, groups, said.activation, said.channel_axis, saved.needs),
        b"",
        described(said.function, _GradArrays._fields, arrays),
    )
    return (Arrays(*GroupNormGrads(*_launch.run(op, arrays))),)


_norm.defvjp(_norm_and_saved, _gradients, symbolic_zeros=True)


def _forward(said: _Said, arrays: Arrays, saves: bool) -> GroupNormForward:
    return GroupNormForward(*_launch.run(_forward_op(said, arrays, saves), arrays))


def _forward_op(said: _Said, arrays: Arrays, saves: bool) -> Op:
    return Op(
        "group_forward",
        (said.function, said.num_groups, said.activation, said.channel_axis, said.dtype, saves),
        said.eps,
        described(said.function, Arrays._fields, arrays),
    )
