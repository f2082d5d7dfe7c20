# SPDX-License-Identifier: MIT
"""Which arrays of a call share memory: byte extents are compared, then a bounded exact solve."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cunorm._core.memo import memoize
from cunorm._core.tensor import ArrayView, OptionalSpecs, TensorSpec, host_array


class Pair(NamedTuple):
    """A given output and another array of its call, by their places.

    They may meet where the output's address less the other's is between `least` and `most`.
    """

    output: int
    other: int  # an input, an earlier output, or the workspace
    least: int
    most: int


def pairs(specs: OptionalSpecs, first_output: int, given: Sequence[int]) -> Iterator[Pair]:
    """Yield the pairs to compare in each call; `given` are the places of given outputs."""
    for number, place in enumerate(given):
        for other in (*given[:number], *range(first_output)):
            spec, other_spec = specs[place], specs[other]
            if spec is None or other_spec is None or 0 in (*spec.shape, *other_spec.shape):
                continue
            if spec.device == other_spec.device:
                (low, high), (other_low, other_high) = _extent(spec), _extent(other_spec)
                yield Pair(place, other, other_low - high, other_high - low)


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
        self.function, self.names, self._specs, self._aliases = function, names, specs, aliases
        given = [place for place in range(first_output, len(specs)) if specs[place] is not None]
        self._pairs = [*pairs(specs, first_output, given)]

    def check(self, pointers: Sequence[int]) -> None:
        """Raise where an output shares memory with another array, unless it is exactly an alias."""
        for output, other, least, most in self._pairs:
            difference = pointers[output] - pointers[other]
            if least < difference < most:
                self._check_pair(output, other, difference)

    def _check_pair(self, output: int, other: int, difference: int) -> None:
        spec, other_spec = self._specs[output], self._specs[other]
        assert spec is not None
        assert other_spec is not None
        may_be_same = other in self._aliases.get(output, ())
        is_same = difference == 0 and spec == other_spec
        if (may_be_same and is_same) or not share_memory(spec, other_spec, difference):
            return
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
