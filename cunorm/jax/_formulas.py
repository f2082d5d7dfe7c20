# SPDX-License-Identifier: MIT
"""Formulas of y in jax.numpy, which JAX derives as often as it is asked to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from cunorm._core.dtypes import DType, dtype_of
from cunorm._core.operands import present
from cunorm._core.tensor import inverse_permutation
from cunorm._row_norm.order import row_order
from cunorm.jax._call import Call, gates_branch, replace_interned
from cunorm.jax._primitive import Found, Function, Shaped

STATISTICS = ("mean", "correction", "rstd")
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda z: z,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class Rows(Protocol):
    """The kernels of normalised rows, and what formulas must know of rows."""

    def derive(self, spec: Any, x_dtype: DType, needs: tuple[str, ...], given: Any) -> Any:
        """Return the gradients of the operands in `needs`; `given` has the backward's inputs."""

    def second(self, spec: Any, arrays: Sequence[Array], statistics: dict[str, Any]) -> Array:
        """Return `second_by_formula` of the three arrays; the statistics are those of the last."""

    def mean(self, rows: Array) -> Array:
        """Return the mean of each row, which is the last axis."""

    def width(self, spec: Any, x: Array) -> int:
        """Return the number of elements of a row of x."""


def row_formula(norm: Any, call: Call, operands: dict[str, Any]) -> Array:
    """Return y of `cunorm.normalize` in the compute dtype; x is the array that is normalised."""
    shape = operands["x"].shape
    order, leading_axes = row_order(call.spec.function, shape, call.spec.axis)
    spec = replace_interned(call.spec, axis=leading_axes - len(shape))
    if order is None:
        return _of_last_axes(norm, call, spec, operands)
    row = tuple(shape[axis] for axis in order[leading_axes:])

    def moved(name: str, one: Array | None) -> Array | None:
        if one is None or name in STATISTICS or one.shape == row:
            return one
        return one[(None,) * (len(order) - one.ndim)].transpose(order)

    of_rows = {name: moved(name, one) for name, one in operands.items()}
    y = _of_last_axes(norm, call, spec, of_rows)
    return y.transpose(inverse_permutation(order))


def _of_last_axes(norm: Any, call: Call, spec: Any, operands: dict[str, Any]) -> Array:
    compute = operands["rstd"].dtype
    p = operands["x"].astype(compute)
    given = map(operands.get, ("weight", "bias", "gate"))
    weight, bias, gate = (None if one is None else one.astype(compute) for one in given)
    g = None if gate is None or gates_branch(spec) else ACTIVATIONS[spec.gate_activation](gate)
    if g is not None and spec.gate_position == "pre":
        p = p * g
    statistics = {name: operands[name] for name in STATISTICS if name in operands}
    r = _rows(norm, _plain(spec), (*statistics,), p, *statistics.values())
    n = r if spec.c is None else r * spec.k(norm.width(spec, p))
    x_dtype = present(call.inputs[0]).dtype.name
    if spec.round_before_weight and x_dtype != compute.name:
        n = rounded(x_dtype, n)
    n = n if weight is None else n * (weight + spec.weight_offset)
    n = n if bias is None else n + bias
    return n * g if g is not None and spec.gate_position == "post" else n


def group_formula(norm: Any, call: Call, operands: dict[str, Any]) -> Array:
    """Return y of `cunorm.group_norm` in the compute dtype."""
    spec, compute = call.spec, operands["rstd"].dtype
    x = jnp.moveaxis(operands["x"].astype(compute), spec.channel_axis, 1)
    samples, channels = x.shape[:2]
    q = x.reshape(samples, spec.num_groups or channels, -1)
    q = q - q.mean(-1, keepdims=True)
    q = q - q.mean(-1, keepdims=True)
    r = q * jax.lax.rsqrt((q * q).mean(-1, keepdims=True) + spec.eps)
    n = r.reshape(samples, channels, -1)
    weight, bias = map(operands.get, ("weight", "bias"))
    n = n if weight is None else n * weight.astype(compute)[..., None]
    n = n if bias is None else n + bias.astype(compute)[..., None]
    y = ACTIVATIONS[spec.activation](n).reshape(x.shape)
    return jnp.moveaxis(y, 1, spec.channel_axis)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def rounded(dtype: str, n: Array) -> Array:
    """Round to a dtype, with a derivative of 1."""
    return n.astype(dtype).astype(n.dtype)


@rounded.defjvp
def _(dtype: str, primals: Any, tangents: Any) -> tuple[Array, Array]:
    return rounded(dtype, *primals), tangents[0]


# --- normalised rows ------------------------------------------------------------------------------


