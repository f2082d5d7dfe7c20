# SPDX-License-Identifier: MIT
"""`python -m bench bytes`: the bytes that calls on a GPU move, counted without a GPU.

The kernels of one call of each operator and kind of plan run on the tests' software GPU, which
counts every access to arrays as large as x. An array counts as often as its plan reads it. The exit
status is 1 if a call moves more than 1.02, or less than 0.999, times the necessary bytes.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import cunorm
from bench.plans.plan import COPIED_AHEAD, PARAM_GRAD, STREAMED, TWO_LAUNCHES, regime
from bench.plans.planned import feature_sets, plans
from bench.report.records import write_csv
from bench.timing import gpu
from bench.timing.arguments import count, list_of, parsed
from bench.timing.arrays import upload
from bench.timing.cases import (
    DTYPES,
    OPERATORS,
    QUANTIZED,
    Operator,
    Shape,
    backward,
    forward,
    training_forward,
)
from bench.timing.operands import host_operands
from cunorm import NormForward, reference
from cunorm._backends import cuda, driver
from cunorm._core import memo
from cunorm._core.caps import MIN_CAPABILITY, Features
from tests import softgpu
from tests.softgpu.counters import Launch, counting

LIMIT = 1.02
COUNTED = (*OPERATORS, *QUANTIZED)
_DTYPES = ("float32", "bfloat16")
_ARCHITECTURE = "90"  # of an H200, like the software GPU
# The call of a regime has the first of these sizes whose plan has the regime. A row norm's x has
# about _ELEMENTS elements but at least two rows; three times as many if rows are copied ahead.
_WIDTHS = (1000, 64, 4096, 16384, 32768, 65536, 131072, 262144)
_SAMPLES = ((320, 8, 8), (128, 16, 16), (320, 64, 64), (128, 64, 128))
_ELEMENTS = 16_000
_SECTOR = 32  # bytes

_LARGE = {
    "forward": ("x", "residual", "gate", "q", "y", "residual_out"),
    "backward": ("dy", "x", "d_residual", "gate", "dx", "dgate"),
}


class Call(NamedTuple):
    """A call of an operator; x of a group norm is one sample."""

    operator: Operator
    direction: str
    dtype: str
    shape: Shape
    regime: str
    features: Features  # available to the plan


@dataclass(frozen=True)
class Row:
    """The bytes that one call moves."""

    operator: str
    memory: str
    direction: str
    dtype: str
    regime: str
    shape: str
    minimum: int  # bytes of arrays as large as x, each counted once
    read_again: int  # of those that the regime reads again, because it does not keep them
    moved: int  # by all accesses to them
    ratio: str  # of moved to minimum + read_again
    of_sectors: str  # moved divided by the bytes of the sectors that the warps' accesses touch

    def fault(self) -> str:
        """Return the fault of the call; "" if there is none."""
        if float(self.ratio) > LIMIT:
            return f"moves {self.ratio} times what it must, the limit is {LIMIT}"
        return "" if float(self.ratio) >= 0.999 else f"moves {self.ratio} of what it must"


def main(argv: list[str]) -> int:
    """Make the table; return 1 if a call moves too much or too little."""
    parser = argparse.ArgumentParser(prog="python -m bench bytes", description=__doc__)
    names = list(dict.fromkeys(operator.name for operator in COUNTED))
    help_of_op = f"some of {', '.join(names)}"
    parser.add_argument("--op", type=list_of(names), default=names, help=help_of_op)
    parser.add_argument("--out", type=Path, help="write a CSV here as well")
    parser.add_argument("--jobs", type=count, default=2, help="processes that count")
    options = parsed(parser, argv)
    chosen = [
        call
        for operator in COUNTED
        if operator.name in options.op
        for direction, dtype in product(operator.directions, _DTYPES)
        for call in calls(operator, direction, dtype)
    ]
    rows = list(_measure_all(chosen, options.jobs))
    if options.out:
        write_csv(options.out, Row, rows)
    for row in rows:
        print(row, row.fault())
    return any(row.fault() for row in rows)


def _measure_all(chosen: list[Call], jobs: int) -> Iterator[Row]:
    """Yield the rows of calls in their order, with progress on stderr."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for number, row in enumerate(pool.map(measure, chosen), start=1):
            print(f"\r{number}/{len(chosen)} counted", end="", file=sys.stderr, flush=True)
            yield row
    print(file=sys.stderr)


