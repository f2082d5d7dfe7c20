# SPDX-License-Identifier: MIT
"""`python -m bench bytes`: the bytes that calls on a GPU move, counted without a GPU.

The kernels run on the tests' software GPU, which counts every access to arrays as large as x. The
exit status is 1 if a call moves more than 1.02, or less than 0.999, times the necessary bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from bench.plans.planned import DIRECTIONS
from bench.plans.traffic_calls import Call, calls, count
from bench.report.records import write_csv
from bench.timing.arguments import list_of
from bench.timing.cases import OPERATORS

LIMIT = 1.02
_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Row:
    """The bytes that one call moves.

    Attributes
    ----------
    minimum
        Bytes of arrays as large as x, each counted once.
    read_again
        Bytes of arrays that the regime reads a second time, because it does not keep them.
    moved, ratio
        Bytes of all accesses to arrays as large as x, and their ratio to minimum + read_again.
    others
        Bytes of parameters, statistics, partial sums and the workspace, once for each kernel.
    of_sectors
        `moved` divided by the bytes of the sectors that the warps' accesses touch.
    """

    operator: str
    memory: str
    direction: str
    dtype: str
    regime: str
    shape: str
    minimum: int
    read_again: int
    moved: int
    ratio: str
    others: int
    of_sectors: str

    def fault(self) -> str:
        """Return the fault of the call; "" if there is none."""
        if float(self.ratio) > LIMIT:
            return f"moves {self.ratio} times what it must, the limit is {LIMIT}"
        return "" if float(self.ratio) >= 0.999 else f"moves {self.ratio} of what it must"


def main(argv: list[str]) -> int:
    """Make the table; return 1 if a call moves too much or too little."""
    options = _arguments(argv)
    chosen = [
        call
        for operator, direction, dtype in product(OPERATORS, DIRECTIONS, _DTYPES)
        if operator.name in options.op
        for call in calls(operator, direction, dtype)
    ]
    rows = list(_measure_all(chosen, options.jobs))
    if options.out:
        write_csv(options.out, Row, rows)
    print(*table(rows), sep="\n")
    return int(any(row.fault() for row in rows))


def measure(call: Call) -> Row:
    """Count the bytes of a call and return its line."""
    found = count(call)
    ratio = found.moved / (found.minimum + found.read_again)
    return Row(
        call.operator.name,
        call.operator.memory,
        call.direction,
        call.dtype,
        call.regime,
        "x".join(map(str, call.shape)),
        found.minimum,
        found.read_again,
        found.moved,
        f"{ratio:.4f}",
        found.others,
        f"{found.of_sectors:.3f}",
    )


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a line for every call."""
    yield (
        f"{'operator':22}{'direction':10}{'dtype':10}{'regime':36}{'shape':>14}"
        f"{'minimum':>10}{'again':>10}{'moved':>10}{'ratio':>8}{'others':>10}"
        f"{'sectors':>9}"
    )
    for row in rows:
        yield (
            f"{f'{row.operator} {row.memory}':22}{row.direction:10}{row.dtype:10}{row.regime:36}"
            f"{row.shape:>14}{row.minimum:10}{row.read_again:10}{row.moved:10}{row.ratio:>8}"
            f"{row.others:10}{row.of_sectors:>9}  {row.fault()}".rstrip()
        )


def _measure_all(chosen: list[Call], jobs: int) -> Iterator[Row]:
    """Yield the rows of calls in their order, with progress on stderr."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for number, row in enumerate(pool.map(measure, chosen), start=1):
            print(f"\r{number}/{len(chosen)} counted", end="", file=sys.stderr, flush=True)
            yield row
    print(file=sys.stderr)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench bytes", description=__doc__)
    names = list(dict.fromkeys(operator.name for operator in OPERATORS))
    parser.add_argument(
        "--op", type=list_of(names), default=names, help=f"some of {', '.join(names)}"
    )
    parser.add_argument("--out", type=Path, help="write a CSV here as well")
    parser.add_argument("--jobs", type=int, default=2, help="processes that count")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
