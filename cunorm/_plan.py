# SPDX-License-Identifier: MIT
"""What the plans of a GPU (`_cuda_plan`) and of a CPU (`_cpu_plan`) have in common.

A plan depends on shapes, dtypes and the device, never on the number of CPU threads; how a row is
cut into packs depends on its width and the operands' dtypes alone, so that a row's result does not
depend on the rows around it, nor on alignment.
"""

from __future__ import annotations

from typing import NamedTuple

from cunorm._builds import ParamGradTypes
from cunorm._teams import ACCESS_BYTES

GRID_LIMIT = 2**31 - 1


class Walk(NamedTuple):
    """The rows that share a statistic each: in every group of columns there are `rows` of them."""

    rows: int
    width: int
    groups: int = 1

    @property
    def elements(self) -> int:
        """Return how many elements x has."""
        return self.rows * self.width * self.groups

    def not_empty(self) -> Walk:
        """Return this, or one row of it where there is none, for a launch plan."""
        return self if self.rows else self._replace(rows=1)


def sums_pitch(where: Walk, *, twice: bool) -> int:
    """Return the elements of a row of partial sums, with a row of recent ones or without.

    A row of sums is whole cache lines: `sum_pitch` in C++.
    """
    pitch = -(-where.width * where.groups // 16) * 16
    return 2 * pitch if twice else pitch


def common_access(width: int, operands: list[tuple[int, int, tuple[int, ...]]]) -> int:
    """Return how many elements every operand lets a thread move in one access, a power of two.

    Each operand is its pointer, its itemsize, and the strides between its rows in elements. Of
    elements larger than others, one access takes fewer, so alignment counts up to 16 bytes.
    """
    access = min(ACCESS_BYTES, width & -width)
    for pointer, itemsize, strides in operands:
        while access > 1:
            bytes_at_once = min(access * itemsize, ACCESS_BYTES)
            if pointer % bytes_at_once == 0 and not any(
                stride * itemsize % bytes_at_once for stride in strides
            ):
                break
            access //= 2
    return access


def gradients(types: ParamGradTypes) -> int:
    """Return how many gradients param_grad makes."""
    return (types.dweight is not None) + (types.dbias is not None)
