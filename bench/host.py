# SPDX-License-Identifier: MIT
"""What small calls cost the host on the CPU: cunorm on NumPy arrays and tensors, beside torch.

A call is made again and again on the same arrays. `autograd_table` is of calls that autograd may
record, beside one that does nothing but be recorded.
"""

from __future__ import annotations

import csv
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cunorm.torch
from bench import cases, machine, peers
from bench.arrays import as_torch
from bench.cases import Call, Operands, Operator
from bench.cpu import Cpu
from bench.machine import Facts
from bench.providers import autograd

SHAPES = {2: ((1, 64), (4, 64)), 4: ((1, 64, 2, 2), (4, 64, 2, 2))}  # by axes; channels on axis 1
CALLS = 1000
RUNS = 15

AUTOGRAD_SHAPE = (4, 64)
EMPTY, OURS = "an empty autograd.Function", "cunorm.torch.rms_norm"

_COLUMNS = ("date", "commit", "device", "versions", "call", "shape", "kind")
COLUMNS = (*_COLUMNS, "median_us", "minimum_us")

Key = tuple[str, str, str]  # the call, the shape, the kind of its arrays


def run(operators: Sequence[Operator], device: Cpu, out: Path | None) -> int:
    """Time the calls, print the tables, and write a CSV."""
    found = times(operators)
    print(table(found))
    rows = [(*key, spent) for key, spent in found.items()]
    if any(operator.name == "rms_norm" for operator in operators):
        columns = autograd_times()
        print(f"\n{autograd_table(columns)}")
        shape = "x".join(map(str, AUTOGRAD_SHAPE))
        for mode, by_call in columns.items():
            rows += [(call, shape, f"torch, {mode}", spent) for call, spent in by_call.items()]
    if out is not None:
        write_csv(out, machine.facts(device, [autograd.Torch()]), rows)
    return 0


def write_csv(path: Path, facts: Facts, rows: Iterable[tuple[str, str, str, list[float]]]) -> None:
    """Write a line for each call, shape and kind of arrays."""
    told = (facts.date, facts.commit, facts.device, facts.versions)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for *what, spent in rows:
            figures = (f"{us:.2f}" for us in _median_and_minimum(spent))
            writer.writerow([*told, *what, *figures])


def times(operators: Iterable[Operator], runs: int = RUNS) -> dict[Key, list[float]]:
    """Time runs of 1000 calls, in turn; µs a call."""
    found: dict[Key, Call] = {}
    for operator in operators:
        for sizes in SHAPES[operator.axes]:
            host = cases.host_operands(operator, "float32", sizes)
            tensors = {name: as_torch(array) for name, array in host.items()}
            shape = f"{operator.memory} {'x'.join(map(str, sizes))}".lstrip()
            for kind, operands in (("NumPy", host), ("torch", tensors)):
                for what, call in _ours(operator, operands).items():
                    found[f"cunorm {operator.name}{what}", shape, kind] = call
            for what, call in _theirs(operator, tensors, sizes[1]).items():
                found[f"torch's {operator.name}{what}", shape, "torch"] = call
    return _microseconds(found, runs)


def table(found: dict[Key, list[float]]) -> str:
    """Return a table of the medians and minima."""
    return "\n".join([*_heading(len(next(iter(found.values())))), *_lines(found)])


def _ours(operator: Operator, operands: Operands) -> dict[str, Call]:
    """Return cunorm's calls; those with all they take of out= and workspace= allocate nothing."""
    forward = cases.forward(cunorm, operator, operands)
    training_forward = cases.training_forward(cunorm, operator, operands)
    saved, y = training_forward(), forward()
    backward = cases.backward(cunorm, operator, operands, saved)
    grads = backward()
    if getattr(grads, "dresidual", None) is grads.dx:  # two results are not written to one array
        grads = grads._replace(dresidual=None)
    found: dict[str, Call] = {}
    for what, call, out in (
        ("", forward, y),
        ("_forward", training_forward, saved),
        ("_backward", backward, grads),
    ):
        with_out = partial(call, out=out)
        found |= {what: call, f"{what}, out=": with_out}
        if operator.of_channels or what == "_backward":
            workspace = _workspace(operator, operands, what)
            found[f"{what}, out=, workspace="] = partial(with_out, workspace=workspace)
    return found


def _workspace(operator: Operator, operands: Operands, what: str) -> Any:
    x = operands["x"]
    parameters = {name: operands[name] for name in operator.parameters}
    options = {"groups": operator.groups(x.shape[1])}
    if operator.of_channels:
        options = {"num_groups": options["groups"], "channel_axis": 1}
    size = cunorm.workspace_size(f"{operator.base}{what}", x, **parameters, **options)
    workspace = np.empty(size, np.uint8)
    return workspace if isinstance(x, np.ndarray) else as_torch(workspace)


