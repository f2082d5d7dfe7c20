# SPDX-License-Identifier: MIT
"""`python -m cunorm demo`: every operator on real input, checked against the float64 oracle."""

import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import cunorm
from cunorm._backends.cpu import waiting
from cunorm._backends.cpu.compiler import has_compiler
from cunorm._backends.cpu.threads import available_cores
from cunorm._core.build import KernelBuild
from cunorm._core.dtypes import DTYPES, numpy_dtype
from cunorm._demo import inputs
from cunorm._demo.device import REPEATS, CompileError, DemoError, Device, chosen_device
from cunorm._demo.operators import Operands, Operator, shown
from cunorm._demo.plot import check, draw
from cunorm._demo.screen import Screen, coloured
from cunorm._warmup import planned

__all__ = ["CompileError", "DemoError", "run"]

Array = NDArray[Any]

_HEADER = f"{'operator':26} {'direction':9} {'shape':>10} {'dtype':8} {'time':>9} {'GB/s':>6} error"
_LEGEND = f"""\
time:  of a call that allocates its results; the shortest of {REPEATS}
GB/s:  what the call must read and write, over that time
error: the largest error against a float64 reference, as a fraction of the bound that
       cunorm promises: 1 would be at the bound. In bfloat16 and float16 the rounding of
       the results alone comes close to it."""
_NEXT = """\
next: python -m cunorm demo --input FILE.npy  the same on your own rows
      python -m cunorm demo --plot FILE.png   {plot}
      python -m cunorm info                   versions, devices, compilers and caches
      python -m pydoc cunorm.normalize        what the norms take and return"""
_COLOUR = {True: "green", False: "red"}
_WORTH_HEADERS = 9  # builds
_BUILDS_OF_A_CORE = 3  # in a batch


class Case(NamedTuple):
    """Two rows of the table."""

    operator: Operator
    host: Operands  # in host memory
    builds: list[KernelBuild]  # that no case before it needs


def run(
    path: Path | None, device_name: str | None, *, is_quick: bool = False, plot: Path | None = None
) -> int:
    """Print the table, and draw a plot; return 1 if an error is above its bound, else 0."""
    if plot is not None:
        check(plot)
    device = chosen_device(device_name)
    if path is None:
        name, content = inputs.text()
        rows = inputs.embedded(content)
        source = f"Python's {name}, its first {len(rows)} bytes, each as a row of 256 numbers:\n"
        source += "        how often each byte follows it in the file, as log(1 + count)"
    else:
        rows = inputs.load(path)
        source = f"{path}, {rows.shape[0]} rows of {rows.shape[1]}"
    print(f"input:  {source}\ndevice: {device.title}", flush=True)
    if device.name == "cpu":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            has_compiler()  # would warn in a row of what the device's title has
    cases = list(_cases(rows, device, is_quick))
    errors = _table(cases, device)
    print(f"\n{_LEGEND}\n\n{_summary(cases, errors, device)}", flush=True)
    if plot is not None:
        draw(plot, device)
    speeds = "speed by size, beside NumPy and PyTorch"
    has_plots = find_spec("matplotlib") is not None
    print(f"\n{_NEXT.format(plot=speeds if has_plots else 'speed by size; needs matplotlib')}")
    return 1 if any(not error <= 1 for error in errors) else 0


def _cases(rows: Array, device: Device, is_quick: bool) -> Iterator[Case]:
    """Yield the operators, with operands of each dtype that can hold the input."""
    known: set[KernelBuild] = set()
    for dtype, largest in inputs.LARGEST.items():
        chosen = shown(dtype, rows.shape[-1], is_quick)
        if not chosen:
            continue
        if not np.abs(rows).max() <= largest:
            print(f"{dtype} is left out: the input has values beyond {largest:g}")
            continue
        try:
            storage = numpy_dtype(DTYPES[dtype])
        except TypeError:
            print(f"{dtype} is left out: pip install ml_dtypes")
            continue
        operands = inputs.row_operands(rows, storage)
        for operator in chosen:
            host = operator.operands(operands)
            builds = [build for build in _builds(operator, host, device) if build not in known]
            known.update(builds)
            yield Case(operator, host, builds)


def _builds(operator: Operator, host: Operands, device: Device) -> list[KernelBuild]:
    """Return the builds that an operator needs, none where there is no compiler."""
    if not device.has_kernels:
        return []
    return planned(device=device.place, **operator.described(host))


def _table(cases: list[Case], device: Device) -> list[float]:
    """Compile, run, check and time the operators, in batches; print and return their errors.

    No compiler runs beside what is timed.
    """
    waiting.is_announced.set()
    errors: list[float] = []
    total = sum(len(case.builds) for case in cases)
    with Screen(total) as screen:
        screen.line(f"\n{coloured(_HEADER, 'bold')}")
        for number, batch in enumerate(_batches(cases, _BUILDS_OF_A_CORE * available_cores())):
            builds = [build for case in batch for build in case.builds]
            builds.sort(key=lambda build: build.kernel)  # backwards first, which take longer
            names = dict.fromkeys(case.operator.name for case in batch)
            screen.say(f"compiling {', '.join(names)}")
            with_headers = number == 1 and total >= _WORTH_HEADERS
            device.compile(builds, screen.step, with_headers=with_headers)
            screen.say("")
            for case in batch:
                errors += _both_directions(case.operator, case.host, device, screen)
    return errors


def _batches(cases: list[Case], builds: int) -> Iterator[list[Case]]:
    """Yield the first case alone, so that there soon is a result; then some that need builds."""
    batch: list[Case] = []
    for number, case in enumerate(cases):
        batch.append(case)
        if number == 0 or sum(len(one.builds) for one in batch) >= builds:
            yield batch
            batch = []
    if batch:
        yield batch


def _both_directions(
    operator: Operator, host: Operands, device: Device, screen: Screen
) -> Iterator[float]:
    """Run, check and time an operator; print and yield the errors of forward and backward."""
    operands = device.put_all(host)
    results = operator.run(operands)
    moved = operator.moved_bytes(operands, results)
    errors = operator.errors(host, device.fetched(results))
    calls = {
        "forward": lambda: operator.forward(cunorm, operands, operator.name),
        "backward": lambda: operator.backward(cunorm, operands, results.saved),
    }
    x, shape = host["x"], "x".join(map(str, host["x"].shape))
    for (direction, call), size, error in zip(calls.items(), moved, errors, strict=True):
        seconds = device.shortest_seconds(call)
        is_right = error <= 1
        verdict = coloured(f"{error:.3f}{'' if is_right else '  WRONG'}", _COLOUR[is_right])
        screen.line(
            f"{operator!s:26} {direction:9} {shape:>10} {x.dtype!s:8} {_duration(seconds):>9} "
            f"{size / seconds / 1e9:6.1f} {verdict}"
        )
        yield error


def _duration(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def _summary(cases: list[Case], errors: list[float], device: Device) -> str:
    """Return in words what was shown."""
    if wrong := sum(not error <= 1 for error in errors):
        text = f"{wrong} of {len(errors)} results are further off than their bounds"
        return coloured(text, _COLOUR[False])
    if not device.has_kernels:
        text = (
            f"no kernel ran: NumPy computed the {len(errors)} results, as there is no C++ compiler"
        )
        return f"{text};\ninstall g++ or clang++, or point CXX at one"
    counts = Counter(str(case.host["x"].dtype) for case in cases)
    norms = ", ".join(f"{count} in {dtype}" for dtype, count in counts.items())
    text = f"all {len(errors)} results are within their bounds"
    return f"{coloured(text, _COLOUR[True])}; norms, forward and backward: {norms}"
