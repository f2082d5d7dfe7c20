# SPDX-License-Identifier: MIT
"""cunorm's plain functions on the arrays of each framework."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import cunorm
from bench.timing import cases
from bench.timing.cases import Call, Operands, Operator
from bench.timing.providers.base import Provider


class Cunorm(Provider):
    """cunorm, or another copy of it, on arrays of one library."""

    def __init__(self, name: str, arrays: str, copy: ModuleType = cunorm) -> None:
        self.name = name
        self.arrays = arrays
        self.copy = copy

    def calls(self, operator: Operator, direction: str, sets: Sequence[Operands]) -> list[Call]:
        """Return calls of the plain form, or of `_backward` after an untimed `_forward`."""
        if direction == "forward":
            return [cases.forward(self.copy, operator, operands) for operands in sets]
        saved = [cases.training_forward(self.copy, operator, operands)() for operands in sets]
        pairs = zip(sets, saved, strict=True)
        return [cases.backward(self.copy, operator, operands, kept) for operands, kept in pairs]


class Ungated(Cunorm):
    """cunorm without the gate, for operators that have a gate: this shows the gate's cost."""

    def supports(self, operator: Operator) -> bool:
        """Whether the operator has a gate."""
        return bool(operator.gate_position)

    def computes(self, operator: Operator) -> Operator:
        """Return the operator without its gate."""
        return operator.ungated()
