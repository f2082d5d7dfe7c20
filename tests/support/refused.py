# SPDX-License-Identifier: MIT
"""Calls that are wrong in one thing: the error is exact, and no array is read, made or written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.calls import Call, arrays_of, call_of, fields, host, parameters_of
from tests.support.operands import at, bits

# What the right call says that goes before: much of what is wrong equals something of it.
RIGHT = {"axis": 1, "groups": 1, "weight_offset": 1.0, "eps": 1.0, "c": 2, "gate_position": "pre"}
OWN = "expected memory of its own"
IN_PLACE = f"{OWN} (or exactly the memory, shape, strides and dtype of an input)"


class Case(NamedTuple):
    """A call of a function, and what its error is after the function's name."""

    name: str
    error: type[Exception]
    text: str
    change: dict[str, Any] | Callable[[Call], dict[str, Any]]  # what is wrong


Table = dict[str, list[Case]]


def each(names: Iterable[str], error: type[Exception], text: str, **change: Any) -> Iterator[Case]:
    """Yield the same error of several functions."""
    for name in names:
        taken = parameters_of(name)
        yield Case(name, error, text, {key: change[key] for key in change if key in taken})


def values(
    names: Iterable[str], error: type[Exception], expected: str, **given: Iterable[Any]
) -> Iterator[Case]:
    """Yield an error for each value of an argument; the others are the same for all of them."""
    ((argument, wrong),) = given.items()
    for value in wrong:
        text = f"{argument} is {value!r}, expected {expected}"
        yield from each(names, error, text, **{argument: value})


def shapes(
    names: Iterable[str], arguments: Iterable[str], wrong: Iterable[Any], expected: str, **more: Any
) -> Iterator[Case]:
    """Yield an error for each shape of an argument."""
    for argument in arguments:
        taking = [name for name in names if argument in parameters_of(name)]
        for shape in wrong:
            array, text = np.ones(shape, np.float32), f"{argument} has shape {shape}, {expected}"
            yield from each(taking, ValueError, text, **more | {argument: array})


def rows_of(table: Table) -> pytest.MarkDecorator:
    """Return the decorator of a test of each row of a table."""
    return pytest.mark.parametrize("cases", table.values(), ids=table)


def check_refused(cases: Iterable[Case], kind: str = "numpy") -> None:
    """Make each wrong call after a right one on the same arrays, with and without given memory."""
    for case in cases:
        call = call_of(case.name, kind=kind, **RIGHT)
        call.make()
        call.run()
        change = case.change(call) if callable(case.change) else case.change
        with at(case):
            if "out" not in change:
                check_error(case, lambda call=call, change=change: call.make(**change))
            _check_nothing_written(case, call, change)


def _check_nothing_written(case: Case, call: Call, change: dict[str, Any]) -> None:
    given = arrays_of(call.arrays | call.out | {"workspace": call.workspace}) | fields_of(change)
    kept = {key: a for key, a in given.items() if isinstance(a, np.ndarray) and a.size < 1 << 20}
    before = {key: bits_of(array) for key, array in kept.items()}
    check_error(case, lambda: call.run(**change))
    for key, array in kept.items():
        np.testing.assert_array_equal(bits_of(array), before[key], key)


def fields_of(change: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of a change, those of its results too."""
    out = change.get("out")
    is_result = isinstance(out, tuple) and hasattr(out, "_asdict")
    return arrays_of(change) | (
        {f"out {k}": a for k, a in fields(out).items()} if is_result else {}
    )


def bits_of(array: Any) -> Any:
    array = host(array)
    return array.copy() if array.dtype.hasobject or array.dtype.fields else bits(array).copy()


def check_error(case: Case, call: Callable[[], Any], front: str = "") -> None:
    """Check that a call raises the error, whose message is exact."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert str(caught.value) == f"{front or case.name}: {case.text}"
    assert type(caught.value) is case.error
