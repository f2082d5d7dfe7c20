# SPDX-License-Identifier: MIT
"""A small set of calls for compute-sanitizer: each operator both ways, against the oracle.

Every array is an allocation of its own, so that memcheck sees an access past its end. Usage:
``compute-sanitizer --tool memcheck --error-exitcode 9 python -m bench.gpu_check``
"""

from __future__ import annotations

import sys

from bench.cases import OPERATORS, TOLERANCE, check

# An odd tail, rows in registers, rows that are streamed.
POINTS = (
    ("float32", (5, 33)),
    ("bfloat16", (37, 1000)),
    ("float32", (9, 4096)),
    ("bfloat16", (3, 70001)),
)


def main() -> int:
    """Run the set; the number of results that are wrong is the exit status."""
    import cupy

    cupy.cuda.set_allocator(None)
    wrong = 0
    for operator in OPERATORS:
        for dtype, shape in POINTS:
            error = check(operator, dtype, shape, cupy.asarray, cupy.asnumpy)
            right = error <= TOLERANCE[dtype]
            wrong += not right
            verdict = f"{error:.1e} {'ok' if right else 'WRONG'}"
            print(operator.name, dtype, f"{shape[0]}×{shape[1]}:", verdict, flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