def calls(operator: Operator, direction: str, dtype: str) -> Iterator[Call]:
    """Yield a call of each regime that the operator's plans have."""
    seen: set[str] = set()
    sizes = _SAMPLES if operator.of_channels else [(width,) for width in _WIDTHS]
    for features, size in product(feature_sets(_ARCHITECTURE), sizes):
        name = plans(operator, direction, dtype, size, _ARCHITECTURE, features)[0].regime
        if name not in seen:
            seen.add(name)
            rows = 1 if operator.of_channels else max(2, _ELEMENTS // size[0])
            if COPIED_AHEAD in name:
                rows *= 3  # so that each block has several rows
            yield Call(operator, direction, dtype, (rows, *size), name, features)


def measure(call: Call) -> Row:
    """Make a call on the software GPU, and add up the bytes that it moves."""
    names = [name for name in _LARGE[call.direction] if _has(call.operator, name)]
    launches, pointers = _launches(call, names)
    kernels = [launch for launch in launches if launch.kernel != PARAM_GRAD]
    large = [launch.range_at(pointer) for launch in kernels for pointer in pointers]
    elements, itemsize = math.prod(call.shape), DTYPES[call.dtype].itemsize
    minimum = elements * sum(1 if name == "q" else itemsize for name in names)
    read_again = elements * itemsize * len(_read_again(call, names))
    moved = sum(found.loaded + found.stored for found in large)
    sectors = sum(found.load_sectors + found.store_sectors for found in large)
    return Row(
        *(call.operator.name, call.operator.memory, call.direction, call.dtype, call.regime),
        "x".join(map(str, call.shape)),
        *(minimum, read_again, moved, f"{moved / (minimum + read_again):.4f}"),
        f"{moved / (_SECTOR * sectors):.3f}",
    )


def _has(operator: Operator, name: str) -> bool:
    operand = "residual" if "residual" in name else name.removeprefix("d")
    return operand in ("q" if operator.quantized else "y", *operator.leaves)


def _read_again(call: Call, names: list[str]) -> list[str]:
    """Return the arrays that are read again, because nothing keeps them between the passes.

    A stream is there twice if a further pass finds the scale of a row.
    """
    if call.regime == TWO_LAUNCHES:
        return [name for name in ("x", "dy") if name in names]
    if call.regime != STREAMED:
        return []
    if call.direction == "backward":
        return [name for name in ("dy", "x", "gate") if name in names]
    stream = "residual_out" if call.operator.has_residual else "x"
    if call.operator.scales_rows:
        return [stream, stream]
    return [stream, "gate"] if call.operator.gate_position == "pre" else [stream]


def _launches(call: Call, names: list[str]) -> tuple[list[Launch], set[int]]:
    """Make a call, and return its launches and the addresses of its arrays as large as x."""
    softgpu.load()
    put, operator = partial(upload, gpu.cupy()), call.operator
    host = host_operands(operator, call.dtype, call.shape)
    arrays = {name: put(array) for name, array in host.items()}
    features = ",".join(name for name in MIN_CAPABILITY if getattr(call.features, name)) or "none"
    few = {"multiprocessors": 1} if COPIED_AHEAD in call.regime else {}
    with (
        softgpu.settings(**few),
        mock.patch.object(driver, "_LIBRARY", os.environ["SOFTGPU_LIBRARY"]),
        mock.patch.dict(os.environ, CUNORM_FEATURES=features),
    ):
        memo.clear_all()  # plans are for another GPU
        with counting() as launches:
            if call.direction == "forward":
                call_of = forward if operator.quantized else training_forward
                result = call_of(cunorm, operator, arrays)()
            else:
                saved = training_forward(reference, operator, host)()
                if operator.has_residual:
                    arrays["x"] = put(saved.residual.astype(host["x"].dtype))
                statistics = {
                    name: put(getattr(saved, name).astype("float32"))
                    for name in ("rstd", *(("mean",) if operator.center else ()))
                }
                on_gpu = NormForward(residual=arrays["x"], **statistics)
                result = backward(cunorm, operator, arrays, on_gpu)()
        regimes = {regime(build) for build, _ in cuda.loaded.values}
        memo.clear_all()
    if call.regime not in regimes:
        raise ValueError(f"{call} ran as {regimes}")
    found = result._asdict()
    found = found | arrays | {"residual_out": found.get("residual")}
    return launches, {found[name].data.ptr for name in names}
