# SPDX-License-Identifier: MIT
"""Finds arrays of a call that share memory: by byte extents, then by a bounded exact solver."""

from collections.abc import Sequence

import numpy as np

from cunorm._core.memo import memoize
from cunorm._core.tensor import ArrayView, OptionalSpecs, TensorSpec, host_array


class OverlapCheck:
    """Checks in each call that no given output, nor the workspace, overlaps another array."""

    def __init__(
        self,
        function: str,
        names: tuple[str, ...],  # of all arrays, by which errors name them
        specs: OptionalSpecs,  # None where no memory is given
        first_output: int,
        aliases: dict[int, tuple[int, ...]],  # as a Plan has them
    ) -> None:
        self.function, self.names, self._aliases = function, names, aliases
        # For each pair: slots, specs, and the range of address differences with a possible overlap.
        self._pairs = []
        for output in range(first_output, len(specs)):
            for other in (*range(first_output, output), *range(first_output)):
                a, b = specs[output], specs[other]
                if a is None or b is None or a.device != b.device or 0 in (*a.shape, *b.shape):
                    continue
                (low, high), (other_low, other_high) = _extent(a), _extent(b)
                self._pairs.append((output, other, a, b, other_low - high, other_high - low))

    def check(self, pointers: Sequence[int]) -> None:
        """Raise where an output shares memory with another array, unless it is exactly an alias."""
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
    """Whether two arrays share memory if the first begins `difference` bytes after the second."""
    base = 1 << 60  # NumPy compares extents, and reads nothing there
    first = host_array(ArrayView(base + difference, a, None, None, writable=False))
    second = host_array(ArrayView(base, b, None, None, writable=False))
    try:
        return np.shares_memory(first, second, max_work=10_000)  # type: ignore[arg-type]  # any int
    except np.exceptions.TooHardError:
        return True


def _extent(spec: TensorSpec) -> tuple[int, int]:
    """Return the lowest byte offset from the first element, and the end of the highest."""
    steps = [stride * (size - 1) for size, stride in zip(spec.shape, spec.strides, strict=True)]
    lowest = sum(step for step in steps if step < 0)
    highest = sum(step for step in steps if step > 0) + 1
    return lowest * spec.dtype.itemsize, highest * spec.dtype.itemsize
