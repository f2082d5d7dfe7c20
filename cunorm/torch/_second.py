# SPDX-License-Identifier: MIT
"""The derivatives of gradients and of tangents: those of a formula in torch's operations."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cunorm._arrays.torch import TORCH_DTYPES
from cunorm.torch._formulas import Operand, compute_of, gated_branch, pulled, pushed
from cunorm.torch._pair import OpPair, has_branch_gate

Named = dict[str, Operand]
OPERANDS = ("x", "weight", "bias", "gate")


class Point(NamedTuple):
    """Where an operator is differentiated: its tensors, its spec, and that of the forward."""

    named: Named
    spec: Any
    forward: Any

    @property
    def tensors(self) -> dict[str, Tensor]:
        return given(self.named)

    def at(self, names: Iterable[str], tensors: Sequence[Tensor]) -> "Point":
        """Return the point with other tensors."""
        return self._replace(named=self.named | dict(zip(names, tensors, strict=True)))

    def x_dtype(self) -> torch.dtype:
        """Return the dtype of the x that was added to a stream, which is that of dx."""
        dtype = getattr(self.spec, "x_dtype", None)
        return self.tensors["x"].dtype if dtype is None else TORCH_DTYPES[dtype]


def vjp_of(
    function: Callable[[Point], Any], point: Point, wanted: Sequence[str], cotangents: Any
) -> Named:
    """Return the gradients of the tensors in `wanted`."""
    leaves = {name: one for name, one in point.tensors.items() if name in wanted}

    def moved(*tensors: Tensor) -> Any:
        return function(point.at(leaves, tensors))

    return dict(zip(leaves, pulled(moved, [*leaves.values()], cotangents), strict=True))


def jvp_of(function: Callable[[Point], Any], point: Point, tangents: Named, like: Any) -> Any:
    """Return the tangents of results, which are like the tensors of `like`."""
    moving, tensors = given(tangents), point.tensors

    def moved(*others: Tensor) -> Any:
        return function(point.at(moving, others))

    return pushed(moved, [tensors[name] for name in moving], [*moving.values()], like)


def given(named: Named) -> dict[str, Tensor]:
    return {name: one for name, one in named.items() if one is not None}


class Rules:
    """How the gradients and the tangent of a norm are differentiated, given a formula of y.

    A vjp gets the names of the wanted gradients and all cotangents; a jvp gets tangents by name.
    """

    def __init__(self, pair: OpPair, formula: Callable[..., Tensor]) -> None:
        self.outputs = pair.operands  # the operands whose gradients the backward returns
        self.formula = formula  # returns y in the compute dtype, which x has

    # --- the gradients ----------------------------------------------------------------------------

    def gradients_vjp(
        self, point: Point, wanted: Sequence[str], cotangents: Sequence[Operand]
    ) -> Named:
        """Return the gradients of the backward's inputs in `wanted`."""
        arriving = given(dict(zip(self.outputs, cotangents, strict=True)))

        def gradients(point: Point) -> tuple[Tensor, ...]:
            found = self.gradients(point)
            return tuple(found[name] for name in arriving)

        return vjp_of(gradients, point, wanted, (*arriving.values(),))

    def gradients_jvp(self, point: Point, tangents: Named) -> list[Operand]:
        """Return the tangents of the backward's outputs."""
        found: Named = jvp_of(self.gradients, point, tangents, self.like_gradients(point))
        return [found.get(name) for name in self.outputs]

    def like_gradients(self, point: Point) -> dict[str, Tensor]:
        """Return tensors that have the shapes and dtypes of the backward's outputs."""
        _, spec, forward = point
        tensors, x_dtype = point.tensors, point.x_dtype()
        like = {name: tensors[name] for name in self.outputs if {name} & {*spec.needs} & {*tensors}}
        if "x" in like:
            like["x"] = tensors["x"].to(x_dtype)
            if x_dtype is not tensors["x"].dtype or (
                has_branch_gate(forward) and "gate" in tensors
            ):
                like["residual"] = tensors["x"]
        return like

    def gradients(self, point: Point) -> dict[str, Tensor]:
        """Return the backward's outputs, in the order of `like_gradients`."""
        named, spec, forward = point
        tensors, x_dtype = point.tensors, point.x_dtype()
        compute = compute_of(tensors["x"].dtype, x_dtype)
        is_branch = has_branch_gate(forward) and "gate" in tensors
        operands = {name: named[name] for name in OPERANDS if name in named}
        operands |= {"x": tensors["x"].to(compute)} | ({"gate": None} if is_branch else {})
        leaves = {
            name: one
            for name, one in given(operands).items()
            if name in spec.needs or (name == "x" and is_branch)
        }

        def y_of(*leaves_again: Tensor) -> Tensor:
            moved = operands | dict(zip(leaves, leaves_again, strict=True))
            return self.formula(forward, x_dtype, **moved)

        pulled_back = pulled(y_of, [*leaves.values()], tensors["dy"].to(compute))
        found = dict(zip(leaves, pulled_back, strict=True))
        if "x" in found:
            found |= _of_stream(found["x"], tensors, forward, x_dtype)
        like = self.like_gradients(point)
        return {name: found[name] for name in like}

    # --- the tangent of y -------------------------------------------------------------------------

    def tangent_vjp(
        self, point: Point, wanted: Sequence[str], cotangents: Sequence[Operand]
    ) -> Named:
        """Return the gradients of the inputs of y's tangent in `wanted`."""
        return vjp_of(self.tangent, point, wanted, cotangents[0])

    def tangent_jvp(self, point: Point, tangents: Named) -> list[Operand]:
        """Return the tangent of y's tangent."""
        like = point.tensors["x"].to(TORCH_DTYPES[point.spec.dtype])
        return [jvp_of(self.tangent, point, tangents, like)]

    def tangent(self, point: Point) -> Tensor:
        """Return the tangent of y."""
        named, spec, forward = point
        tensors, x_dtype = point.tensors, point.x_dtype()
        x = tensors["x"].to(compute_of(tensors["x"].dtype, x_dtype))
        operands = {name: named[name] for name in OPERANDS if name in named} | {"x": x}
        tangents = {name: tensors.get(f"{name}_tangent") for name in operands}
        if tangents.get("bias") is not None and operands["bias"] is None:
            operands["bias"] = torch.zeros_like(tensors["bias_tangent"])  # not read by the kernel
        moving = {
            name: one.to(given(operands)[name].dtype) for name, one in given(tangents).items()
        }

        def y_of(*moved: Tensor) -> Tensor:
            return self.formula(
                forward, x_dtype, **operands | dict(zip(moving, moved, strict=True))
            )

        primals = [given(operands)[name] for name in moving]
        y: Tensor = pushed(y_of, primals, [*moving.values()], x)
        return y.to(TORCH_DTYPES[spec.dtype])


