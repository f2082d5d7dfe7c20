# SPDX-License-Identifier: MIT
"""The checked scalars of a row norm with a quantised result: RowQuantizedSpec."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from cunorm._core import validate
from cunorm._core.dtypes import FLOAT32, INT8, QUANTIZED, SCALES, DType, parse_one_of
from cunorm._core.memo import axis_of
from cunorm._core.operands import DTypes, Specs, dtypes_of, present
from cunorm._core.plan import Checks
from cunorm._core.tensor import Shape
from cunorm._row_norm.blocks import scale_shape
from cunorm._row_norm.order import row_order
from cunorm._row_norm.spec import CHECKS, RowForwardSpec, Scalars
from cunorm.results import QuantizedNorm

_NO_ARRAYS = (Real, str)  # scales that are numbers, or an error
BLOCKS = (32, 64, 128)  # columns
_LEAST, _LARGEST = 2.0**-126, float(np.finfo(np.float32).max)
_LARGEST_OF_INT8 = 2.0**126  # beyond, 1 / scale is subnormal, which is 0 on CUDA
_DEFAULTS = {"block": None, "scale_dtype": "float32", "absmax_bound": None}


@dataclass(frozen=True, slots=True, eq=False)
class RowQuantizedSpec(RowForwardSpec):
    q_dtype: DType
    scale: float | None
    block: int | None
    scale_dtype: DType
    absmax_bound: float | None
    return_y: bool

    output_names = tuple(f"out.{name}" for name in QuantizedNorm._fields)

    def y_dtype(self, dtypes: DTypes) -> DType:
        """Return the dtype to which y is rounded before it is quantised."""
        return self.own_dtype(present(dtypes["x"]), dtypes["weight"])

    def result_dtypes(self, dtypes: DTypes) -> dict[str, DType]:
        """Return the dtypes of the results that are written; a given scale is no result."""
        found = RowForwardSpec.result_dtypes(self, {**dtypes, "y": None})
        if not self.return_y and dtypes["y"] is None:
            del found["y"]
        of_scale = {} if self.gives_scale(dtypes) else {"scale": self.scale_dtype}
        return {"q": self.q_dtype} | of_scale | found

    def scale_shape(self, x_shape: Shape) -> Shape:
        """Return the shape of a scale that the call finds."""
        _, leading_axes = row_order(self.function, x_shape, self.axis)
        return scale_shape(x_shape, leading_axes, self.groups, self.block)

    def numbers(self, width: int) -> tuple[float, ...]:
        """Return the numbers that a forward has, the given scale and the bound of |y|."""
        of_norm = RowForwardSpec.numbers(self, width)
        given = 0.0 if self.scale is None else self.scale
        return (*of_norm, given, math.inf if self.absmax_bound is None else self.absmax_bound)

    def build_fields(self, dtypes: DTypes) -> dict[str, Any]:
        return {
            "rounded_y": self.y_dtype(dtypes),
            "scale": self.scale_dtype,
            "gives_scale": self.gives_scale(dtypes),
            "block": self.block or 0,
            "is_bounded": self.absmax_bound is not None,
        }

    def gives_scale(self, operands: Mapping[str, object]) -> bool:
        """Return whether the caller gives the scale, as a number or as an array."""
        return self.scale is not None or operands["given_scale"] is not None

    def check_given(self, inputs: Specs, given: Specs) -> None:
        """Check the given scale and results."""
        scale, own = inputs["given_scale"], self.y_dtype(dtypes_of(inputs | given))
        if scale is not None and scale.dtype is not FLOAT32:
            raise TypeError(f"{self.function}: scale has dtype {scale.dtype}, expected float32")
        if self.gives_scale(inputs):
            validate.absent(self.function, "out.scale", given["scale"], "scale is given")
        for argument, dtype, name in (
            ("dtype", self.q_dtype, "q"),
            ("scale_dtype", self.scale_dtype, "scale"),
            ("x and weight", own, "y"),
        ):
            validate.agreed_dtype(self.function, argument, dtype, f"out.{name}", given[name])

    def check_options(self, inputs: Specs) -> None:
        RowForwardSpec.check_options(self, inputs)
        if self.gives_scale(inputs):
            for name in ("block", "scale_dtype", "absmax_bound"):
                self._check_default(name, "scale is given")
        if self.q_dtype is INT8:
            self._check_default("scale_dtype", "dtype is int8")
            if self.scale is not None and self.scale > _LARGEST_OF_INT8:
                raise ValueError(
                    f"{self.function}: scale is {self.scale}, expected at most 2**126 as dtype is "
                    "int8: y is multiplied by 1 / scale"
                )

    def _check_default(self, name: str, reason: str) -> None:
        value, default = getattr(self, name), _DEFAULTS[name]
        if str(value) != str(default):
            raise ValueError(
                f"{self.function}: {name} is {value}, expected {default} as {reason}: leave it out"
            )


def _given_scale(function: str, _: str, scale: object) -> float | None:
    if scale is None:
        return None
    return _positive(function, "scale", scale)


def _positive(function: str, argument: str, value: object) -> float:
    """Check a number that float32 has, and that is not subnormal there."""
    expected = "a positive normal number of float32"
    number = validate.finite(function, argument, value, expected)
    if not _LEAST <= number <= _LARGEST:
        raise ValueError(f"{function}: {argument} is {value!r}, expected {expected}")
    return number


def _block(function: str, argument: str, value: object) -> int | None:
    if value is None:
        return None
    block = validate.integer(function, argument, value)
    if block not in BLOCKS:
        raise ValueError(f"{function}: block is {block}, expected None, 32, 64 or 128")
    return block


QUANTIZED_CHECKS: Checks = CHECKS | {
    "axis": lambda function, argument, key: validate.integer(function, argument, axis_of(key)),
    "q_dtype": lambda function, _, dtype: parse_one_of(function, "dtype", dtype, allowed=QUANTIZED),
    "scale": _given_scale,
    "block": _block,
    "scale_dtype": partial(parse_one_of, allowed=SCALES),
    "absmax_bound": lambda *argument: None if argument[-1] is None else _positive(*argument),
    "return_y": validate.flag,
}


# The options of quantised results, in the order in which `quantized_scalars` takes them.
QUANTIZED_OPTIONS = ("dtype", "scale", "block", "scale_dtype", "absmax_bound", "return_y")


def quantized_scalars(forward: Scalars, options: tuple[object, ...]) -> Scalars:
    """Return the scalars of a call from those of its norm; an array as scale is none of them."""
    dtype, scale, *others = options
    return (*forward, dtype, scale if isinstance(scale, _NO_ARRAYS) else None, *others)


def array_or_none(scale: object) -> object:
    """Return a given scale that is an array, or None."""
    return None if isinstance(scale, _NO_ARRAYS) else scale
