# SPDX-License-Identifier: MIT
"""The operators of the demo: their operands, their calls, and the errors of their results."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import cunorm
from cunorm import reference
from cunorm._group_norm.builds import LAYOUTS
from cunorm._row_norm.spec import MODELS
from cunorm.reference.tolerance import Tolerance, bound
from cunorm.results import AddNorm

Operands = Mapping[str, Any]

_SAMPLES, _GROUPS = 16, 32  # of a group norm, at most
_INPUTS = ("x", "residual", "weight", "bias", "gate")  # of a forward


class Results(NamedTuple):
    """The results of an operator."""

    y: Any  # with the new residual stream of ``add_``
    saved: Any  # by the forward for training
    grads: Any


@dataclass(frozen=True)
class Operator:
    """A norm by the name of its public function."""

    name: str
    parameters: tuple[str, ...]
    eps: float
    form: str = ""  # the name of the options in the table
    options: Mapping[str, Any] = field(default_factory=dict)  # of both directions
    center: bool = False
    c: float | None = None
    mean: float = 0.0  # is added to x

    def __str__(self) -> str:
        return f"{self.name}, {self.form}" if self.form else self.name

    @property
    def base(self) -> str:  # the name before ``_forward`` and ``_backward``
        return "group_norm" if self.is_group_norm else self.name.removeprefix("add_")

    @property
    def is_group_norm(self) -> bool:  # the rows of the input are positions of samples
        return "num_groups" in self.options

    def operands(self, rows: Operands) -> dict[str, Any]:
        """Return its operands, in host memory."""
        names = ["x", "dy", *self.parameters]
        names += ["residual", "d_residual"] if self.name.startswith("add_") else []
        names += ["gate"] if "gate_position" in self.options else []
        operands = {name: rows[name] for name in names}
        if self.is_group_norm:
            count, width = rows["x"].shape
            for name in ("x", "dy"):
                samples = rows[name].reshape(math.gcd(count, _SAMPLES), -1, width)
                samples = np.moveaxis(samples, -1, self.options["channel_axis"])
                operands[name] = np.ascontiguousarray(samples)
        if self.mean:
            operands["x"] = operands["x"] + operands["x"].dtype.type(self.mean)
        return operands

    def forward(self, module: ModuleType, operands: Operands, name: str = "") -> Any:
        """Call the forward for training, or another by its name, of cunorm or of its reference."""
        name, options = name or f"{self.base}_forward", dict(self.options)
        if name == "instance_norm":
            del options["num_groups"]
        if module is cunorm:  # y has x's dtype, also where a float32 parameter would widen it
            options["dtype"] = str(operands["x"].dtype)
        return getattr(module, name)(**_inputs(operands), eps=self.eps, **options)

    def backward(self, module: ModuleType, operands: Operands, saved: Any) -> Any:
        """Call the backward, of cunorm or of its reference, on a forward's result."""
        arrays = {name: array for name, array in operands.items() if name != "residual"}
        if "residual" in operands:
            arrays["x"] = saved.residual
        if saved.mean is not None:
            arrays["mean"] = saved.mean
        call = getattr(module, f"{self.base}_backward")
        return call(**arrays, rstd=saved.rstd, **self.options)

    def described(self, operands: Operands) -> dict[str, Any]:
        """Return the arguments of `warmup` for the calls of `run`."""
        x, options = operands["x"], {**self.options}
        options.pop("c", None)
        names = (self.name, f"{self.base}_forward", f"{self.base}_backward")
        described = (*_INPUTS[1:], "d_residual")
        given = {name: str(operands[name].dtype) for name in described if name in operands}
        width = x.shape[-1]
        if self.is_group_norm:
            width = x.shape[options["channel_axis"]]
            layouts = {axis: layout for layout, axis in LAYOUTS.items()}
            options["layout"] = layouts[options.pop("channel_axis")]
            options["positions"] = x.size // (len(x) * width)
        return {
            "ops": names,
            "widths": width,
            "dtypes": str(x.dtype),
            "rows": len(x),
            "options": {"weight": False, "dtype": str(x.dtype), **given, **options},
        }

    def run(self, operands: Operands) -> Results:
        """Call the function itself, its forward for training and its backward."""
        saved = self.forward(cunorm, operands)
        y = self.forward(cunorm, operands, self.name)
        return Results(y, saved, self.backward(cunorm, operands, saved))

    def moved_bytes(self, operands: Operands, results: Results) -> tuple[int, int]:
        """Return the bytes that the function itself and its backward must read and write."""
        y, saved, grads = results
        written = y if isinstance(y, AddNorm) else (y,)
        unread = ["residual"] if self.options.get("activation") else ["residual", "bias"]
        read = [array for name, array in operands.items() if name not in unread]
        gradients = [grads.dx, grads.dweight, grads.dbias, getattr(grads, "dgate", None)]
        forward = [*_inputs(operands).values(), *written]
        return _bytes(forward), _bytes([*read, saved.mean, saved.rstd, *gradients])

    def tolerance(self, operands: Operands, exact: Any) -> Tolerance:
        """Return the tolerance of the reference's forward result."""
        x = exact.residual if "residual" in operands else operands["x"]
        options, passed = self.options, ("weight_offset", "gate_position", "activation")
        groups = options.get("groups", options.get("num_groups", 1))
        is_first = options.get("channel_axis") == 1
        d = x.shape[1 if is_first else -1] // groups
        is_rounded = MODELS["Llama"].items() <= options.items()
        return Tolerance(
            x,
            operands.get("weight"),
            operands.get("bias"),
            shape=(len(x), 1, groups, d, -1) if is_first else (len(x), -1, groups, d, 1),
            eps=self.eps / d if self.base == "l2_norm" else self.eps,
            c=self.c,
            center=self.center,
            rounded_to=operands["x"].dtype if is_rounded else None,
            gate=operands.get("gate"),
            **{name: options[name] for name in passed if name in options},
        )

    def errors(self, operands: Operands, results: Results) -> tuple[float, float]:
        """Return the worst errors of both directions of `run`, in units of the tolerance."""
        y, saved, grads = results
        exact = self.forward(reference, operands)
        tolerance = self.tolerance(operands, exact)
        errors, y = tolerance.forward(), y if isinstance(y, AddNorm) else AddNorm(y)
        forward = max(worst_error(result, exact, errors) for result in (y, saved))
        exact = self.backward(reference, operands, exact)
        errors = tolerance.backward(operands["dy"], operands.get("d_residual"))
        return forward, worst_error(grads, exact, errors)


