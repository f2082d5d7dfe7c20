# SPDX-License-Identifier: MIT
"""Rows whose axes are not the last of x."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from math import prod
from typing import Any, TypeVar

import numpy as np

Axis = int | tuple[int, ...]  # the first axis of a row, or all its axes
_STATISTICS = ("mean", "rstd", "correction", "sums")

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def row_axes(ndim: int, axis: Axis) -> tuple[int, ...]:
    """Return the axes of a row of x."""
    if isinstance(axis, int):
        return tuple(range(axis % ndim, ndim))
    return tuple(one % ndim for one in axis)


def width(shape: tuple[int, ...], axis: Axis) -> int:
    """Return the number of elements of a row of x."""
    return prod(shape[one] for one in row_axes(len(shape), axis))


def with_axes(function: FunctionT) -> FunctionT:
    """Return a function whose `axis` may also be a tuple: it moves the axes of a row to the end."""
    names = signature(function)

    @wraps(function)
    def of_axes(*args: Any, **options: Any) -> Any:
        given = names.bind(*args, **options).arguments
        axis, x = given.get("axis", -1), given["x"]
        if isinstance(axis, int):
            return function(*args, **options)
        axes = row_axes(x.ndim, axis)
        row = tuple(x.shape[one] for one in axes)
        order = (*(one for one in range(x.ndim) if one not in axes), *axes)

        def moved(name: str, one: Any) -> Any:
            if not isinstance(one, np.ndarray) or name in _STATISTICS or one.shape == row:
                return one
            return one[(None,) * (x.ndim - one.ndim)].transpose(order)

        def moved_back(name: str, one: Any) -> Any:
            if one is None or name in _STATISTICS or one.shape == row:
                return one
            operand = given.get(name.removeprefix("d"), x)
            shape = (x if operand is None else operand).shape
            return one.transpose(np.argsort(order)).reshape(shape)

        inputs = {name: moved(name, one) for name, one in given.items()}
        found = function(**inputs | {"axis": -len(axes)})
        if isinstance(found, np.ndarray):
            return moved_back("y", found)
        return type(found)(*map(moved_back, found._fields, found))

    return of_axes  # type: ignore[return-value]  # mypy does not see that `wraps` keeps the type
