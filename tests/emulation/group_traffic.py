# SPDX-License-Identifier: MIT
"""The bytes that the group norms move by a GPU's plans, beside those that they must.

As a table, from the root of the source tree: PYTHONPATH=.:tests python -m emulation.group_traffic
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

from tests.support.operands import DTYPES

from .group_arrays import Grid, Operands, saved
from .group_kernels import Emulated, emulate_group_backward, emulate_group_forward

# Spatial shape, channels and groups. What is moved of a sample does not depend on how many there
# are: here there is one of each, as more would take long. So would more than half of (128, 128).
SHAPES = (
    *(((64, 64), 320, 32), ((64, 128), 128, 32), ((97, 31), 128, 32)),
    *(((8, 8), 320, 32), ((16, 16), 128, 32)),
)
PASSES = {"forward": ("x", "y"), "backward": ("dy", "x", "dx")}


class Call(NamedTuple):
    """What is run: an operand of each kind, silu, all of one dtype."""

    direction: str
    dtype: str
    channels_last: bool
    spatial: tuple[int, ...]
    channels: int
    groups: int


class Traffic(NamedTuple):
    """What one call moved.

    Attributes
    ----------
    launches : int
        Of the group norm itself: one reads x (and dy) once, three twice.
    large, table : int
        Bytes of the arrays of x's size, each access counted; and what they must be.
    workspace, distinct : int
        Bytes of what launches hand on: each access counted, and counted once.
    others : int
        Bytes of parameters, their gradients and statistics, counted once.
    """

    launches: int
    large: int
    table: int
    workspace: int
    distinct: int
    others: int


def calls() -> Iterator[Call]:
    """Yield every call."""
    for direction, dtype, last, shape in product(
        PASSES, ("bfloat16", "float32"), (True, False), SHAPES
    ):
        yield Call(direction, dtype, last, *shape)


def run(call: Call) -> Emulated:
    """Run a call."""
    grid = Grid(1, call.spatial, call.channels, call.channels_last, -1 if call.channels_last else 1)
    make = Operands(grid)
    x, *parameters = make.x(call.dtype), make.param(call.dtype), make.param(call.dtype)
    told = {"activation": "silu", "channel_axis": grid.channel_axis}
    if call.direction == "forward":
        return emulate_group_forward(x, call.groups, *parameters, **told)
    statistics = saved(x, call.groups, grid.channel_axis)
    dy = make.dy(call.dtype)
    return emulate_group_backward(dy, x, call.groups, *parameters, **told, **statistics)


def traffic(call: Call) -> Traffic:
    """Run a call and count."""
    ran = run(call)
    large = PASSES[call.direction]
    kernel = f"group_norm_{call.direction}"
    launches = sum(launch.build.kernel == kernel for launch in ran.launches)
    arrays = len(large) if launches == 1 else 2 * len(large) - 1
    moved = ran.moved[kernel]
    others = {
        name: count
        for result in ran.moved.values()
        for name, count in result.distinct.items()
        if name not in (*large, "workspace")
    }
    return Traffic(
        launches,
        sum(moved.bytes[name] for name in large),
        arrays * DTYPES[call.dtype].itemsize * call.channels * prod(call.spatial),
        sum(result.bytes.get("workspace", 0) for result in ran.moved.values()),
        max(result.distinct.get("workspace", 0) for result in ran.moved.values()),
        sum(others.values()),
    )


def table() -> Iterator[str]:
    """Yield a line for every call; a workspace's bytes as shares of those of the large arrays."""
    yield (
        f"{'':27}{'shape':>18} groups  launches  moved / must  workspace: accesses  distinct  "
        "others, distinct KB"
    )
    for call in calls():
        t = traffic(call)
        shape = "x".join(map(str, (*call.spatial, call.channels)))
        layout = "last" if call.channels_last else "first"
        shares = f"{t.large / t.table:12.4f}  {t.workspace / t.table:19.1%}"
        yield (
            f"{call.direction:9}{call.dtype:9}{layout:9}{shape:>18} {call.groups:6}  "
            f"{t.launches:8}  {shares}  {t.distinct / t.table:8.1%}  {t.others / 1e3:19.1f}"
        )


if __name__ == "__main__":
    for line in table():
        print(line)
