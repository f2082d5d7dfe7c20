# SPDX-License-Identifier: MIT
"""`python -m bench accuracy`: errors of y, dx, dweight and dbias, in ulp, against float64.

All providers get the same operands; `cunorm.reference` computes exact results from them. Errors
are in ulp of the result's dtype: for y and dx at the largest exact value of the row, for dweight
and dbias at the largest exact value of the vector. Rounding to nearest costs up to half an ulp.

There are three kinds of rows. Normal rows have deviation 1 and one of several means ("mean 0" to
"mean 1e6"); a mean is left out for dtypes whose numbers near the mean lie more than 1 apart. Rows
of "tails" follow Student's t with 2 degrees of freedom. Rows of "activations", with width 128, are
the residual stream of a small Transformer that was trained on the characters of Python's
documentation. The provider cunorm-softgpu is cunorm on the tests' software GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

from bench.accuracy import data
from bench.accuracy.errors import Row, cells, errors, table
from bench.report.records import write_csv
from bench.timing import arguments
from bench.timing.arrays import as_host, upload
from bench.timing.cases import DTYPES, OPERATORS, Call, Operands, Operator, Shape, oracle
from bench.timing.engine import view_all
from bench.timing.providers import Cunorm, Provider, load
from tests import softgpu

SOFTGPU = "cunorm-softgpu"
_PROVIDERS = ("cunorm", SOFTGPU, "torch", "torch.compile", "jax")
_NAMES = ("layer_norm", "rms_norm", "group_norm NCHW", "group_norm+silu NCHW")
_OPERATORS = {name: one for name in _NAMES for one in OPERATORS if one.label == name}
_SHAPES: list[Shape] = [(64, 4096), (64, 128), (4, 64, 16, 16)]


class OnSoftgpu(Cunorm):
    """cunorm on the software GPU."""

    def __init__(self) -> None:
        softgpu.load()
        super().__init__(SOFTGPU, "own")

    def calls(self, operator: Operator, direction: str, sets: Sequence[Operands]) -> list[Call]:
        """Copy the operands to the software GPU and return the calls."""
        import cupy

        copies = [{name: upload(cupy, array) for name, array in host.items()} for host in sets]
        return super().calls(operator, direction, copies)


def main(argv: Sequence[str]) -> int:
    """Measure, write the CSV and the picture, and print the table; return 1 without any."""
    parser = argparse.ArgumentParser(prog="python -m bench accuracy", description=__doc__)
    add = parser.add_argument
    for name, allowed in (("op", _OPERATORS), ("dtype", DTYPES), ("providers", _PROVIDERS)):
        text, parse = f"some of {', '.join(allowed)}", arguments.list_of(allowed)
        add(f"--{name}", type=parse, default=list(allowed), help=text)
    shapes_help = "ROWSxWIDTH,...; for group norms NxCxHxW"
    add("--shapes", type=arguments.shapes, default=_SHAPES, help=shapes_help)
    add("--out", type=Path, metavar="FILE.csv", help="write the rows here")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the worst errors here")
    options = parser.parse_args(argv)
    for path in filter(None, (options.out, options.plot)):
        if not path.parent.is_dir():
            parser.error(f"there is no folder {path.parent}")
    rows = _measure_all(options)
    if not rows:
        print("there is nothing to show", file=sys.stderr)
        return 1
    if options.out:
        write_csv(options.out, Row, rows)
    if options.plot:
        from bench.accuracy import plot  # needs matplotlib

        plot.write(options.plot, rows)
    for dtype in dict.fromkeys(row.dtype for row in rows):
        print(*table(rows, dtype), "", sep="\n")
    return 0


def measure(
    provider: Provider, operator: Operator, dtype: str, sets: dict[str, Operands]
) -> dict[str, dict[str, str]]:
    """Return the errors of a provider, as cells of a Row, for each kind of data."""
    views = view_all(provider, sets.values())
    found: dict[str, dict[str, tuple[float, float]]] = {kind: {} for kind in sets}
    for direction in ("forward", "backward"):
        calls = provider.calls(operator, direction, views)
        for (kind, host), call in zip(sets.items(), calls, strict=True):
            results = provider.results_by_name(operator, direction, call())
            for name, exact in oracle(operator, direction, host).items():
                found[kind][name] = errors(operator, name, as_host(results[name]), exact, dtype)
    return {kind: cells(by_name) for kind, by_name in found.items()}


def _measure_all(options: argparse.Namespace) -> list[Row]:
    """Return the rows of all points; an error of another library is only printed."""
    from bench.timing import cpu, machine
    from cunorm._backends.cpu.threads import thread_count

    providers = [one for name in options.providers for one in _load(name)]
    environment = asdict(machine.environment(cpu.Cpu(thread_count()), providers))
    shared = {name: environment[name] for name in ("date", "commit", "device", "versions")}
    rows: list[Row] = []
    for label, dtype, shape in product(options.op, options.dtype, options.shapes):
        operator, size = _OPERATORS[label], "x".join(map(str, shape))
        if operator.axes != len(shape):
            continue
        kinds = [kind for kind in data.KINDS if data.exists(kind, dtype, shape)]
        sets = {kind: data.operands(operator, kind, dtype, shape) for kind in kinds}
        for provider in providers:
            print(f"{label} {dtype} {size} {provider.name}", file=sys.stderr, flush=True)
            try:
                measured = measure(provider, operator, dtype, sets)
            except Exception as error:  # another library may raise anything
                if provider.name.startswith("cunorm"):
                    raise
                print(f"FAILED: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            point = {"operator": label, "dtype": dtype, "shape": size, "provider": provider.name}
            rows += [Row(**shared, **point, data=kind, **texts) for kind, texts in measured.items()]
    return rows


def _load(name: str) -> list[Provider]:
    """Return the provider of a name; none, after a message, if it is not installed."""
    return [OnSoftgpu()] if name == SOFTGPU else load("cpu", [name])
