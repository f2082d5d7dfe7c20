# SPDX-License-Identifier: MIT
"""Parameters with several rows: which rows of x share a row of each, and how sums are added up."""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from cunorm._core.param_grad import AxesMap, Parts, axes_map
from cunorm._core.tensor import Shape, contiguous_strides

Own = tuple[bool, ...]  # for each leading axis of x: whether a parameter has several rows along it


def own_axes(leading: Shape, ndim: int, shape: Shape) -> Own:
    """Return the axes along which a parameter has rows of its own; x has `ndim` axes in all."""
    sizes = (*[1] * (ndim - len(shape)), *shape)[: len(leading)]
    return tuple(size == rows != 1 for size, rows in zip(sizes, leading, strict=True))


class Segments(NamedTuple):
    """The segments of a backward: the rows of a segment share their parameters.

    `own` has the parameters of which rows that differ have different rows; each row of x has a row
    of its own of the parameters in `of_row`, which make no segments.
    """

    number: int
    rows: int  # the rows of a segment
    first: AxesMap  # of a segment: its first row
    inside: AxesMap  # of a row of a segment, counted from the first
    shape: Shape  # the sizes of the axes along which segments lie
    own: Mapping[str, Own]  # along these axes
    of_row: tuple[str, ...]

    @property
    def axes(self) -> int:
        """Return how many axes an index walks at most."""
        return max(self.first.axes, self.inside.axes)

    def parts_of(self, name: str, parts: int) -> Parts:
        """Return which rows of sums a parameter's gradient adds up; a segment has `parts` rows."""
        own, steps = self.own[name], contiguous_strides(self.shape)
        found: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for size, step, is_own in zip(self.shape, steps, own, strict=True):
            found[is_own].append((size, step * parts))
        kept, added = found[True], [*found[False], (parts, 1)]
        segments, summands = (prod(size for size, _ in axes) for axes in (kept, added))
        return Parts(segments, summands, axes_map(kept), axes_map(added))


def segments_of(leading: Shape, parameters: Mapping[str, Own]) -> Segments:
    """Return the segments of x's rows for the weight, bias and shared gate of a backward.

    Raise a ValueError if the rows of a segment, or the segments, lie along more than two axes.
    """
    of_row = tuple(
        name for name, own in parameters.items() if name != "gate" and is_of_row(leading, own)
    )
    shared = {name: own for name, own in parameters.items() if name not in of_row}
    apart = [any(flags) for flags in zip(*shared.values(), strict=True)] or [False] * len(leading)
    axes = list(zip(leading, contiguous_strides(leading), apart, strict=True))
    first = [(size, step) for size, step, is_apart in axes if is_apart]
    inside = [(size, step) for size, step, is_apart in axes if not is_apart]
    return Segments(
        number=prod(size for size, _ in first),
        rows=prod(size for size, _ in inside),
        first=axes_map(first),
        inside=axes_map(inside),
        shape=tuple(size for size, _ in first),
        own={
            name: tuple(flag for flag, is_apart in zip(own, apart, strict=True) if is_apart)
            for name, own in shared.items()
        },
        of_row=of_row,
    )


def is_of_row(leading: Shape, own: Own) -> bool:
    """Return whether no two rows of x share a row of a parameter."""
    return all(flag for flag, size in zip(own, leading, strict=True) if size != 1)
