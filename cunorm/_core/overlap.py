# SPDX-License-Identifier: MIT
"""A search for arrays of a call that share memory, by byte extents and a bounded exact solver."""

from collections.abc import Sequence

import numpy as np

from cunorm._core.memo import memoize
from cunorm._core.tensor import ArrayView, OptionalSpecs, TensorSpec, host_array


class OverlapCheck:
    """A check in each call that no given output and no workspace overlaps another array."""

    def __init__(
        self,
        function: str,
        names: tuple[str, ...],  # the names of all arrays in errors
        specs: OptionalSpecs,  # None for an array without given memory; the last is the workspace
        first_output: int,
        aliases: dict[int, tuple[int, ...]],  # as in a Plan
    ) -> None:
        self.function, self.names, self.specs = function, names, specs
        self._first_output, self._aliases = first_output, aliases
        given = [
            (slot, spec, *_extent(spec))
            for slot, spec in enumerate(specs)
            if spec is not None and 0 not in spec.shape
        ]
        outputs_first = sorted(given, key=lambda one: one[0] < first_output)
        # Two slots, their specs, and limits of the difference of addresses if the arrays overlap.
        self._pairs = [
            (output, other, a, b, other_low - high, other_high - low)
            for output, a, low, high in given
            for other, b, other_low, other_high in outputs_first
            if other < output and output >= first_output and a.device == b.device
        ]

    def of_specs(self, specs: OptionalSpecs) -> "OverlapCheck":
        return OverlapCheck(self.function, self.names, specs, self._first_output, self._aliases)

    def check(self, pointers: Sequence[int]) -> None:
        """Raise an error if an output overlaps another array and is not exactly its alias."""
        for output, other, a, b, least, most in self._pairs:
            difference = pointers[output] - pointers[other]
            if not least < difference < most:
                continue
            may_be_same = other in self._aliases.get(output, ())
            if (may_be_same and difference == 0 and a == b) or not share_memory(a, b, difference):
                continue
            also = " (or exactly the memory, shape, strides and dtype of an input)"
            raise ValueError(
                f"{self.function}: {self.names[output]} overlaps {self.names[other]}, expected "
                f"memory of its own{also if may_be_same else ''}"
            )


@memoize()
def share_memory(a: TensorSpec, b: TensorSpec, difference: int) -> bool:
    """Return whether two arrays share memory if a begins `difference` bytes after b."""
    base = 1 << 60  # NumPy compares extents, and reads nothing at these addresses
    first = host_array(ArrayView(base + difference, a, None, None, writable=False))
    second = host_array(ArrayView(base, b, None, None, writable=False))
    try:
        return np.shares_memory(first, second, max_work=10_000)  # type: ignore[arg-type]  # any int
    except np.exceptions.TooHardError:
        return True


def _extent(spec: TensorSpec) -> tuple[int, int]:
    """Return the byte offsets of an array's begin and end from its first element."""
    lowest, highest = 0, 1
    for stride, size in zip(spec.strides, spec.shape, strict=True):
        step = stride * (size - 1)
        if step < 0:
            lowest += step
        else:
            highest += step
    itemsize = spec.dtype.itemsize
    return lowest * itemsize, highest * itemsize
