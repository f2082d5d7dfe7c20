# SPDX-License-Identifier: MIT
"""The operators as the demo calls them, on a device and in the oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import cunorm
from cunorm import reference
from cunorm._demo._tolerance import backward_bounds, forward_bounds, worst_error
from cunorm.results import AddNorm, NormForward, NormGrads

Operands = Mapping[str, Any]


@dataclass(frozen=True)
class Operator:
    """An operator by the name of the public function, and how the demo calls it."""

    name: str
    parameters: tuple[str, ...]
    eps: float
    center: bool = False
    c: float | None = None

    @property
    def base(self) -> str:
        """The name to which ``_forward`` and ``_backward`` are put."""
        return self.name.removeprefix("add_")

    @property
    def has_residual(self) -> bool:
        """Whether x is added to the residual stream first."""
        return self.name != self.base

    def options(self) -> dict[str, Any]:
        """Return what only the generic form takes."""
        return {"center": self.center, "c": self.c} if self.base == "normalize" else {}

    def apply(self, operands: Operands) -> Any:
        """Call the function itself, which returns y, or y and the new residual stream."""
        inputs = [operands["x"], *([operands["residual"]] if self.has_residual else [])]
        inputs += [operands[name] for name in self.parameters]
        return getattr(cunorm, self.name)(*inputs, eps=self.eps, **self.options())

    def forward(self, module: ModuleType, operands: Operands) -> NormForward:
        """Call the ``_forward`` of cunorm or of its reference."""
        stream = {"residual": operands["residual"]} if self.has_residual else {}
        parameters = [operands[name] for name in self.parameters]
        call = getattr(module, f"{self.base}_forward")
        result: NormForward = call(
            operands["x"], *parameters, eps=self.eps, **stream, **self.options()
        )
        return result

    def backward(self, module: ModuleType, operands: Operands, saved: NormForward) -> NormGrads:
        """Call the ``_backward`` of cunorm or of its reference on what a forward returned."""
        keywords = {"rstd": saved.rstd, **self.options()}
        if self.center:
            keywords["mean"] = saved.mean
        if self.has_residual:
            keywords["d_residual"] = operands["d_residual"]
        parameters = [operands[name] for name in self.parameters]
        call = getattr(module, f"{self.base}_backward")
        x = saved.residual if self.has_residual else operands["x"]
        result: NormGrads = call(operands["dy"], x, *parameters, **keywords)
        return result

    def run(self, operands: Operands) -> tuple[Any, NormForward, NormGrads]:
        """Return what `apply`, `forward` and `backward` do on arrays of a device."""
        saved = self.forward(cunorm, operands)
        return self.apply(operands), saved, self.backward(cunorm, operands, saved)

    def forward_bytes(self, operands: Operands, y: Any) -> int:
        """Return the bytes that `apply` must read and write."""
        read = ["x", *(["residual"] if self.has_residual else []), *self.parameters]
        written = y if isinstance(y, AddNorm) else (y,)
        return _bytes([operands[name] for name in read], written)

    def backward_bytes(self, operands: Operands, saved: NormForward, grads: NormGrads) -> int:
        """Return the bytes that `backward` must read and write; the values of bias are not read."""
        read = ["dy", "x", *(["d_residual"] if self.has_residual else [])]
        read += [name for name in self.parameters if name == "weight"]
        statistics = [array for array in (saved.mean, saved.rstd) if array is not None]
        written = [array for array in (grads.dx, grads.dweight, grads.dbias) if array is not None]
        return _bytes([*(operands[name] for name in read), *statistics], written)


_BOTH = ("weight", "bias")
OPERATORS = (
    Operator("rms_norm", ("weight",), 1e-6),
    Operator("layer_norm", _BOTH, 1e-5, center=True),
    Operator("l2_norm", (), 1e-12, c=1.0),
    Operator("normalize", _BOTH, 1e-6, center=True, c=1.0),
    Operator("add_rms_norm", ("weight",), 1e-6),
    Operator("add_layer_norm", _BOTH, 1e-5, center=True),
    Operator("add_normalize", _BOTH, 1e-6, center=True, c=1.0),
)


class Oracle:
    """What is exact for an operator and operands in host memory."""

    def __init__(self, operator: Operator, operands: Operands) -> None:
        self.operator, self.operands = operator, operands
        self._exact = operator.forward(reference, operands)

    def forward_error(self, y: Any, saved: NormForward) -> float:
        """Return the worst error of `apply` and of ``_forward``, in units of the tolerance."""
        bias = self.operands["bias"] if "bias" in self.operator.parameters else None
        bounds = forward_bounds(self._exact, bias, str(saved.y.dtype))
        applied = bounds.keys() & (AddNorm._fields if isinstance(y, AddNorm) else ("y",))
        of_y = worst_error(y if isinstance(y, AddNorm) else AddNorm(y), bounds, applied)
        return max(of_y, worst_error(saved, bounds, bounds))

    def backward_error(self, grads: NormGrads) -> float:
        """Return the worst error of ``_backward``, in units of the tolerance."""
        operator, operands = self.operator, self.operands
        exact = operator.backward(reference, operands, self._exact)
        eps = operator.eps / (operands["x"].shape[-1] if operator.base == "l2_norm" else 1)
        bounds = backward_bounds(
            exact,
            operands["dy"],
            self._exact.residual if operator.has_residual else operands["x"],
            operands["weight"] if operator.parameters else None,
            operands["d_residual"] if operator.has_residual else None,
            rstd=self._exact.rstd,
            c=operator.c,
            center=operator.center,
            eps=eps,
        )
        return worst_error(grads, bounds, bounds)


def _bytes(read: Any, written: Any) -> int:
    return sum(int(array.nbytes) for array in (*read, *written))
