# SPDX-License-Identifier: MIT
"""The number of rows that have statistics, and their width."""

from math import prod
from typing import NamedTuple


class RowShape(NamedTuple):
    """The rows that have statistics: `rows` rows in each of `groups` groups of `width` columns."""

    rows: int
    width: int
    groups: int = 1

    @property
    def elements(self) -> int:
        return prod(self)

    @property
    def row_width(self) -> int:
        """Return the number of elements of a row with all its groups."""
        return self.width * self.groups

    def not_empty(self) -> "RowShape":
        """Return this shape, or one row if it has none, because a launch plan needs a row."""
        return self if self.rows else self._replace(rows=1)

    def sums_pitch(self, *, twice: bool) -> int:
        """Return the number of elements from one row of partial sums to the next.

        If `twice`, a row of recent sums (see param_sums.cuh) follows each row. A row fills whole
        cache lines of a CPU. `sum_pitch` in types.cuh computes the same number.
        """
        pitch = -(-self.row_width // 16) * 16
        return 2 * pitch if twice else pitch
