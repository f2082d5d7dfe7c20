# SPDX-License-Identifier: MIT
"""A network of the fuzzer with its leaves, and how it is called and differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import functional_call

from tests.fuzz.torch_programs import Net, Program, drawn, leaf
from tests.fuzz.torch_wraps import DYS, WRAPS, Trivial, TrivialParameter, plain

Results = dict[str, Any]


class Run:
    """A network by cunorm ("cunorm"), by formulas in its dtypes ("plain") or float64 ("exact")."""

    def __init__(self, program: Program, by: str, salt: int = 0) -> None:
        self.program, self.by = program, by
        leaves = {n: self.cast(leaf(program, n, salt)) for n in program.leaves()}
        leaves = {n: one for n, one in leaves.items() if program.form(n) != "x"}
        self.net = Net(program, by, leaves)
        self.inputs = [leaves[name] for name in program.inputs()]
        self.require(program.wanted())
        forward: Callable[..., Any] = self.net
        for name in program.wraps if by != "exact" else ():
            forward = WRAPS[name](forward)
        self.forward = forward

    def cast(self, value: Any) -> Any:
        return value.double() if self.by == "exact" else value

    def require(self, names: list[str]) -> None:
        """Make these leaves require gradients, and no others."""
        for name, one in self.leaves().items():
            one.requires_grad_(name in names)

    def leaves(self) -> dict[str, Any]:
        return dict(zip(self.program.inputs(), self.inputs, strict=True)) | dict(self.net.own)

    def subclass(self, *, inputs: bool, parameters: bool) -> None:
        """Make leaves tensors of a subclass with plain memory."""
        if inputs:
            own = [(one.detach().as_subclass(Trivial), one.requires_grad) for one in self.inputs]
            self.inputs = [one.requires_grad_(needed) for one, needed in own]
        for name, one in [*self.net.own.items()] if parameters else ():
            self.net.own[name] = TrivialParameter(one.detach(), one.requires_grad)
        self.net.tie()

    def wanted(self) -> dict[str, Any]:
        return {name: one for name, one in self.leaves().items() if one.requires_grad}

    def outputs(self) -> tuple[Any, ...]:
        return self.forward(*self.inputs)

    def backward(self, outputs: Any, **options: Any) -> None:
        torch.autograd.backward(*self.recorded(outputs), **options)

    def gradients(self, outputs: Any) -> Results:
        wanted = self.wanted()
        outputs, dys = self.recorded(outputs)
        if not outputs:
            return {}
        found = torch.autograd.grad(outputs, [*wanted.values()], dys, allow_unused=True)
        return named("d ", wanted, map(plain, found))

    def recorded(self, outputs: Any) -> tuple[Any, Any]:
        """Return the outputs that require gradients, and their incoming gradients."""
        pairs = zip(outputs, self.dys(outputs), strict=True)
        kept = [(one, dy) for one, dy in pairs if one.requires_grad]
        return tuple(zip(*kept, strict=True)) or ((), ())

    def call(self, leaves: dict[str, Any]) -> tuple[Any, ...]:
        """Return the outputs for other leaves."""
        own = {f"own.{name}": leaves.get(name, one) for name, one in self.net.own.items()}
        given = zip(self.program.inputs(), self.inputs, strict=True)
        inputs = tuple(leaves.get(name, one) for name, one in given)
        return functional_call(self.net, own, inputs)

    def loss(self, leaves: dict[str, Any]) -> Any:
        outputs = self.call(leaves)
        terms = [(one * self.number(one, i)).sum() for i, one in enumerate(outputs)]
        # Not sum(terms): it begins with 0 + terms[0], which vmap refuses for an empty batch.
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def number(self, like: Any, name: Any) -> Any:
        """Draw numbers in a tensor's shape and dtype; exact runs get the same in float64."""
        values = drawn(like.shape, f"{self.program.seed} {name}")
        dtype = like.dtype if self.by != "exact" else torch.float64
        return values.bfloat16().to(dtype)  # every dtype holds these numbers exactly

    def dys(self, outputs: tuple[Any, ...]) -> list[Any]:
        return [DYS[self.program.dy](self.number(one, i)) for i, one in enumerate(outputs)]


def named(prefix: str, names: Any, found: Any) -> Results:
    return {f"{prefix}{n}": one for n, one in zip(names, found, strict=True) if one is not None}


def results(outputs: Any) -> Results:
    return named("y", range(len(outputs)), [plain(one) for one in outputs])
