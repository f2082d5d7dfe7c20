# SPDX-License-Identifier: MIT
"""What a provider of the operators is to the engine that checks and times it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from bench.arrays import as_jax, as_torch
from bench.cases import Call, Operands, Operator

# From the device's own arrays, NumPy's or CuPy's, to those that a provider takes.
VIEWS: dict[str, Callable[[Any], Any]] = {
    "own": lambda array: array,
    "torch": as_torch,
    "jax": as_jax,
}


def require_gpu(arrays: str) -> None:
    """Raise ImportError where the framework of one of VIEWS cannot use a GPU."""
    if arrays in ("torch", "jax"):  # JAX is handed CuPy's arrays by torch
        import torch

        if not torch.cuda.is_available():
            raise ImportError("torch is built without CUDA, or finds no GPU")
    if arrays == "jax":
        import jax

        try:
            jax.devices("cuda")
        except RuntimeError as error:
            raise ImportError(f"JAX has no CUDA backend: {error}") from error


class Provider(ABC):
    """One way to compute the operators."""

    name = ""
    distribution = ""  # whose version is reported; empty for cunorm itself
    arrays = "own"  # one of VIEWS
    wait: Callable[[Any], Any] | None = None  # for a result, where calls return before they ran

    def supports(self, operator: Operator, direction: str, dtype: str) -> bool:
        """Whether it computes an operator in a direction on a dtype."""
        return True

    def computes(self, operator: Operator) -> Operator:
        """Return what it computes in an operator's place."""
        return operator

    @abstractmethod
    def calls(self, operator: Operator, direction: str, sets: Sequence[Operands]) -> list[Call]:
        """Return the call on each set of operands, all of one shape and dtype."""

    def named(self, operator: Operator, direction: str, result: Any) -> dict[str, Any]:
        """Return the arrays of a call's result by the names of `Operator.outputs`."""
        names = operator.outputs(direction)
        results = (result,) if len(names) == 1 and direction == "forward" else result
        return dict(zip(names, results, strict=True))


def upstream(operands: Operands) -> list[Any]:
    """Return the gradients of y and of the new residual, as far as there is one."""
    return [operands[name] for name in ("dy", "d_residual") if name in operands]
