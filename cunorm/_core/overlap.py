# SPDX-License-Identifier: MIT
"""Which arrays of a call share memory: byte extents are compared, then a bounded exact solve."""

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
        specs: OptionalSpecs,  # None where no memory is given; the workspace's is the last
        first_output: int,
        aliases: dict[int, tuple[int, ...]],  # as a Plan has them
    ) -> None:
        self.function, self.names, self.specs = function, names, specs
        self._first_output, self._aliases = first_output, aliases
        extents = [None if spec is None else _extent(spec) for spec in specs]
        # The slots and specs of two arrays, and the bounds of the difference of their addresses
        # between which they may meet.
        self._pairs = []
        for output in range(first_output, len(specs)):
            for other in (*range(first_output, output), *range(first_output)):
                a, b = specs[output], specs[other]
                extent, other_extent = extents[output], extents[other]
                if a is None or b is None or extent is None or other_extent is None:
                    continue
                if a.device == b.device and 0 not in a.shape and 0 not in b.shape:
                    least, most = other_extent[0] - extent[1], other_extent[1] - extent[0]
                    self._pairs.append((output, other, a, b, least, most))

    def of_specs(self, specs: OptionalSpecs) -> "OverlapCheck":
        """Return the check for arrays of other specs."""
        return OverlapCheck(self.function, self.names, specs, self._first_output, self._aliases)

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
    """Whether two arrays share memory, the first lying so many bytes behind the second."""
    base = 1 << 60  # NumPy compares extents, and reads nothing there
    first = host_array(ArrayView(base + difference, a, None, None, writable=False))
    second = host_array(ArrayView(base, b, None, None, writable=False))
    try:
        return np.shares_memory(first, second, max_work=10_000)  # type: ignore[arg-type]  # any int
    except np.exceptions.TooHardError:
        return True


def _extent(spec: TensorSpec) -> tuple[int, int]:
    """Return where the first byte lies, and the end of the last one, from the first element."""
    steps = [stride * (size - 1) for size, stride in zip(spec.shape, spec.strides, strict=True)]
    lowest = sum(step for step in steps if step < 0)
    highest = sum(step for step in steps if step > 0) + 1
    return lowest * spec.dtype.itemsize, highest * spec.dtype.itemsize