def _plain(spec: Any) -> Any:
    """Return the spec of a norm without weight, gate and k."""
    options: dict[str, Any] = {
        "gate_activation": "silu",
        "gate_position": "post",
        "streams": None,
        "saves": False,
    }
    options |= {"weight_offset": 0.0, "round_before_weight": False, "c": None}
    return replace_interned(spec, **options, dtype=None, residual_dtype=None)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _rows(norm: Rows, spec: Any, names: tuple[str, ...], p: Array, *statistics: Array) -> Array:
    """Return rows of p, normalised with statistics of p, which have the names."""
    shape = (*p.shape[: spec.axis], spec.groups, -1)
    given = {n: one.reshape(*shape[:-1], 1) for n, one in zip(names, statistics, strict=True)}
    q = p.reshape(shape)
    if "mean" in given:
        q = q - given["mean"]
        q = q - given["correction"] if "correction" in given else q - q.mean(-1, keepdims=True)
    return (q * given["rstd"]).reshape(p.shape)


@_rows.defjvp
def _(norm: Rows, spec: Any, names: tuple[str, ...], primals: Any, tangents: Any) -> Any:
    own = Projection(norm, spec, names, primals[0].shape, primals[0].dtype)
    return _rows(norm, spec, names, *primals), own.bind(tangents[0], *primals)[0]


@dataclass(frozen=True)
class _OfRows(Function):
    """A function of arrays like x, all in the compute dtype, and of statistics of the last one."""

    norm: Rows
    spec: Any
    statistics: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any

    def results(self) -> Sequence[Shaped]:
        return [(self.shape, self.dtype)]


class Projection(_OfRows):
    """P(v) of rows p, the derivative of normalised rows along v; its operands are v and p.

    P is the gradient of a gradient of a scalar, so it is its own transpose.
    """

    def run(self, *arrays: Array) -> Sequence[Array]:
        given = dict(zip(("dy", "x", *self.statistics), arrays, strict=True))
        x = dtype_of(self.spec.function, "x", self.dtype)
        return [self.norm.derive(self.spec, x, ("x",), given)["dx"]]

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Array], Found]:
        v, *rows = primals
        of_v, of_p, *_ = tangents
        found = None if of_v is None else self.bind(of_v, *rows)[0]
        if of_p is not None:
            second = _Second(self.norm, self.spec, self.statistics, self.shape, self.dtype)
            own = second.bind(of_p, v, *rows)[0]
            found = own if found is None else found + own
        return self.bind(*primals), [found]

    def transpose(self, cotangents: Sequence[Any], arrays: Sequence[Any]) -> Found:
        return [*self.bind(*cotangents, *arrays[1:]), *[None] * (len(arrays) - 1)]


class _Second(_OfRows):
    """T(a, b) of rows p, the derivative of P(a) along b; its operands are a, b and p.

    It is linear in a and in b. T(a, b) is T(b, a), and <c, T(a, b)> is <b, T(a, c)>.
    """

    def run(self, *arrays: Array) -> Sequence[Array]:
        statistics = dict(zip(self.statistics, arrays[3:], strict=True))
        return [self.norm.second(self.spec, arrays[:3], statistics)]

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Array], Found]:
        a, b, *rows = primals
        of_a, of_b, of_p, *_ = tangents
        found = []
        if of_a is not None:
            found += self.bind(of_a, b, *rows)
        if of_b is not None:
            found += self.bind(of_b, a, *rows)
        if of_p is not None:
            own = partial(second_by_formula, self.norm, self.spec, a, b)
            found.append(jax.jvp(own, (rows[0],), (of_p,))[1])
        return self.bind(*primals), [sum(found[1:], found[0]) if found else None]

    def transpose(self, cotangents: Sequence[Any], arrays: Sequence[Any]) -> Found:
        a, b, *rows = arrays
        found = self.bind(*cotangents, a if b is None else b, *rows)[0]
        of_ab = [found, None] if a is None else [None, found]
        return [*of_ab, *[None] * len(rows)]


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def second_by_formula(norm: Rows, spec: Any, *arrays: Array) -> Array:
    shape = (*arrays[0].shape[: spec.axis], spec.groups, -1)
    a, b, q = (one.reshape(shape) for one in arrays)
    if spec.center:
        q = q - norm.mean(q)
        q = q - norm.mean(q)
    rstd = jax.lax.rsqrt(norm.mean(q * q) + spec.mean_eps(norm.width(spec, arrays[0])))
    r = q * rstd

    def project(v: Array) -> Array:
        v = v - norm.mean(v) if spec.center else v
        return rstd * (v - r * norm.mean(r * v))

    of_a, of_b = project(a), project(b)
    found = r * norm.mean(a * of_b) + norm.mean(r * b) * of_a + norm.mean(r * a) * of_b
    return (-rstd * found).reshape(arrays[0].shape)
