# SPDX-License-Identifier: MIT
"""Every error for wrong input of the row norms, raised before anything is launched.

Each message names the function, the argument, what it got and what it expected.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Iterable, Set
from functools import cache
from math import prod
from typing import Any, NamedTuple

from cunorm._arrays import Form
from cunorm._dtypes import DType
from cunorm._layout import RowsOf
from cunorm._plan import Walk

_WIDTH_LIMIT = 2**31


class Geometry(NamedTuple):
    """How x falls into rows, and those into groups of columns."""

    shape: tuple[int, ...]
    leading_axes: int
    walk: Walk

    @property
    def leading_shape(self) -> tuple[int, ...]:
        """Return the shape of mean and rstd."""
        groups = self.walk.groups
        return self.shape[: self.leading_axes] + ((groups,) if groups > 1 else ())

    @property
    def rows(self) -> RowsOf:
        """Return where the rows of an array of this shape begin."""
        return RowsOf(self.leading_axes, self.walk.groups)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Return the shape of weight and bias."""
        return self.shape[self.leading_axes :]


def integer(function: str, argument: str, value: object) -> int:
    """Return an int that was given as one."""
    if type(value) is int:  # abstract types are slow to ask
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{function}: {argument} is {value!r}, expected an int")
    return int(value)


def geometry(function: str, x: Form, axis: int, groups: int = 1) -> Geometry:
    """Return the rows of x, all axes from `axis` to the last, and their groups."""
    shape, ndim = x.shape, len(x.shape)
    if ndim == 0:
        raise ValueError(f"{function}: x has shape (), expected at least one axis")
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"{function}: axis is {axis}, expected {-ndim} to {ndim - 1} for x of shape {shape}"
        )
    leading_axes = axis % ndim
    width = prod(shape[leading_axes:])
    if not 0 < width < _WIDTH_LIMIT:
        raise ValueError(
            f"{function}: x of shape {shape} has rows of {width} elements (axis {axis}), "
            "expected 1 to 2147483647"
        )
    if groups != 1:
        _check_groups(function, groups, axis, leading_axes == ndim - 1, width)
    return Geometry(shape, leading_axes, Walk(prod(shape[:leading_axes]), width // groups, groups))


def _check_groups(function: str, groups: int, axis: int, axis_is_last: bool, width: int) -> None:
    if groups < 1 or width % groups:
        raise ValueError(
            f"{function}: groups is {groups}, expected a divisor of {width}, the width of a row"
        )
    if not axis_is_last:
        raise ValueError(
            f"{function}: groups is {groups} and axis is {axis}, expected axis -1 with groups"
        )


def same_shape(function: str, argument: str, operand: Form | None, where: Geometry) -> None:
    """Check an operand that has an element for each of x."""
    if operand is not None and operand.shape != where.shape:
        raise ValueError(
            f"{function}: {argument} has shape {operand.shape}, expected {where.shape}, "
            "the shape of x"
        )


def param_shape(function: str, argument: str, operand: Form | None, where: Geometry) -> None:
    """Check an operand that has an element for each of a row."""
    if operand is not None and operand.shape != where.row_shape:
        axes = len(where.row_shape)
        rows = "x.shape[-1]" if axes == 1 else f"x.shape[{-axes}:]"
        raise ValueError(
            f"{function}: {argument} has shape {operand.shape}, expected {where.row_shape} "
            f"to match {rows}"
        )


def statistic(
    function: str, argument: str, operand: Form | None, where: Geometry, compute: DType
) -> None:
    """Check mean or rstd: an element for each row, in the compute type."""
    if operand is None:
        return
    if operand.shape != where.leading_shape:
        raise ValueError(
            f"{function}: {argument} has shape {operand.shape}, expected {where.leading_shape}, "
            "one element for each row of x"
        )
    if operand.dtype is not compute:
        raise TypeError(
            f"{function}: {argument} has dtype {operand.dtype}, expected {compute}, "
            "the compute type: float64 if x, its residual stream or x_dtype is, else float32"
        )


def same_device(function: str, x: Form, operands: Iterable[tuple[str, Form | None]]) -> None:
    """Check that everything lies where x does."""
    for argument, operand in operands:
        if operand is not None and operand.device != x.device:
            raise ValueError(
                f"{function}: {argument} is on {operand.device}, expected {x.device}, "
                "the device of x"
            )


def epsilon(function: str, eps: object) -> float:
    """Return eps as a float."""
    if type(eps) is float and 0.0 <= eps < math.inf:
        return eps
    value = _number(function, "eps", eps)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{function}: eps is {eps!r}, expected a finite number of at least 0")
    return value


def length(function: str, c: object) -> float | None:
    """Return c, the length of a normalised row, as a float."""
    if c is None:
        return None
    value = _number(function, "c", c)
    if not math.isfinite(value):
        raise ValueError(f"{function}: c is {c!r}, expected a finite number or None")
    return value


def finite(function: str, argument: str, given: object) -> float:
    """Return a number as a float."""
    value = _number(function, argument, given)
    if not math.isfinite(value):
        raise ValueError(f"{function}: {argument} is {given!r}, expected a finite number")
    return value


def choice(function: str, argument: str, given: Any, allowed: Collection[str]) -> str:
    """Return a name that must be one of those allowed."""
    if not isinstance(given, str):
        raise TypeError(f"{function}: {argument} is {given!r}, expected {_any_of(allowed)}")
    if given not in allowed:
        raise ValueError(f"{function}: {argument} is {given!r}, expected {_any_of(allowed)}")
    return given


def _any_of(names: Collection[str]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}"


def scale(c: float | None, width: int) -> float:
    """Return k = c / sqrt(width), by which the normalised row is multiplied."""
    return 1.0 if c is None else c / math.sqrt(width)


def _number(function: str, argument: str, value: object) -> float:
    if type(value) is float:  # as for integers
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{function}: {argument} is {value!r}, expected a number")
    try:
        return float(value)
    except OverflowError:  # an int beyond the largest float64
        return math.inf


def flag(function: str, argument: str, value: object) -> bool:
    """Return a bool that was given as one."""
    if not isinstance(value, bool):
        raise TypeError(f"{function}: {argument} is {value!r}, expected True or False")
    return value


_set_of = cache(frozenset[str])


def names(function: str, argument: str, given: Any, allowed: tuple[str, ...]) -> frozenset[str]:
    """Return a set of names, all of them among the allowed ones."""
    if given is allowed:
        return _set_of(allowed)
    expected = f"expected a tuple of {', '.join(map(repr, allowed))}"
    if not isinstance(given, list | tuple | Set):
        raise TypeError(f"{function}: {argument} is {given!r}, {expected}")
    if not all(isinstance(name, str) and name in allowed for name in given):
        raise ValueError(f"{function}: {argument} is {given!r}, {expected}")
    return frozenset(given)


def agreed_dtype(
    function: str, argument: str, asked: DType | None, other: str, operand: Form | None
) -> None:
    """Check that a dtype asked for is the one of an array that settles it too."""
    if asked is not None and operand is not None and operand.dtype is not asked:
        raise ValueError(
            f"{function}: {other} has dtype {operand.dtype}, expected {asked}, that of {argument}"
        )
