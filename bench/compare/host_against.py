# SPDX-License-Identifier: MIT
"""The host cost of small calls, here and in another checkout: medians and ratios.

Each checkout has its own processes, which run this checkout's bench. The two processes of a pair
alternate after each run, so that other work on the machine slows both. There are several pairs,
because a process may be slow for its whole life.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.compare import host
from bench.compare.host import Times
from bench.compare.host_calls import CALLS, Key
from bench.timing import machine
from bench.timing.cases import Operator
from bench.timing.cpu import Cpu

PAIRS, RUNS = 5, 3  # pairs of processes, and runs of each pair

_SERVE = """
import sys
checkout, bench, operators, threads = sys.argv[1:]
sys.path.insert(0, checkout)
import cunorm
sys.path[0] = bench
from bench.compare import host_calls
host_calls.serve(operators.split(","), int(threads))
"""


def run(operators: Sequence[Operator], device: Cpu, checkout: Path, out: Path | None) -> int:
    """Time both checkouts, print the medians and their ratios, and write a CSV."""
    both = (host.CHECKOUT, checkout.resolve())
    here, other = times(both, [operator.name for operator in operators], device.threads)
    here[host.IMPORT], other[host.IMPORT] = host.import_times(both)
    environment = host.environment(device)
    other_environment = replace(environment, commit=machine.commit_of(checkout))
    print(f"{environment}, against {other_environment.commit}\n\n{table(here, other)}")
    if out is not None:
        host.write_csv(out, [(environment, here), (other_environment, other)])
    return 0


class Worker:
    """A process that times the calls of a checkout's cunorm."""

    def __init__(self, checkout: Path, operators: Sequence[str], threads: int) -> None:
        bench = Path(__file__).parents[2]
        arguments = [str(checkout), str(bench), ",".join(operators), str(threads)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.keys: list[Key] = []

    def __enter__(self) -> Worker:
        """Wait until the calls of the process are ready."""
        self.keys = [tuple(key) for key in json.loads(self._answer())]
        return self

    def __exit__(self, *_error: object) -> None:
        """End the process."""
        self._process.communicate()

    def time(self, number: int) -> float:
        """Run the calls of the key with this number, and return µs per call."""
        print(number, file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"a process of the bench ended with {self._process.wait()}")
        return line


def times(checkouts: Sequence[Path], operators: Sequence[str], threads: int) -> list[Times]:
    """Return the times of each checkout's calls; the first round of a pair is a warmup."""
    rounds: list[Times] = []
    order = random.Random(0)
    for _ in range(PAIRS):
        with ExitStack() as stack:
            workers = [Worker(checkout, operators, threads) for checkout in checkouts]
            for worker in workers:
                stack.enter_context(worker)
            rounds += [_round(workers, order) for _ in range(RUNS + 1)][1:]
    return [
        {key: [one[key][index] for one in rounds] for key in rounds[0]}
        for index in range(len(checkouts))
    ]


def _round(workers: Sequence[Worker], order: random.Random) -> Times:
    """Return the time of a run of each key in each process, in random orders."""
    found: Times = {key: [0.0] * len(workers) for key in workers[0].keys}
    keys, indices = list(enumerate(found)), list(range(len(workers)))
    order.shuffle(keys)
    for number, key in keys:
        order.shuffle(indices)
        for index in indices:
            found[key][index] = workers[index].time(number)
    return found


def table(here: Times, other: Times) -> str:
    """Return a table of medians, and of this checkout's medians divided by the other's."""
    lines = [
        f"host cost of a call in µs, of import in ms: medians of {PAIRS} x {RUNS} runs of {CALLS} "
        "calls; torch's own lines run the same code: their ratios are noise",
        f"{'call':50} {'shape':>13} {'arrays':24} {'other':>8} {'this':>8} {'ratio':>7}",
    ]
    for key, spent in here.items():
        call, shape, kind = key
        ours, theirs = statistics.median(spent), statistics.median(other[key])
        unit = 1000 if key == host.IMPORT else 1
        figures = f"{theirs / unit:8.1f} {ours / unit:8.1f} {ours / theirs:7.3f}"
        lines.append(f"{call:50} {shape:>13} {kind:24} {figures}")
    return "\n".join(lines)
