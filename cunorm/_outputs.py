# SPDX-License-Identifier: MIT
"""Arrays that the caller gives for results: what they must be, and what they must not overlap."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from cunorm._arrays import Form, Operand
from cunorm._dtypes import FLOAT32, FLOAT64
from cunorm._layout import WHOLE, RowsOf

InPlace = tuple[tuple[str, tuple[str, ...]], ...]  # for an output, the inputs that it may be


class Place(NamedTuple):
    """An operand by its argument's name, and where it lies."""

    argument: str
    pointer: int
    form: Form


def check_type(function: str, out: object, result: type[tuple[Any, ...]]) -> None:
    """Check that `out` is None or such a tuple of results."""
    if out is not None and not isinstance(out, result):
        raise TypeError(
            f"{function}: out is of type {type(out).__qualname__}, expected a "
            f"{result.__name__} of arrays and Nones"
        )


def check_writable(
    function: str,
    arguments: tuple[str, ...],
    arrays: tuple[Any, ...],
    operands: list[Operand | None],
) -> None:
    """Check that the arrays given for results, as they were described, are writable as they are."""
    for place, operand in enumerate(operands):
        if operand is not None and not (operand.owner is arrays[place] and operand.writable):
            raise ValueError(
                f"{function}: {arguments[place]} cannot be written to in place, expected a "
                "writable, aligned array (JAX arrays are immutable)"
            )


def check_form(
    function: str, argument: str, form: Form | None, shape: tuple[int, ...], rows: RowsOf
) -> None:
    """Check that an array given for a result has its shape, and strides that kernels can follow."""
    if form is None:
        return
    where = f"{function}: {argument}"
    if form.shape != shape:
        raise ValueError(f"{where} has shape {form.shape}, expected {shape}")
    check_own_memory(function, argument, form)
    if rows.layout(form) is None:
        several = "contiguous rows and at most three leading axes that no single stride walks"
        expected = "a contiguous array" if rows is WHOLE else several
        raise ValueError(f"{where} has strides {form.strides}, expected {expected}")


def check_own_memory(function: str, argument: str, form: Form) -> None:
    """Check that each element of an array given for a result has memory of its own."""
    if _overlaps_itself(form):
        raise ValueError(
            f"{function}: {argument} has strides {form.strides}, with which elements may share "
            "memory, expected memory of its own for each element"
        )


def check_accumulators(
    function: str, wanted: Collection[str], given: Mapping[str, Form | None]
) -> None:
    """Check that there are arrays to which the wanted parameters' gradients can be added."""
    for name in ("dweight", "dbias"):
        form = given[name]
        if name in wanted and (form is None or form.dtype not in (FLOAT32, FLOAT64)):
            got = "None" if form is None else f"of dtype {form.dtype}"
            raise ValueError(
                f"{function}: out.{name} is {got}, expected an array of float32 or float64 to add "
                "to, as accumulate is True"
            )


def refuse(function: str, argument: str, form: Form | None, reason: str) -> None:
    """Check that nothing is given for a result that there is not."""
    if form is not None:
        raise ValueError(f"{function}: {argument} is given, expected None: {reason}")


class Overlaps(NamedTuple):
    """What is to be checked of where the arrays of a call lie; the same for all of its plan.

    A result may be, exactly, an input that `in_place` has for it: nobody reads an element of that
    after the thread that writes it.
    """

    function: str
    operands: tuple[tuple[str, Form | None], ...]  # argument and form; inputs, then results
    first_result: int
    in_place: InPlace

    def check(self, pointers: tuple[int, ...]) -> None:
        """Check that no result shares memory with another operand."""
        places = [
            None if form is None else Place(argument, pointer, form)
            for (argument, form), pointer in zip(self.operands, pointers, strict=True)
        ]
        inputs = [place for place in places[: self.first_result] if place is not None]
        results = [place for place in places[self.first_result :] if place is not None]
        for number, result in enumerate(results):
            for other in (*results[:number], *inputs):
                self._check_pair(result, other)

    def _check_pair(self, result: Place, other: Place) -> None:
        if not _share_memory(result, other):
            return
        may_be_same = other.argument in dict(self.in_place).get(result.argument, ())
        if may_be_same and result[1:] == other[1:]:
            return
        also = " (or exactly the memory, shape, strides and dtype of an input)"
        raise ValueError(
            f"{self.function}: {result.argument} overlaps {other.argument}, expected memory of its "
            f"own{also if may_be_same else ''}"
        )


class Plan(Protocol):
    """What is settled of a call, by identity."""

    @property
    def overlaps(self) -> Overlaps:
        """Return what is to be checked of where its arrays lie."""


@lru_cache(maxsize=1024)  # where arrays lie comes again as their forms do
def check_overlap(plan: Plan, pointers: tuple[int, ...], workspace: Form | None) -> None:
    """Check that no result or workspace, whose pointer is the last, shares memory with another."""
    overlaps = plan.overlaps
    named = (*overlaps.operands, ("workspace", workspace))
    overlaps._replace(operands=named).check(pointers)


def _share_memory(a: Place, b: Place) -> bool:
    first, last = _extent(a)
    other_first, other_last = _extent(b)
    if a.form.device != b.form.device or last <= other_first or other_last <= first:
        return False
    try:
        return bool(np.shares_memory(_shadow(a), _shadow(b), max_work=10_000))  # type: ignore[arg-type]  # any int
    except np.exceptions.TooHardError:
        return True


def _extent(place: Place) -> tuple[int, int]:
    """Return the addresses of the first byte and past the last one."""
    form = place.form
    if 0 in form.shape:
        return (0, 0)
    steps = [stride * (size - 1) for size, stride in zip(form.shape, form.strides, strict=True)]
    lowest = sum(step for step in steps if step < 0)
    highest = sum(step for step in steps if step > 0) + 1
    itemsize = form.dtype.itemsize
    return place.pointer + lowest * itemsize, place.pointer + highest * itemsize


class _Shadow:
    """Lies where an array does, for NumPy to reason about and never to read."""

    def __init__(self, place: Place) -> None:
        form = place.form
        itemsize = form.dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "shape": form.shape,
            "strides": tuple(stride * itemsize for stride in form.strides),
            "typestr": f"<u{itemsize}",
            "data": (place.pointer, True),
        }


def _shadow(place: Place) -> np.ndarray[Any, Any]:
    return np.asarray(_Shadow(place))


def _overlaps_itself(form: Form) -> bool:
    """Whether two elements may share memory: axes by stride, each must step over the last."""
    axes = sorted(
        (abs(stride), size)
        for size, stride in zip(form.shape, form.strides, strict=True)
        if size > 1
    )
    reach = 1
    for stride, size in axes:
        if stride < reach:
            return 0 not in form.shape
        reach += stride * (size - 1)
    return False
