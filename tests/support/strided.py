# SPDX-License-Identifier: MIT
"""Calls of row norms whose rows are an axis of x that is not the last."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

import numpy as np

from tests.support.cases import Call, call_of

Array = np.ndarray[Any, Any]


def side_by_side(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Allocate (samples, positions, channels) in the memory of (samples, channels, positions)."""
    samples, positions, channels = shape
    return np.empty((samples, channels, positions), dtype).swapaxes(1, 2)


def channels_first(kernel: str, case: Mapping[str, Any], on: Any) -> Call:
    """Return the call of a case on arrays whose channels are axis 1, which are the rows.

    The case has rows along the last axis, of three. So have the arrays of the call for the oracle.
    """
    call = call_of(kernel, {"layouts": (side_by_side,)} | case, on)

    @wraps(call.function)
    def function(**given: Any) -> Any:
        out = given.pop("out", None)
        if out is not None:
            given["out"] = type(out)(*map(_moved, out))
        given = {name: _moved(one) for name, one in given.items()}
        result = call.function(**given | {"axis": (1,)})
        return type(result)(*map(_moved, result))

    return call._replace(function=function)


def _moved(array: Any) -> Any:
    """Return the view of an array of three axes with the last two exchanged."""
    return array.swapaxes(1, 2) if getattr(array, "ndim", 0) == 3 else array
