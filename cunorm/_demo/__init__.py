# SPDX-License-Identifier: MIT
"""`python -m cunorm demo`: every operator on real input, checked against the float64 oracle."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

import cunorm
from cunorm._backends.cpu import compile as cpu_compile
from cunorm._backends.cpu.processes import call_concurrently
from cunorm._backends.cpu.threads import available_cores
from cunorm._core.dtypes import DTYPES, numpy_dtype
from cunorm._demo import operators
from cunorm._demo.operators import Array, Device, Operands, Operator, bytes_moved
from cunorm._demo.plot import draw, saved_figure
from cunorm.reference.tolerance import worst_error

REPEATS = 10  # how often a call is timed
_HEADER = f"{'operator':26} {'direction':9} {'shape':>10} {'dtype':8} {'time':>9} {'GB/s':>6} error"
_LEGEND = f"""
time:  of a call that allocates its results; the shortest of {REPEATS}
GB/s:  what the call must read and write, over that time
error: the largest error against a float64 reference, as a fraction of the bound that
       cunorm promises: 1 would be at the bound. In bfloat16 and float16, in 8 bits, and for
       the new stream of adaLN-Zero, the rounding of the results alone comes close to it.
"""
_NEXT = """
next: python -m cunorm demo --input FILE.npy  the same on your own rows
      python -m cunorm demo --plot FILE.png   speed by size, beside NumPy and PyTorch
      python -m cunorm info                   versions, devices, compilers and caches
      python -m pydoc cunorm.normalize        what the norms take and return"""

Row = tuple[str, Callable[[], Any], int, float]  # first columns, call, its bytes and error


def run(path: Path | None, device_name: str | None, is_quick: bool, plot: Path | None) -> int:
    """Print the table, and draw a plot; return 1 if an error is above its bound, else 0."""
    figure = plot and saved_figure(plot)
    device = operators.chosen_device(device_name)
    rows, source = operators.text() if path is None else operators.load(path)
    out = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    out.is_interactive &= out.file.isatty()  # FORCE_COLOR alone gives no status line
    out.print(f"input:  {source}\ndevice: {device.title}")
    cases = list(_cases(rows, is_quick, out))
    out.print(f"\n{_HEADER}", style="bold")
    errors = [_timed(row, device, out) for row in _table(cases, device, out)]
    out.print(_LEGEND)
    wrong = sum(not error <= 1 for error in errors)
    count = f"{len(errors)} results"
    if wrong:
        out.print(f"{wrong} of {count} are further off than their bounds", style="red")
    elif device.has_kernels:
        out.print(f"all {count} are within their bounds", style="green")
    else:
        why = "as there is no C++ compiler;\ninstall g++ or clang++, or point CXX at one"
        out.print(f"no kernel ran: NumPy computed the {count}, {why}")
    if plot is not None:
        draw(figure, plot, device, out)
    out.print(_NEXT)
    return 1 if wrong else 0


def _cases(rows: Array, is_quick: bool, out: Console) -> Iterator[tuple[Operator, Operands]]:
    """Yield the operators, with operands on the host, of each dtype that can hold the input."""
    for dtype, largest in operators.LARGEST.items():
        if not np.abs(rows).max() <= largest:
            out.print(f"{dtype} is left out: the input has values beyond {largest:g}")
            continue
        try:
            storage = numpy_dtype(DTYPES[dtype])
        except TypeError:
            out.print(f"{dtype} is left out: pip install ml_dtypes")
            continue
        operands = operators.row_operands(rows, storage)
        for operator in operators.operators(rows.shape[-1], dtype, is_quick):
            if not (operator.needs_float8 and find_spec("ml_dtypes") is None):
                yield operator, operator.operands(operands)


def _table(cases: list[tuple[Operator, Operands]], device: Device, out: Console) -> Iterator[Row]:
    """Yield the rows of all operators; while the caller times a row, nothing compiles."""
    cpu_compile.is_announced.set()
    yield from _rows(*cases[0], device)  # compiles alone, so that its rows appear soon
    for first, end in pairwise((*range(1, len(cases), 3 * available_cores()), len(cases))):
        calls: list[Callable[[], list[Row]]]
        calls = [partial(list, _rows(*case, device)) for case in cases[first:end]]
        with out.status(f"compiling norms {first + 1} to {end} of {len(cases)}"):
            rows = [future.result() for future in call_concurrently(calls)]
        yield from chain.from_iterable(rows)


def _rows(operator: Operator, host: Operands, device: Device) -> Iterator[Row]:
    """Run and check an operator; yield one direction's row before the next direction compiles."""
    operands = device.placed(host)
    saved = operator.forward(cunorm, operands)()
    calls, stream = operator.calls(operands, saved), None
    if operator.is_gated_branch:
        stream = saved.residual.get() if hasattr(saved.residual, "get") else saved.residual
    expected = operator.expected(host, stream)
    shape, dtype = "x".join(map(str, host["x"].shape)), str(host["x"].dtype)
    for (direction, call), (exact, bounds) in zip(calls.items(), expected, strict=True):
        result = call()
        results = operator.checked(direction, result, saved)
        error = max(worst_error(one, exact, bounds) for one in results)
        text = f"{operator.label:26} {direction:9} {shape:>10} {dtype:8}"
        yield text, call, bytes_moved(call, result), error


def _timed(row: Row, device: Device, out: Console) -> float:
    text, call, moved, error = row
    seconds = min(device.seconds(call) for _ in range(REPEATS))
    time = f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"
    figures = f"{text} {time:>9} {moved / seconds / 1e9:6.1f} "
    verdict = (f"{error:.3f}", "green") if error <= 1 else (f"{error:.3f}  WRONG", "red")
    out.print(Text.assemble(figures, verdict))
    return error
