# SPDX-License-Identifier: MIT
"""Layouts: the number of axes of an x, the axis of its rows, and its order in memory."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor


class Layout(NamedTuple):
    """How an x contains its rows."""

    axes: int
    first: bool  # a row is axis 1, as in NCHW; otherwise it is the last axis, as in NHWC
    dense: bool = True  # contiguous; otherwise rows are contiguous, as in channels_last memory

    def place(self, rows: Tensor) -> Tensor:
        """Return an x with the rows of a tensor (samples, eight positions or more, width).

        No axis has one element: a weight of another layout would be broadcast to a huge y.
        """
        if self.axes == 2:
            return rows.flatten(0, 1)
        samples, _, width = rows.shape
        x = rows.reshape(samples, *(2,) * (self.axes - 3), -1, width)
        x = x.movedim(-1, 1) if self.first else x
        return x.contiguous() if self.dense else x

    def rows(self, y: Tensor, like: Tensor) -> Tensor:
        """Undo `place`."""
        return (y.movedim(1, -1) if self.first and self.axes > 2 else y).reshape(like.shape)

    def in_memory(self) -> Iterator["Layout"]:
        """Yield this layout, for each order in memory in which x has it."""
        yield self
        if self.first and self.axes > 3:
            yield self._replace(dense=False)


COUNTS = (3, 4, 5, 2)  # the numbers of axes of x that are tried
LAYOUTS = [Layout(count, first) for count in COUNTS for first in (False, True)[: count - 1]]
