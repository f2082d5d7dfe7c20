# SPDX-License-Identifier: MIT
"""Small networks of norms in JAX: with cunorm.jax, or with plain formulas in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import cunorm.jax
from tests.support.jax_formulas import FORMULAS

Arrays = Mapping[str, Any]
HALVES = ("bfloat16", "float16")


class Use(NamedTuple):
    """How a norm uses an operand."""

    name: str
    part: int | None = None  # the index along the operand's first axis
    frozen: bool = False  # by stop_gradient


class Node(NamedTuple):
    """A norm, and how it is connected to the next."""

    op: str
    options: dict[str, Any]
    operands: dict[str, Use]  # of weight, bias and gate; a gate's Use("h") is x itself
    dtype: str  # of x
    residual: str = ""  # "stream"; "h": the residual is x itself; "": there is none
    keep: str = "both"  # which results of an add_ norm are used
    join: str = "tanh"


class Operand(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    stacked: bool = False  # whether each step has its own
    parts: int = 0  # the number of parts; a norm uses one part
    leading: bool = False  # whether its first axis is x's first axis


class Net(NamedTuple):
    """Norms in sequence, repeated `steps` times; `operands` also has x and the first stream, r."""

    shape: tuple[int, ...]
    dtype: str  # of the values between norms
    steps: int
    nodes: tuple[Node, ...]
    operands: dict[str, Operand]
    uses_stream: bool = False  # whether the new residual stream is a result

    def whole(self, name: str) -> tuple[int, ...]:
        """Return the shape of an operand, with its steps and parts."""
        one = self.operands[name]
        parts = (one.parts,) if one.parts else ()
        return (*((self.steps,) if one.stacked else ()), *parts, *one.shape)

    @property
    def results(self) -> tuple[str, ...]:
        return ("h", "stream") if self.uses_stream else ("h",)

    @property
    def loss_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"


# --- with cunorm.jax, or with formulas ------------------------------------------------------------


class Ours:
    """The norms of cunorm.jax; each array has its own dtype."""

    @staticmethod
    def cast(x: Any, dtype: str) -> Any:
        return x.astype(dtype)

    @staticmethod
    def norm(op: str, *arrays: Any, **options: Any) -> Any:
        return getattr(cunorm.jax, op)(*arrays, **options)


class Exact:
    """Formulas in float64; results and gradients that cunorm has in half precision are rounded."""

    @staticmethod
    def cast(x: Any, dtype: str) -> Any:
        return x.astype(dtype).astype("float64") if dtype in HALVES else x

    @classmethod
    def norm(cls, op: str, x: Any, *arrays: Any, x_dtype: str, stream: str, **options: Any) -> Any:
        formula = getattr(FORMULAS, op.removeprefix("add_"))
        if op == formula.__name__:
            return cls.cast(formula(x, **options), x_dtype)
        x, options = FORMULAS.gated_branch(x, options)
        new = cls.cast(x + arrays[0], stream)
        return cls.cast(formula(new, **options), x_dtype), new


class Unrounded(Exact):
    """Formulas that round nothing to half precision."""

    @staticmethod
    def cast(x: Any, dtype: str) -> Any:
        return x


# --- a network ------------------------------------------------------------------------------------


def step(kind: Any, net: Net, carry: tuple[Any, Any], operands: Arrays) -> tuple[Any, Any]:
    """Apply all norms once to the value h and to the residual stream, which may be None."""
    h, stream = carry
    for node in net.nodes:
        x = kind.cast(h, node.dtype)
        given = {name: _take(use, operands, x) for name, use in node.operands.items()}
        options = dict(node.options)
        if issubclass(kind, Exact):
            dtype = net.operands["r"].dtype if node.residual else ""
            options |= {"x_dtype": node.dtype, "stream": dtype}
        if node.residual:
            residual = kind.cast(h, net.operands["r"].dtype) if node.residual == "h" else stream
            y, new = kind.norm(node.op, x, residual, **given, **options)
            stream = stream if node.keep == "y" else new
            if node.keep == "stream":
                continue
        else:
            y = kind.norm(node.op, x, **given, **options)
        h = _join(kind, net, node.join, h, kind.cast(y, net.dtype), operands)
    return h, stream


def _take(use: Use, operands: Arrays, x: Any) -> Any:
    array = x if use.name == "h" else operands[use.name]
    array = array if use.part is None else array[use.part]
    return jax.lax.stop_gradient(array) if use.frozen else array


def _join(kind: Any, net: Net, join: str, h: Any, y: Any, operands: Arrays) -> Any:
    if join == "none":
        return y
    if join == "matmul":
        y = kind.cast(y @ operands["m"], net.dtype)
    # In half precision 1 - tanh(y)**2 would have few digits: tanh is in float32 at least.
    y = kind.cast(jnp.tanh(y.astype(jnp.promote_types(y.dtype, jnp.float32))), net.dtype)
    return kind.cast(h + y, net.dtype) if join == "add" else y


def results(
    kind: Any,
    net: Net,
    arrays: Arrays,
    loop: str = "python",
    wrap: Callable[..., Any] = lambda f: f,
) -> tuple[Any, ...]:
    """Return h and, if the network returns it, the residual stream."""
    stacked = {name: one for name, one in arrays.items() if net.operands[name].stacked}
    fixed = {name: one for name, one in arrays.items() if name not in stacked}
    one_step = wrap(partial(step, kind, net))

    def at(carry: Any, own: Arrays) -> Any:
        return one_step(carry, {**fixed, **own})

    def slices(index: Any) -> Arrays:
        return {name: one[index] for name, one in stacked.items()}

    carry = (fixed["x"], fixed.get("r"))
    if loop == "scan":
        carry, _ = jax.lax.scan(lambda c, own: (at(c, own), None), carry, stacked, length=net.steps)
    elif loop == "fori_loop":
        carry = jax.lax.fori_loop(0, net.steps, lambda i, c: at(c, slices(i)), carry)
    else:
        for index in range(net.steps):
            carry = at(carry, slices(index))
    return carry if net.uses_stream else carry[:1]