def _theirs(operator: Operator, tensors: Operands, width: int) -> dict[str, Call]:
    function = peers.torch_function(torch, operator, width)
    return {
        "": peers.torch_forward(function, operator, tensors),
        ", autograd.grad": peers.torch_backward(torch, function, operator, tensors),
    }


def _microseconds(calls: dict[Any, Call], runs: int) -> dict[Any, list[float]]:
    """Return for each call what it took in each run, in an order drawn anew for each round."""
    times: dict[Any, list[float]] = {key: [] for key in calls}
    contestants = list(calls.items())
    order = random.Random(0)
    for _ in range(runs + 1):
        order.shuffle(contestants)
        for key, call in contestants:
            times[key].append(1e6 * _seconds(call) / CALLS)
    return {key: spent[1:] for key, spent in times.items()}  # the first run warms up


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return time.perf_counter() - start


def _title(what: str, runs: int) -> str:
    return (
        f"host cost of a call {what}, µs: {runs} runs of {CALLS} calls; cunorm "
        f"{cunorm.__version__}, NumPy {np.__version__}, torch {torch.__version__}"
    )


def _heading(runs: int) -> list[str]:
    return [
        _title("on float32", runs),
        f"{'':50} {'':>13} {'NumPy arrays':>17} {'torch tensors':>17}",
        f"{'call':50} {'shape':>13}" + f" {'median':>8} {'minimum':>8}" * 2,
    ]


def _lines(times: dict[Key, list[float]]) -> Iterable[str]:
    for call, shape in dict.fromkeys(key[:2] for key in times):
        line = f"{call:50} {shape:>13}"
        for kind in ("NumPy", "torch"):
            spent = times.get((call, shape, kind))
            cells = ("", "") if spent is None else (statistics.median(spent), min(spent))
            line += "".join(f" {cell if cell == '' else format(cell, '.1f'):>8}" for cell in cells)
        yield line.rstrip()


# --- under autograd -------------------------------------------------------------------------------


class _Empty(torch.autograd.Function):
    """Allocates a result and a gradient, and does nothing else: what autograd itself costs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(dy)


Columns = dict[str, dict[str, list[float]]]  # by what autograd does, and by call


def autograd_times(runs: int = RUNS) -> Columns:
    """Time RMSNorm where nothing is recorded, recorded, and with its backward; µs a call."""
    with torch.no_grad():
        columns = {"no_grad": _microseconds(_forwards(), runs)}
    columns["forward"] = _microseconds(_forwards(), runs)
    columns["forward, backward"] = _microseconds(_with_backwards(), runs)
    return columns


def autograd_table(columns: Columns) -> str:
    """Return a table of the medians and minima, and how much more they are than nothing's."""
    shape = "x".join(map(str, AUTOGRAD_SHAPE))
    lines = [
        _title(f"under autograd, float32 {shape}", len(columns["no_grad"][OURS])),
        f"{'':50}" + "".join(f" {name:>17}" for name in columns),
        f"{'call':50}" + f" {'median':>8} {'minimum':>8}" * len(columns),
    ]
    for call in columns["no_grad"]:
        lines.append(f"{call:50}" + _cells(_median_and_minimum(t[call]) for t in columns.values()))
    more = (
        [ours - empty for ours, empty in zip(*map(_median_and_minimum, both), strict=True)]
        for both in ((times[OURS], times[EMPTY]) for times in columns.values())
    )
    return "\n".join([*lines, f"{f'{OURS}, more than empty':50}" + _cells(more)])


def _contestants() -> dict[str, tuple[Call, list[torch.Tensor]]]:
    """Return functions of tensors, and for each its own, which require gradients."""
    operator = next(one for one in cases.OPERATORS if one.name == "rms_norm")
    theirs = peers.torch_function(torch, operator, AUTOGRAD_SHAPE[1])

    def leaves(*names: str) -> list[torch.Tensor]:
        drawn = cases.host_operands(operator, "float32", AUTOGRAD_SHAPE)
        return [as_torch(drawn[name]).requires_grad_() for name in names]

    return {
        EMPTY: (_Empty.apply, leaves("x")),
        OURS: (partial(cunorm.torch.rms_norm, eps=operator.eps), leaves("x", "weight")),
        "torch's rms_norm": (
            lambda x, weight: theirs(x, weight=weight),
            leaves("x", "weight"),
        ),
    }


def _forwards() -> dict[str, Call]:
    return {name: partial(call, *leaves) for name, (call, leaves) in _contestants().items()}


def _with_backwards() -> dict[str, Call]:
    def both(call: Callable[..., Any], leaves: list[torch.Tensor]) -> Call:
        dy = torch.ones(AUTOGRAD_SHAPE)
        return lambda: torch.autograd.grad(call(*leaves), leaves, dy)

    return {name: both(*contestant) for name, contestant in _contestants().items()}


def _median_and_minimum(spent: list[float]) -> tuple[float, float]:
    return statistics.median(spent), min(spent)


def _cells(pairs: Iterable[Iterable[float]]) -> str:
    return "".join(f" {time:8.1f}" for pair in pairs for time in pair)
