# SPDX-License-Identifier: MIT
"""A small set of calls for compute-sanitizer: the operators both ways, against the oracle.

Every array is an allocation of its own, so that memcheck sees an access past its end. Usage:
``compute-sanitizer --tool memcheck --error-exitcode 9 python -m bench.gpu_check``
"""

from __future__ import annotations

import sys

from bench.cases import OPERATORS, TOLERANCE, Operator, check

# An odd tail, rows in registers, rows that are streamed.
POINTS = (
    ("float32", (5, 33)),
    ("bfloat16", (37, 1000)),
    ("float32", (9, 4096)),
    ("bfloat16", (3, 70001)),
)


def points(operator: Operator) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Return where an operator is run; where it is another by a number or a flag, on half of them.

    The generic forms are run nowhere: theirs are the builds of layer norm.
    """
    if operator.base == "normalize":
        return ()
    is_small_change = operator.name != operator.function and operator.gate_position is None
    return POINTS[1::2] if is_small_change else POINTS


def main() -> int:
    """Run the set; the number of results that are wrong is the exit status."""
    import cupy

    cupy.cuda.set_allocator(None)
    wrong = 0
    for operator in OPERATORS:
        for dtype, shape in points(operator):
            error = check(operator, dtype, shape, cupy.asarray, cupy.asnumpy)
            right = error <= TOLERANCE[dtype]
            wrong += not right
            verdict = f"{error:.1e} {'ok' if right else 'WRONG'}"
            print(operator.name, dtype, f"{shape[0]}×{shape[1]}:", verdict, flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
