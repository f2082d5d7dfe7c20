# SPDX-License-Identifier: MIT
"""The row norms as the demo calls them, on a device and in the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import cunorm
from cunorm import reference
from cunorm._demo._tolerance import Rows, backward_bounds, forward_bounds
from cunorm._demo._ulps import worst_error
from cunorm._core.dtypes import FLOAT16, DType
from cunorm.results import AddNorm, NormForward, NormGrads

Operands = Mapping[str, Any]


@dataclass(frozen=True)
class Operator:
    """A row norm by the name of the public function, and how the demo calls it."""

    name: str
    parameters: tuple[str, ...]
    eps: float
    center: bool = False
    c: float | None = None
    form: str = ""  # what the table calls `told`
    told: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of both directions

    def __str__(self) -> str:
        return f"{self.name}, {self.form}" if self.form else self.name

    @property
    def base(self) -> str:
        """The name to which ``_forward`` and ``_backward`` are put."""
        return self.name.removeprefix("add_")

    @property
    def has_residual(self) -> bool:
        """Whether x is added to the residual stream first."""
        return self.name != self.base

    @property
    def has_gate(self) -> bool:
        """Whether there is a gate."""
        return "gate_position" in self.told

    def options(self, operands: Operands) -> dict[str, Any]:
        """Return what forward and backward are told."""
        options = dict(self.told)
        if self.base == "normalize":
            options |= {"center": self.center, "c": self.c}
        if self.has_gate:
            options["gate"] = operands["gate"]
        if "groups" in options:  # as many as the width has room for
            options["groups"] = math.gcd(operands["x"].shape[-1], options["groups"])
        return options

    def warm_up(self, operands: Operands, device: str) -> None:
        """Compile what `run` needs, on operands of the host or of the device."""
        x = operands["x"]
        options = {name: told for name, told in self.options(operands).items() if name != "c"}
        given = (*self.parameters, *(["residual"] if self.has_residual else []))
        options |= {name: str(operands[name].dtype) for name in given}
        if self.has_gate:
            options["gate"] = str(operands["gate"].dtype)
        names = [f"{self.base}_forward", f"{self.base}_backward"]
        dtype = str(x.dtype)
        options |= {"device": device, "rows": x.shape[0], "dtype": dtype}
        cunorm.warmup(names, x.shape[-1], dtype, workers=1, progress=False, **options)

    def apply(self, operands: Operands) -> Any:
        """Call the function itself, which returns y, or y and the new residual stream."""
        inputs = [operands["x"], *([operands["residual"]] if self.has_residual else [])]
        inputs += [operands[name] for name in self.parameters]
        options = {"dtype": str(operands["x"].dtype), **self.options(operands)}
        return getattr(cunorm, self.name)(*inputs, eps=self.eps, **options)

    def forward(self, module: ModuleType, operands: Operands) -> NormForward:
        """Call the ``_forward`` of cunorm or of its reference.

        y has x's dtype, also where a parameter in float32 would make it float32.
        """
        options = self.options(operands)
        if self.has_residual:
            options["residual"] = operands["residual"]
        if module is cunorm:
            options["dtype"] = str(operands["x"].dtype)
        parameters = [operands[name] for name in self.parameters]
        call = getattr(module, f"{self.base}_forward")
        result: NormForward = call(operands["x"], *parameters, eps=self.eps, **options)
        return result

    def backward(self, module: ModuleType, operands: Operands, saved: NormForward) -> NormGrads:
        """Call the ``_backward`` of cunorm or of its reference on what a forward returned."""
        keywords = {"rstd": saved.rstd, **self.options(operands)}
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
        read += ["gate"] if self.has_gate else []
        written = y if isinstance(y, AddNorm) else (y,)
        return bytes_of([operands[name] for name in read], written)

    def backward_bytes(self, operands: Operands, saved: NormForward, grads: NormGrads) -> int:
        """Return the bytes that `backward` must read and write; the values of bias are not read."""
        read = ["dy", "x", *(["d_residual"] if self.has_residual else [])]
        read += [*(["gate"] if self.has_gate else [])]
        read += [name for name in self.parameters if name == "weight"]
        statistics = [array for array in (saved.mean, saved.rstd) if array is not None]
        written = [grads.dx, grads.dweight, grads.dbias, grads.dgate]
        return bytes_of(
            [*(operands[name] for name in read), *statistics],
            [array for array in written if array is not None],
        )

    def oracle(self, operands: Operands) -> Oracle:
        """Return what is exact for operands in host memory."""
        return Oracle(self, operands)


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
_TOLD: dict[str, dict[str, Any]] = {
    "post-gate": {"gate_position": "post"},
    "pre-gate": {"gate_position": "pre"},
    "groups": {"groups": 24},
    "Gemma": {"weight_offset": 1.0},
    "Llama": {"round_before_weight": True},
}
# The bounds take a gate to be of silu, and of rows without center.
FORMS = tuple(
    Operator("rms_norm", ("weight",), 1e-6, form=form, told=told) for form, told in _TOLD.items()
)


def operators_of(dtype: DType) -> tuple[Operator, ...]:
    """Return what is run on a dtype: in float16 no further forms, as there is much to compile."""
    return OPERATORS if dtype is FLOAT16 else OPERATORS + FORMS


class Oracle:
    """What is exact for an operator and operands in host memory."""

    def __init__(self, operator: Operator, operands: Operands) -> None:
        self.operator, self.operands = operator, operands
        self._exact = operator.forward(reference, operands)
        self.rows = self._taken_apart()

    def _taken_apart(self) -> Rows:
        operator, operands = self.operator, self.operands
        x, options = operands["x"], operator.options(operands)
        is_rounded = options.get("round_before_weight", False)
        return Rows.of(
            self._exact.residual if operator.has_residual else x,
            operands["weight"] if operator.parameters else None,
            operands["bias"] if "bias" in operator.parameters else None,
            options.get("gate"),
            is_pre_gate=options.get("gate_position") == "pre",
            groups=options.get("groups", 1),
            weight_offset=options.get("weight_offset", 0.0),
            rounded_to=x.dtype if is_rounded else None,
            c=operator.c,
            center=operator.center,
            eps=operator.eps / (x.shape[-1] if operator.base == "l2_norm" else 1),
        )

    def forward_error(self, y: Any, saved: NormForward) -> float:
        """Return the worst error of `apply` and of ``_forward``, in units of the tolerance."""
        bounds = forward_bounds(self.rows, self._exact, str(saved.y.dtype))
        applied = bounds.keys() & (AddNorm._fields if isinstance(y, AddNorm) else ("y",))
        of_y = worst_error(y if isinstance(y, AddNorm) else AddNorm(y), bounds, applied)
        return max(of_y, worst_error(saved, bounds, bounds))

    def backward_error(self, grads: NormGrads) -> float:
        """Return the worst error of ``_backward``, in units of the tolerance."""
        operator, operands = self.operator, self.operands
        exact = operator.backward(reference, operands, self._exact)
        d_residual = operands["d_residual"] if operator.has_residual else None
        bounds = backward_bounds(self.rows, exact, operands["dy"], d_residual)
        return worst_error(grads, bounds, bounds)


def bytes_of(read: Iterable[Any], written: Iterable[Any]) -> int:
    """Return the bytes of all the arrays."""
    return sum(int(array.nbytes) for array in (*read, *written))
