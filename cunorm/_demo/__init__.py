# SPDX-License-Identifier: MIT
"""`python -m cunorm demo`: every operator on real input, checked against the float64 oracle."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from rich.text import Text

import cunorm
from cunorm._backends.cpu import waiting
from cunorm._backends.cpu.compile import prepare_headers
from cunorm._backends.cpu.processes import at_once
from cunorm._backends.cpu.threads import available_cores
from cunorm._core.dtypes import DTYPES, numpy_dtype
from cunorm._demo import inputs
from cunorm._demo.device import DemoError, Device, chosen_device
from cunorm._demo.operators import DIRECTIONS, Operands, Operator, operators
from cunorm._demo.plot import check, draw
from cunorm.reference.tolerance import worst_error

__all__ = ["DemoError", "run"]

REPEATS = 10  # of a time
_HEADER = f"{'operator':26} {'direction':9} {'shape':>10} {'dtype':8} {'time':>9} {'GB/s':>6} error"
_LEGEND = f"""
time:  of a call that allocates its results; the shortest of {REPEATS}
GB/s:  what the call must read and write, over that time
error: the largest error against a float64 reference, as a fraction of the bound that
       cunorm promises: 1 would be at the bound. In bfloat16 and float16 the rounding of
       the results alone comes close to it.
"""
_NEXT = """
next: python -m cunorm demo --input FILE.npy  the same on your own rows
      python -m cunorm demo --plot FILE.png   speed by size, beside NumPy and PyTorch
      python -m cunorm info                   versions, devices, compilers and caches
      python -m pydoc cunorm.normalize        what the norms take and return"""


class Case(NamedTuple):
    """Two rows of the table."""

    operator: Operator
    host: Operands  # in host memory
    operands: Operands  # on the device


def run(
    path: Path | None, device_name: str | None, *, is_quick: bool = False, plot: Path | None = None
) -> int:
    """Print the table, and draw a plot; return 1 if an error is above its bound, else 0."""
    if plot is not None:
        check(plot)
    device = chosen_device(device_name)
    rows, source = inputs.text() if path is None else inputs.load(path)
    out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    out.print(f"input:  {source}\ndevice: {device.title}")
    cases = list(_cases(rows, device, is_quick, out))
    errors = _table(cases, device, out)
    out.print(_LEGEND)
    _summarise(cases, errors, device, out)
    if plot is not None:
        draw(plot, device, out)
    out.print(_NEXT)
    return 1 if any(not error <= 1 for error in errors) else 0


def _cases(rows: inputs.Array, device: Device, is_quick: bool, out: Console) -> Iterator[Case]:
    """Yield the operators, with operands of each dtype that can hold the input."""
    for dtype, largest in inputs.LARGEST.items():
        chosen = operators(rows.shape[-1], dtype, is_quick)
        if chosen and not np.abs(rows).max() <= largest:
            out.print(f"{dtype} is left out: the input has values beyond {largest:g}")
            continue
        try:
            operands = inputs.row_operands(rows, numpy_dtype(DTYPES[dtype]))
        except TypeError:
            out.print(f"{dtype} is left out: pip install ml_dtypes")
            continue
        for operator in chosen:
            host = operator.operands(operands)
            yield Case(operator, host, device.placed(host))


def _table(cases: list[Case], device: Device, out: Console) -> list[float]:
    """Compile, run, check and time the operators, in batches; print and return their errors.

    A batch compiles as it runs on all cores. No compiler runs beside what is timed. The first
    operator compiles row by row, so that there soon is one.
    """
    waiting.is_announced.set()
    out.print(f"\n{_HEADER}", style="bold")
    errors: list[float] = []
    size = 2 * available_cores()
    with _bar(out) as bar:
        task = bar.add_task(f"compiling {cases[0].operator.name}", total=len(cases))
        for first in (0, *range(1, len(cases), size)):
            batch = cases[first : first + size if first else 1]
            if first:
                names = ", ".join(dict.fromkeys(case.operator.name for case in batch))
                bar.update(task, description=f"compiling {names}", refresh=True)
                also = [prepare_headers] if first == 1 and device.library is np else []
                calls = [partial(_run, case) for case in batch]
                at_once([*calls, *also], waiting.PATIENCE, lambda: None)
                bar.update(task, description="", refresh=True)
            for case in batch:
                errors += _both_directions(case, device, out)
                bar.advance(task)
    return errors


def _run(case: Case) -> None:
    saved = case.operator.forward(cunorm, case.operands)
    for call in case.operator.calls(case.operands, saved).values():
        call()


def _bar(out: Console) -> Progress:
    """Return a bar of what is done, on the terminal if there is one; it has no thread."""
    console = out if out.file.isatty() else Console(stderr=True)
    is_shown = console.file.isatty() and console.is_interactive
    return Progress(
        *("{task.completed}/{task.total} norms", BarColumn(), TimeElapsedColumn()),
        "{task.description}",
        console=console,
        disable=not is_shown,
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _both_directions(case: Case, device: Device, out: Console) -> Iterator[float]:
    """Run, check and time an operator; print and yield the errors of forward and backward."""
    operator, host, operands = case
    saved = operator.forward(cunorm, operands)
    moved, calls = operator.moved(operands, saved), operator.calls(operands, saved)
    shape, dtype = "x".join(map(str, host["x"].shape)), str(host["x"].dtype)
    for direction, (exact, bounds) in zip(DIRECTIONS, operator.expected(host), strict=True):
        call = calls[direction]
        results = [call(), saved] if direction == "forward" else [call()]
        error = max(worst_error(device.fetched(one), exact, bounds) for one in results)
        seconds = min(device.seconds(call) for _ in range(REPEATS))
        time = f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"
        row = f"{operator.label:26} {direction:9} {shape:>10} {dtype:8} {time:>9} "
        row += f"{moved[direction] / seconds / 1e9:6.1f} "
        verdict = (f"{error:.3f}", "green") if error <= 1 else (f"{error:.3f}  WRONG", "red")
        out.print(Text.assemble(row, verdict))
        yield error


def _summarise(cases: list[Case], errors: list[float], device: Device, out: Console) -> None:
    """Say in words what was shown."""
    count = len(errors)
    if wrong := sum(not error <= 1 for error in errors):
        out.print(f"{wrong} of {count} results are further off than their bounds", style="red")
    elif not device.has_kernels:
        why = "as there is no C++ compiler;\ninstall g++ or clang++, or point CXX at one"
        out.print(f"no kernel ran: NumPy computed the {count} results, {why}")
    else:
        counts = Counter(str(case.host["x"].dtype) for case in cases)
        norms = ", ".join(f"{count} in {dtype}" for dtype, count in counts.items())
        all_right = (f"all {count} results are within their bounds", "green")
        out.print(Text.assemble(all_right, f"; norms, forward and backward: {norms}"))