def worst_error(result: Any, exact: Any, errors: Mapping[str, Any]) -> float:
    """Return the largest error of a result of NumPy arrays, in units of its bound.

    An exact value beyond the largest of its dtype is expected to be stored as an infinity.
    """
    worst = 0.0
    for name, actual in result._asdict().items():
        right = getattr(exact, name, None)
        if right is None:
            continue
        if actual is None:
            return math.inf
        with np.errstate(all="ignore"):
            stored = right.astype(actual.dtype).astype(np.float64)
            expected = np.where(np.isinf(stored), stored, right.astype(np.float64))
            got = actual.astype(np.float64)
            same = (got == expected) | (np.isnan(got) & np.isnan(expected))
            units = abs(got - expected) / bound(right, errors[name], str(actual.dtype))
            units = np.where(same, 0.0, np.where(np.isnan(units), np.inf, units))
        worst = max(worst, float(units.max()))
    return worst


def _inputs(operands: Operands) -> dict[str, Any]:
    return {name: operands[name] for name in _INPUTS if name in operands}


def _bytes(arrays: Iterable[Any]) -> int:
    return sum(int(array.nbytes) for array in arrays if array is not None)


# What the table shows of a dtype, and what a short one shows, if not all: there is much to compile.
_TABLE = {
    "bfloat16": ("rms_norm", "add_rms_norm", "rms_norm, Llama", "group_norm, silu"),
    "float16": ("rms_norm", "group_norm, silu"),
}
_SHORT_TABLE = {
    "float32": ("rms_norm", "layer_norm", "add_rms_norm", "group_norm, silu"),
    "bfloat16": ("rms_norm",),
    "float16": (),
}


def shown(dtype: str, width: int, is_quick: bool) -> list[Operator]:
    """Return the operators that the table shows for rows of a dtype and a width."""
    names = (_SHORT_TABLE if is_quick else _TABLE).get(dtype)
    return [one for one in operators(width) if names is None or str(one) in names]


def operators(width: int) -> list[Operator]:
    """Return every norm in its forms, for rows of a width."""
    weight, both, scaled = ("weight",), ("weight", "bias"), {"center": True, "c": 1.0}
    forms: dict[str, dict[str, Any]] = {
        "post-gate": {"gate_position": "post"},
        "pre-gate": {"gate_position": "pre"},
        "groups": {"groups": math.gcd(width, 24)},
        **MODELS,
    }
    group_norm = partial(Operator, "group_norm", both, 1e-5, center=True)
    silu = {"num_groups": math.gcd(width, _GROUPS), "activation": "silu", "channel_axis": -1}
    alone = silu | {"num_groups": width, "activation": None}
    return [
        Operator("rms_norm", weight, 1e-6),
        Operator("layer_norm", both, 1e-5, center=True),
        Operator("l2_norm", (), 1e-12, c=1.0),
        Operator("normalize", both, 1e-6, "", scaled, True, 1.0),
        Operator("add_rms_norm", weight, 1e-6),
        Operator("add_layer_norm", both, 1e-5, center=True),
        Operator("add_normalize", both, 1e-6, "", scaled, True, 1.0),
        *(Operator("rms_norm", weight, 1e-6, *form) for form in forms.items()),
        group_norm("silu", silu),
        group_norm("channels first", silu | {"channel_axis": 1}),
        Operator("instance_norm", both, 1e-5, "", alone, center=True),
        group_norm("mean 1e4", silu, mean=1e4),  # which tells deviations from this mean apart
    ]
