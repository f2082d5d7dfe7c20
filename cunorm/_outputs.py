# SPDX-License-Identifier: MIT
"""Arrays that the caller gives for results: what they must be, and what they must not overlap."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from cunorm._arrays import Operand, describe
from cunorm._layout import RowsOf

Named = tuple[str, Operand | None]


def fields(function: str, out: Any, result: type[Any]) -> dict[str, Any]:
    """Return the arrays in `out`, which is None or a result tuple of arrays and Nones."""
    if out is None:
        return dict.fromkeys(result._fields)
    if not isinstance(out, result):
        raise TypeError(
            f"{function}: out is a {type(out).__qualname__}, expected a {result.__name__} "
            "of arrays and Nones"
        )
    arrays: dict[str, Any] = out._asdict()
    return arrays


def given(
    function: str, argument: str, array: Any, shape: tuple[int, ...], rows: RowsOf
) -> Operand | None:
    """Describe an array for a result, None where there is none; its rows begin at an axis."""
    if array is None:
        return None
    operand = describe(function, argument, array)
    where = f"{function}: {argument}"
    if operand.owner is not array or not operand.writable:
        raise ValueError(
            f"{where} cannot be written to in place, expected a writable, aligned array "
            "(JAX arrays are immutable)"
        )
    if operand.shape != shape:
        raise ValueError(f"{where} has shape {operand.shape}, expected {shape}")
    if _overlaps_itself(operand):
        raise ValueError(
            f"{where} has strides {operand.strides}, with which elements share memory, "
            "expected memory of its own for each element"
        )
    if rows.layout(operand) is None:
        raise ValueError(
            f"{where} has strides {operand.strides}, expected contiguous rows and at most three "
            "leading axes that no single stride walks"
        )
    return operand


def refuse(function: str, argument: str, array: Any, reason: str) -> None:
    """Check that nothing is given for a result that there is not."""
    if array is not None:
        raise ValueError(f"{function}: {argument} is given, expected None: {reason}")


def check_overlap(
    function: str,
    outputs: Sequence[Named],
    inputs: Sequence[Named],
    in_place: Mapping[str, Collection[str]],
) -> None:
    """Check that no output shares memory with another operand.

    It may be, exactly, an input that `in_place` has for it: nobody reads an element of that after
    the thread that writes it.
    """
    for number, (argument, output) in enumerate(outputs):
        if output is None:
            continue
        allowed = in_place.get(argument, ())
        for other_argument, other in (*outputs[:number], *inputs):
            if other is None or not _share_memory(output, other):
                continue
            if other_argument in allowed and _same_place(output, other):
                continue
            also = " (or exactly the memory, shape, strides and dtype of an input)"
            raise ValueError(
                f"{function}: {argument} overlaps {other_argument}, expected memory of its own"
                f"{also if allowed else ''}"
            )


def _same_place(a: Operand, b: Operand) -> bool:
    return (
        a.pointer == b.pointer
        and a.shape == b.shape
        and a.strides == b.strides
        and a.dtype is b.dtype
    )


def _share_memory(a: Operand, b: Operand) -> bool:
    first, last = _extent(a)
    other_first, other_last = _extent(b)
    if a.device != b.device or last <= other_first or other_last <= first:
        return False
    try:
        return bool(np.shares_memory(_shadow(a), _shadow(b), max_work=10_000))  # type: ignore[arg-type]  # any int
    except np.exceptions.TooHardError:
        return True


def _extent(operand: Operand) -> tuple[int, int]:
    """Return the addresses of the first byte and past the last one."""
    if 0 in operand.shape:
        return (0, 0)
    steps = [
        stride * (size - 1) for size, stride in zip(operand.shape, operand.strides, strict=True)
    ]
    lowest = sum(step for step in steps if step < 0)
    highest = sum(step for step in steps if step > 0) + 1
    itemsize = operand.dtype.itemsize
    return operand.pointer + lowest * itemsize, operand.pointer + highest * itemsize


class _Shadow:
    """Has the place of an operand, for NumPy to reason about and never to read."""

    def __init__(self, operand: Operand) -> None:
        itemsize = operand.dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "shape": operand.shape,
            "strides": tuple(stride * itemsize for stride in operand.strides),
            "typestr": f"<u{itemsize}",
            "data": (operand.pointer, True),
        }


def _shadow(operand: Operand) -> np.ndarray[Any, Any]:
    return np.asarray(_Shadow(operand))


def _overlaps_itself(operand: Operand) -> bool:
    """Whether two elements may share memory: axes by stride, each must step over the last."""
    axes = sorted(
        (abs(stride), size)
        for size, stride in zip(operand.shape, operand.strides, strict=True)
        if size > 1
    )
    reach = 1
    for stride, size in axes:
        if stride < reach:
            return 0 not in operand.shape
        reach += stride * (size - 1)
    return False
