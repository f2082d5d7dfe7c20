# SPDX-License-Identifier: MIT
"""Calls with one wrong argument: check the exact error, and that no array is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.calls import Call, call_of, parameters_of
from tests.support.operands import at

# Options of the valid call before each wrong call. Many wrong values equal these, as True == 1.
RIGHT = {"axis": 1, "groups": 1, "weight_offset": 1.0, "eps": 1.0, "c": 2}
OWN = "expected memory of its own"
IN_PLACE = f"{OWN} (or exactly the memory, shape, strides and dtype of an input)"


class Case(NamedTuple):
    """A wrong call of a function, and its error's message after the function's name."""

    name: str
    error: type[Exception]
    text: str
    change: dict[str, Any]  # the wrong arguments


Table = dict[str, list[Case]]


def each(names: Iterable[str], error: type[Exception], text: str, **change: Any) -> list[Case]:
    """Return a case with this error for each function, with those changes that it takes."""
    return [
        Case(name, error, text, {key: change[key] for key in change.keys() & parameters_of(name)})
        for name in names
    ]


def rows_of(table: Table) -> pytest.MarkDecorator:
    """Return the decorator that parametrizes a test by the rows of a table."""
    return pytest.mark.parametrize("cases", table.values(), ids=table)


def check_refused(cases: Iterable[Case]) -> None:
    """Make each wrong call after a valid one on the same arrays, without and with `out`."""
    for case in cases:
        call = call_of(case.name, **RIGHT)
        call.make()
        call.run()
        with at(case):
            if "out" not in case.change:
                check_error(case, lambda call=call, case=case: call.make(**case.change))
            _check_nothing_written(case, call)


def _check_nothing_written(case: Case, call: Call) -> None:
    out = case.change.get("out")
    given = call.arrays | call.out | {"workspace": call.workspace} | case.change
    results = out._asdict() if hasattr(out, "_asdict") else {"y": out}
    given |= {f"out {key}": array for key, array in results.items()}
    given = {key: array for key, array in given.items() if isinstance(array, np.ndarray)}
    before = {key: array.tobytes() for key, array in given.items() if array.size < 1 << 20}
    check_error(case, lambda: call.run(**case.change))
    for key, kept in before.items():
        assert given[key].tobytes() == kept, key


def check_error(case: Case, call: Callable[[], Any]) -> None:
    """Check that a call raises the error with exactly this message."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert str(caught.value) == f"{case.name}: {case.text}"
    assert type(caught.value) is case.error
