# SPDX-License-Identifier: MIT
"""The arrays of one call of a kernel, each in guarded memory of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from cunorm._arrays import Form, Operand, describe
from cunorm._layout import SINGLE_ROW, RowLayout, RowsOf

from .emulator import GuardedArray, guarded

_WIDEST_ACCESS = 16  # bytes


class Memory:
    """Places arrays by operand; one that is computed in place stands under its input's name too.

    Parameters
    ----------
    at : {"end", "start"}
        The side on which arrays touch a guard page.
    offset : int or None
        The number of elements by which each array misses an address that 16 divides. None: flush
        with the guard page, wherever that is.
    """

    def __init__(self, at: Literal["end", "start"], offset: int | None) -> None:
        self.arrays: dict[str, GuardedArray] = {}
        self._at: Literal["end", "start"] = at
        self._offset = offset

    def place_inputs(
        self, inputs: Mapping[str, np.ndarray | None], outputs: Mapping[str, np.ndarray]
    ) -> None:
        """Copy inputs; one that is an output too may be written to."""
        for name, array in inputs.items():
            if array is not None:
                in_place = any(array is output for output in outputs.values())
                self.arrays[name] = self._placed(array, "inout" if in_place else "input")

    def place_outputs(
        self, outputs: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray | None]
    ) -> None:
        """Make arrays of the layouts of these; where one is an input itself, take that."""
        for name, layout in outputs.items():
            aliased = next((n for n, array in inputs.items() if array is layout), None)
            self.arrays[name] = self.arrays[aliased] if aliased else self._placed(layout, "output")

    def place_sums(self, count: int, dtype: np.dtype) -> None:
        """Make the array that one kernel writes and the next reads; poison at first."""
        self.arrays["sums"] = self._placed(np.empty(count, dtype), "inout")
        self.arrays["sums"].poison()

    def place_workspace(self, count: int, dtype: np.dtype) -> None:
        """Make the array in which launches hand on numbers, aligned; poison at first."""
        place = {"role": "inout", "alignment": _WIDEST_ACCESS}
        self.arrays["workspace"] = guarded(np.empty(count, dtype), **place)
        self.arrays["workspace"].poison()

    def array(self, name: str) -> np.ndarray | None:
        """Return an array, None where the call has none of that name."""
        return self.arrays[name].array if name in self.arrays else None

    def operand(self, name: str) -> Operand | None:
        """Describe an array as the public functions would."""
        array = self.array(name)
        return None if array is None else describe("emulation", name, array)

    def form(self, name: str) -> Form | None:
        """Return the form of an array, None where the call has none of that name."""
        operand = self.operand(name)
        return None if operand is None else operand.form

    def layout(self, name: str, rows: RowsOf) -> RowLayout:
        """Return where the rows of an array are that has one for each of x."""
        form = self.form(name)
        if form is None:
            return SINGLE_ROW
        layout = rows.layout(form)
        assert layout is not None, f"the kernels cannot follow the strides of {name}"
        return layout

    def ranges(self, names: set[str]) -> dict[str, GuardedArray]:
        """Return the arrays of these names that there are, each once."""
        found: dict[str, GuardedArray] = {}
        for name, array in self.arrays.items():
            if name in names and not any(array is other for other in found.values()):
                found[name] = array
        return found

    def _placed(self, array: np.ndarray, role: Literal["input", "output", "inout"]) -> GuardedArray:
        if self._offset is None:
            return guarded(array, role=role, at=self._at)
        alignment = max(_WIDEST_ACCESS, array.itemsize)
        offset = self._offset * array.itemsize % alignment
        return guarded(array, role=role, at=self._at, alignment=alignment, offset=offset)
