# SPDX-License-Identifier: MIT
"""`python -m bench host`: the host cost of small calls on a CPU and of `import cunorm`.

With --against, another checkout is timed, too. Each checkout has its own processes, which run this
checkout's `host_calls`. The processes of two checkouts alternate after each run, so that other work
on the machine slows both. There are several processes of each, because a process may be slow for
its whole life.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.compare.host_calls import CALLS, Key
from bench.timing import machine
from bench.timing.arguments import count, list_of
from bench.timing.cases import OPERATORS
from bench.timing.cpu import Cpu
from bench.timing.providers import autograd
from cunorm._backends.cpu.threads import thread_count

PROCESSES, RUNS, IMPORTS = 5, 3, 9  # of each checkout; runs in a process; imports of cunorm
ROOT = Path(__file__).parents[2]
IMPORT: Key = ("import cunorm, after numpy", "", "process")
Times = dict[Key, list[float]]  # µs per call, of each run

_SERVE = """
import sys
checkout, bench, operators, threads = sys.argv[1:]
sys.path.insert(0, checkout)
import cunorm
sys.path[0] = bench
from bench.compare import host_calls
host_calls.serve(operators.split(","), int(threads))
"""
_TIME_IMPORT = """
import sys, time
sys.path.insert(0, sys.argv[1])
import numpy
start = time.perf_counter()
import cunorm
print(time.perf_counter() - start)
"""


def main(argv: Sequence[str]) -> int:
    """Time this checkout and, if there is one, another; print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench host", description=__doc__)
    names = list(dict.fromkeys(one.name for one in OPERATORS))
    add = parser.add_argument
    add("--op", type=list_of(names), default=["rms_norm", "layer_norm"], help=", ".join(names))
    add("--threads", type=count, default=thread_count(), help="threads of each process")
    add("--against", type=Path, metavar="CHECKOUT", help="another checkout")
    options = parser.parse_args(argv)
    checkouts = [ROOT, *([options.against.resolve()] if options.against else [])]
    for checkout in checkouts:
        if not (checkout / "cunorm" / "__init__.py").is_file():
            parser.error(f"{checkout} is no checkout of cunorm")
    environment = machine.environment(Cpu(options.threads), [autograd.eager()])
    print(environment, *(f"against {machine.commit_of(other)}" for other in checkouts[1:]))
    found = times(checkouts, options.op, options.threads)
    for of_checkout, spent in zip(found, _import_times(checkouts), strict=True):
        of_checkout[IMPORT] = spent
    print(f"\n{table(found)}")
    return 0


def times(checkouts: Sequence[Path], operators: Sequence[str], threads: int) -> list[Times]:
    """Return the times of each checkout's calls; the first round of each process is a warmup."""
    found: list[Times] = [{} for _ in checkouts]
    order = random.Random(0)
    for _ in range(PROCESSES):
        with ExitStack() as stack:
            workers = [stack.enter_context(_worker(path, operators, threads)) for path in checkouts]
            keys, *_ = [list(map(tuple, json.loads(_answer(worker)))) for worker in workers]
            for round_ in range(RUNS + 1):
                for number in order.sample(range(len(keys)), len(keys)):
                    for index in order.sample(range(len(workers)), len(workers)):
                        print(number, file=workers[index].stdin, flush=True)
                        spent = float(_answer(workers[index]))
                        if round_ > 0:
                            found[index].setdefault(keys[number], []).append(spent)
    return [{key: of_checkout[key] for key in keys} for of_checkout in found]


def _worker(checkout: Path, operators: Sequence[str], threads: int) -> subprocess.Popen[str]:
    """Start a process that times a checkout's calls: it reads the numbers of keys."""
    command = [sys.executable, "-c", _SERVE, str(checkout), str(ROOT)]
    command += [",".join(operators), str(threads)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def _answer(worker: subprocess.Popen[str]) -> str:
    line = worker.stdout.readline() if worker.stdout else ""
    if not line:
        raise RuntimeError(f"a process of the bench ended with {worker.wait()}")
    return line


def _import_times(checkouts: Sequence[Path]) -> list[list[float]]:
    """Return the times of `import cunorm` in new processes, in µs, by checkout.

    The first process of each checkout compiles and caches the bytecode, and is not counted.
    """
    found: list[list[float]] = [[] for _ in checkouts]
    with tempfile.TemporaryDirectory() as bytecode:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(IMPORTS + 1):
            for checkout, spent in zip(checkouts, found, strict=True):
                command = [sys.executable, "-c", _TIME_IMPORT, str(checkout)]
                spent.append(1e6 * float(subprocess.check_output(command, env=env)))
    return [spent[1:] for spent in found]


def table(found: Sequence[Times]) -> str:
    """Return medians and minima of this checkout; of two, medians and this one's over the other's.

    Times of calls are in µs, of the import in ms.
    """
    heads = ("other", "this", "ratio") if len(found) == 2 else ("median", "minimum")
    lines = [
        f"host cost of a call in µs, of import in ms: {PROCESSES} x {RUNS} runs of {CALLS} calls; "
        "torch's own lines run the same code: their ratios are noise",
        f"{'call':50} {'shape':>13} {'arrays':24}" + "".join(f" {head:>8}" for head in heads),
    ]
    here, *others = found
    for key, spent in here.items():
        median, unit = statistics.median(spent), 1000 if key == IMPORT else 1
        cells = f" {median / unit:8.1f} {min(spent) / unit:8.1f}"
        for other in others:
            theirs = statistics.median(other[key])
            cells = f" {theirs / unit:8.1f} {median / unit:8.1f} {median / theirs:8.3f}"
        lines.append(f"{key[0]:50} {key[1]:>13} {key[2]:24}{cells}")
    return "\n".join(lines)
