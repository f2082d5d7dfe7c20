# SPDX-License-Identifier: MIT
"""The interface of providers, which the engine checks and times."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from bench.timing.arrays import as_jax, as_torch
from bench.timing.cases import Call, Operands, Operator, fields

# Functions that turn the device's own arrays, of NumPy or CuPy, into those of a provider.
VIEWS: dict[str, Callable[[Any], Any]] = {
    "own": lambda array: array,
    "torch": as_torch,
    "jax": as_jax,
}


def require_gpu(arrays: str) -> None:
    """Raise ImportError if the framework of `arrays`, a key of VIEWS, cannot use a GPU."""
    if arrays in ("torch", "jax"):  # JAX gets CuPy's arrays through torch
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
    """An implementation of the operators."""

    name = ""
    distribution = ""  # the distribution whose version is reported; empty for cunorm itself
    arrays = "own"  # one of VIEWS
    # Waits for a call's result. Only providers on JAX need it: their calls run in the background.
    wait: Callable[[Any], Any] | None = None

    def supports(self, operator: Operator) -> bool:
        """Whether the provider has an operator."""
        return True

    def computes(self, operator: Operator) -> Operator:
        """Return the operator that the provider computes in place of this operator."""
        return operator

    @abstractmethod
    def calls(self, operator: Operator, direction: str, sets: Sequence[Operands]) -> list[Call]:
        """Return the call on each set of operands, all of one shape and dtype."""

    def results_by_name(self, operator: Operator, direction: str, result: Any) -> dict[str, Any]:
        """Return the arrays of a call's result by their names in `Operator.outputs`."""
        if hasattr(result, "_asdict"):
            return fields(result)
        names = operator.outputs(direction)
        results = (result,) if len(names) == 1 and direction == "forward" else result
        return dict(zip(names, results, strict=True))
