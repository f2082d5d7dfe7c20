# SPDX-License-Identifier: MIT
"""The operators of the demo: their operands, their calls, and the bytes that these move."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from types import ModuleType
from typing import Any

import numpy as np

import cunorm
from cunorm import reference
from cunorm._row_norm.spec import MODELS
from cunorm.reference.tolerance import tolerance_of

Operands = Mapping[str, Any]

DIRECTIONS = ("forward", "backward")
INPUTS = ("x", "residual", "weight", "bias", "gate")  # of a forward
_SAMPLES, _GROUPS = 16, 32  # of a group norm, at most
_MEAN = "1e4"  # is added to the x of one
# What the table shows of a dtype, in full and with --quick, if not all: there is much to compile.
_SHOWN = {
    ("float32", True): ("rms_norm", "layer_norm", "add_rms_norm", "group_norm, silu"),
    ("bfloat16", True): ("rms_norm",),
    ("float16", True): (),
    ("bfloat16", False): ("rms_norm", "add_rms_norm", "rms_norm, Llama", "group_norm, silu"),
    ("float16", False): ("rms_norm", "group_norm, silu"),
}


class Operator:
    """A norm by its name in the table, and the options of both directions."""

    def __init__(self, label: str, options: Mapping[str, Any]) -> None:
        self.label, self.name, self.options = label, label.partition(",")[0], options
        # The name before `_forward` and `_backward`.
        self.base = "group_norm" if "num_groups" in options else self.name.removeprefix("add_")
        self.eps: float = signature(getattr(cunorm, self.name)).parameters["eps"].default

    def operands(self, rows: Operands) -> dict[str, Any]:
        """Return its operands, in host memory."""
        names = {"x", "dy"} | signature(getattr(cunorm, self.base)).parameters.keys()
        names |= {"residual", "d_residual"} if self.name.startswith("add_") else set()
        names -= {"gate"} if "gate_position" not in self.options else set()
        operands = {name: array for name, array in rows.items() if name in names}
        if self.base == "group_norm":  # the rows are positions of samples
            count, width = rows["x"].shape
            for name in ("x", "dy"):
                samples = rows[name].reshape(math.gcd(count, _SAMPLES), -1, width)
                samples = np.moveaxis(samples, -1, self.options["channel_axis"])
                operands[name] = np.ascontiguousarray(samples)
        if self.label.endswith(_MEAN):  # which tells deviations from this mean apart
            operands["x"] = operands["x"] + operands["x"].dtype.type(_MEAN)
        return operands

    def forward(self, module: ModuleType, operands: Operands, name: str = "") -> Any:
        """Call the forward for training, or another by its name, of cunorm or of its reference."""
        name, options = name or f"{self.base}_forward", dict(self.options)
        if name == "instance_norm":
            del options["num_groups"]
        if module is cunorm:  # y has x's dtype, also where a float32 parameter would widen it
            options["dtype"] = str(operands["x"].dtype)
        inputs = {name: operands[name] for name in INPUTS if name in operands}
        return getattr(module, name)(**inputs, **options)

    def backward(self, module: ModuleType, operands: Operands, saved: Any) -> Any:
        """Call the backward, of cunorm or of its reference, on a forward's result."""
        arrays = {name: array for name, array in operands.items() if name != "residual"}
        arrays |= {"x": saved.residual} if "residual" in operands else {}
        arrays |= {} if saved.mean is None else {"mean": saved.mean}
        call = getattr(module, f"{self.base}_backward")
        return call(**arrays, rstd=saved.rstd, **self.options)

    def calls(self, operands: Operands, saved: Any) -> dict[str, Callable[[], Any]]:
        """Return the calls of the function itself and of its backward."""
        forward = partial(self.forward, cunorm, operands, self.name)
        return {"forward": forward, "backward": partial(self.backward, cunorm, operands, saved)}

    def expected(self, operands: Operands) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield the exact results of each direction, and how far off a kernel's may be."""
        exact, options, eps = self.forward(reference, operands), self.options, self.eps
        if self.base == "l2_norm":  # whose eps is added to the sum of squares
            options, eps = {"c": 1.0}, eps / operands["x"].shape[-1]
        tolerance = tolerance_of(operands, options, eps, exact)
        yield exact, tolerance.forward()
        errors = tolerance.backward(operands["dy"], operands.get("d_residual"))
        yield self.backward(reference, operands, exact), errors


def bytes_moved(operands: Operands, saved: Any, activation: str | None) -> dict[str, int]:
    """Return the bytes that a norm's function itself and its backward must read and write.

    A result is as large as an operand: y and dx as x, the residual streams and other gradients as
    their operands.
    """
    arrays = {**operands, "mean": saved.mean, "rstd": saved.rstd}
    sizes = {name: int(array.nbytes) for name, array in arrays.items() if array is not None}
    read = sizes.keys() - ({"residual"} if activation else {"residual", "bias"})
    forward, backward = [*INPUTS, "x", "residual"], [*read, "x", "weight", "bias", "gate"]
    counted = (sum(sizes.get(name, 0) for name in names) for names in (forward, backward))
    return dict(zip(DIRECTIONS, counted, strict=True))


def operators(width: int, dtype: str = "float32", is_quick: bool = False) -> list[Operator]:
    """Return the norms that the table shows for rows of a width and a dtype."""
    scaled, plain = {"center": True, "c": 1.0}, ("rms_norm", "layer_norm", "l2_norm")
    silu = {"num_groups": math.gcd(width, _GROUPS), "activation": "silu", "channel_axis": -1}
    forms: dict[str, dict[str, Any]] = {
        **{name: {} for name in (*plain, "add_rms_norm", "add_layer_norm")},
        **dict.fromkeys(("normalize", "add_normalize"), scaled),
        **{f"rms_norm, {where}-gate": {"gate_position": where} for where in ("post", "pre")},
        "rms_norm, groups": {"groups": math.gcd(width, 24)},
        **{f"rms_norm, {model}": options for model, options in MODELS.items()},
        "group_norm, silu": silu,
        "group_norm, channels first": silu | {"channel_axis": 1},
        "instance_norm": {"num_groups": width, "channel_axis": -1},
        f"group_norm, mean {_MEAN}": silu,
    }
    labels = _SHOWN.get((dtype, is_quick), forms.keys())
    return [Operator(*form) for form in forms.items() if form[0] in labels]
