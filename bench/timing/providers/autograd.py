# SPDX-License-Identifier: MIT
"""Torch's own operations, eager and compiled, and the base of providers that use its autograd."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from bench.timing import peers
from bench.timing.cases import Call, Operands, Operator
from bench.timing.peers import Function
from bench.timing.providers.base import Provider


class Autograd(Provider):
    """Functions of named tensors; the backward repeats on a forward that was recorded once."""

    arrays = "torch"

    @abstractmethod
    def function(self, operator: Operator, width: int) -> Function:
        """Return the operator, for rows of a width or for a number of channels."""

    def calls(self, operator: Operator, direction: str, sets: Sequence[Operands]) -> list[Call]:
        """Return the function's calls, or `torch.autograd.grad` of the recorded results."""
        function = self.function(operator, sets[0]["x"].shape[1])
        if direction == "forward":
            return [peers.torch_forward(function, operator, operands) for operands in sets]
        return [peers.torch_backward(torch, function, operator, operands) for operands in sets]


class Torch(Autograd):
    """Torch's eager operations."""

    name = "torch"
    distribution = "torch"

    def function(self, operator: Operator, width: int) -> Function:
        """Return the operator in torch's operations."""
        return peers.torch_function(torch, operator, width)


class TorchCompile(Torch):
    """Torch's operations, compiled by torch.compile."""

    name = "torch.compile"

    def function(self, operator: Operator, width: int) -> Function:
        """Return the compiled operator."""
        return peers.compiled(torch, super().function(operator, width))