def _of_stream(
    ds: Tensor, tensors: dict[str, Tensor], forward: Any, x_dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the gradients of a stream's operands; ds is that of the array that was normalised."""
    if "dresidual_out" in tensors:
        ds = ds + tensors["dresidual_out"].to(ds.dtype)
    found = {"residual": ds.to(tensors["x"].dtype)}
    if has_branch_gate(forward) and "gate" in tensors:
        scale = partial(gated_branch, forward.gate_activation)
        if "branch" in tensors:
            of_gate = partial(scale, tensors["branch"].to(ds.dtype))
            (found["gate"],) = pulled(of_gate, (tensors["gate"],), ds)
        ds = scale(ds, tensors["gate"])
    return found | {"x": ds.to(x_dtype)}


def stream_tangent(ctx: Any, named: Named, tangents: Named) -> Operand:
    """Return the tangent of the array that a row norm normalises: of x, or of the new stream."""
    stream, of_x, of_residual = given(named)["x"], tangents["x"], tangents["residual"]
    compute = compute_of(stream.dtype, ctx.x_dtype)
    terms = []
    if named["gate"] is not None and has_branch_gate(ctx.spec):
        scale = partial(gated_branch, ctx.spec.gate_activation)
        gate, branch = given(named)["gate"], given(named)["branch"].to(compute)
        if of_x is not None:
            terms.append(scale(of_x.to(compute), gate))
        if (of_gate := tangents["gate"]) is not None:
            terms.append(pushed(partial(scale, branch), (gate,), (of_gate,), branch))
    elif of_x is not None:
        terms.append(of_x)
    terms += [] if of_residual is None else [of_residual]
    if not terms:
        return None
    first, *others = terms
    return sum(others, first.to(compute)).to(stream.dtype) if others else first.to(stream.dtype)
