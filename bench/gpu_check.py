# SPDX-License-Identifier: MIT
"""A small set of calls for compute-sanitizer: every operator, both directions, and the oracle.

Every array is a separate allocation, so that memcheck sees an access past its end. Usage:
``compute-sanitizer --tool memcheck --error-exitcode 9 python -m bench.gpu_check``
"""

from __future__ import annotations

import sys
from functools import partial

from bench.arrays import upload
from bench.cases import OPERATORS, TOLERANCE, Operator, Shape, check

# An odd tail, rows in registers, streamed rows.
POINTS = (
    ("float32", (5, 33)),
    ("bfloat16", (37, 1000)),
    ("float32", (9, 4096)),
    ("bfloat16", (3, 70001)),
)

# Few channels in a group and many, odd planes, and samples of several blocks.
OF_CHANNELS = (
    ("float32", (3, 64, 5, 7)),
    ("bfloat16", (2, 320, 16, 16)),
    ("float32", (2, 33, 9, 11)),
    ("bfloat16", (1, 128, 97, 31)),
)


def points(operator: Operator) -> tuple[tuple[str, Shape], ...]:
    """Return the points of an operator; half of them if only a number or a flag is special.

    The generic forms have no points: they share the builds of layer norm.
    """
    if operator.base == "normalize":
        return ()
    if operator.of_channels:
        return OF_CHANNELS if "activation" in operator.options else OF_CHANNELS[1::2]
    is_small_change = operator.name != operator.function and operator.gate_position is None
    return POINTS[1::2] if is_small_change else POINTS


def main() -> int:
    """Run the set; the exit status is the number of wrong results."""
    import cupy

    cupy.cuda.set_allocator(None)
    wrong = 0
    for operator in OPERATORS:
        for dtype, shape in points(operator):
            error = check(operator, dtype, shape, partial(upload, cupy), cupy.asnumpy)
            right = error <= TOLERANCE[dtype]
            wrong += not right
            verdict = f"{error:.1e} {'ok' if right else 'WRONG'}"
            print(operator.label, dtype, "×".join(map(str, shape)) + ":", verdict, flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
