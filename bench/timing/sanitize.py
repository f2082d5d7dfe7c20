# SPDX-License-Identifier: MIT
"""A small set of calls for compute-sanitizer: all operators, in all directions.

Results are compared with the oracle. Every array is a separate allocation, so that memcheck sees an
access past its end. Usage:
``compute-sanitizer --tool memcheck --error-exitcode 9 python -m bench.timing.sanitize``
"""

from __future__ import annotations

import argparse
import sys
from itertools import zip_longest

from bench.timing import engine, gpu
from bench.timing.arguments import count
from bench.timing.cases import TIMED, Operator, Shape
from bench.timing.gpu_timer import Gpu
from bench.timing.grid import Point
from bench.timing.providers import Cunorm

# An odd tail; rows in registers, twice; rows that are streamed if there are no clusters.
POINTS = (
    *(("float32", (5, 33)), ("bfloat16", (37, 1000))),
    *(("float32", (9, 4096)), ("bfloat16", (3, 70001))),
)
# Groups of few and of many channels, odd planes, and samples of several blocks.
OF_CHANNELS = (
    *(("float32", (3, 64, 5, 7)), ("bfloat16", (2, 320, 16, 16))),
    *(("float32", (2, 33, 9, 11)), ("bfloat16", (1, 128, 97, 31))),
)


def points(operator: Operator) -> tuple[tuple[str, Shape], ...]:
    """Return the points of an operator; half of them if another operator has similar kernels.

    `normalize` and `add_normalize` have none: they share the builds of layer norm.
    """
    if operator.base == "normalize":
        return ()
    if operator.of_channels:
        is_first = "activation" in operator.options and not operator.modulated
        return OF_CHANNELS if is_first else OF_CHANNELS[1::2]
    if operator.of_images:
        return OF_CHANNELS[:2]
    if operator.modulated:
        return tuple((dtype, (2, *shape)) for dtype, shape in POINTS)
    is_small_change = operator.name != operator.plain and operator.gate_position is None
    some = POINTS[1::2] if is_small_change else POINTS
    return tuple((dtype, shape) for dtype, shape in some if operator.takes(shape))


def main(argv: list[str]) -> int:
    """Make the calls; return the number of wrong results."""
    parser = argparse.ArgumentParser(prog="python -m bench.timing.sanitize", description=__doc__)
    parser.add_argument("--every", type=count, default=1, help="make only every Nth call")
    options = parser.parse_args(argv)
    cupy = gpu.cupy()
    cupy.cuda.set_allocator(None)
    device, ours = Gpu(cupy, None), [Cunorm("cunorm-cupy", "own")]
    # All operators get a first point, then all a second, because the time may run out.
    of_each = ([(operator, *point) for point in points(operator)] for operator in TIMED)
    calls = [call for turn in zip_longest(*of_each) for call in turn if call is not None]
    return sum(
        engine.failures_at(device, Point(operator, direction, dtype, shape), ours)
        for operator, dtype, shape in calls[:: options.every]
        for direction in operator.directions
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
