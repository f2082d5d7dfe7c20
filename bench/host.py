# SPDX-License-Identifier: MIT
"""What small calls cost the host on the CPU: cunorm on NumPy arrays and tensors, beside torch.

A call is made again and again on the same arrays.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

import cunorm
from bench import cases, peers
from bench.cases import Call, Operands, Operator
from bench.cpu import tensor

SHAPES = ((1, 64), (4, 64))
CALLS = 1000
RUNS = 15

Key = tuple[str, str, str]  # the call, the shape, the kind of its arrays


def table(operators: Iterable[Operator], runs: int = RUNS) -> str:
    """Time runs of 1000 calls, in turn, and return a table of their medians and minima."""
    found: dict[Key, Call] = {}
    for rows, width in SHAPES:
        for operator in operators:
            host = cases.host_operands(operator, "float32", (rows, width))
            tensors = {name: tensor(array) for name, array in host.items()}
            shape = f"{rows}x{width}"
            for kind, operands in (("NumPy", host), ("torch", tensors)):
                for what, call in _ours(operator, operands).items():
                    found[f"cunorm {operator.name}{what}", shape, kind] = call
            for what, call in _theirs(operator, tensors, width).items():
                found[f"torch's {operator.name}{what}", shape, "torch"] = call
    return "\n".join([*_heading(runs), *_lines(_microseconds(found, runs))])


def _ours(operator: Operator, operands: Operands) -> dict[str, Call]:
    """Return cunorm's calls; with out= they allocate nothing, but for the backward's workspace."""
    forward = cases.forward(cunorm, operator, operands)
    training_forward = cases.training_forward(cunorm, operator, operands)
    saved, y = training_forward(), forward()
    backward = cases.backward(cunorm, operator, operands, saved)
    grads = backward()
    if grads.dresidual is grads.dx:  # two results are not written to one array
        grads = grads._replace(dresidual=None)
    return {
        "": forward,
        ", out=": partial(forward, out=y),
        "_forward": training_forward,
        "_forward, out=": partial(training_forward, out=saved),
        "_backward": backward,
        "_backward, out=": partial(backward, out=grads),
        "_backward, out=, workspace=": partial(
            backward, out=grads, workspace=_workspace(operator, operands)
        ),
    }


def _workspace(operator: Operator, operands: Operands) -> Any:
    parameters = {name: operands[name] for name in operator.parameters}
    groups = operator.groups(operands["x"].shape[-1])
    name = f"{operator.base}_backward"
    size = cunorm.workspace_size(name, operands["x"], **parameters, groups=groups)
    workspace = np.empty(size, np.uint8)
    return workspace if isinstance(operands["x"], np.ndarray) else tensor(workspace)


def _theirs(operator: Operator, tensors: Operands, width: int) -> dict[str, Call]:
    function = peers.torch_function(torch, operator, width)
    return {
        "": peers.torch_forward(function, operator, tensors),
        ", autograd.grad": peers.torch_backward(torch, function, operator, tensors),
    }


def _microseconds(calls: dict[Key, Call], runs: int) -> dict[Key, list[float]]:
    """Return for each call what it took in each run, in an order drawn anew for each round."""
    times: dict[Key, list[float]] = {key: [] for key in calls}
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


def _heading(runs: int) -> list[str]:
    return [
        f"host cost of a call on float32, µs: {runs} runs of {CALLS} calls; cunorm "
        f"{cunorm.__version__}, NumPy {np.__version__}, torch {torch.__version__}",
        f"{'':44} {'':>6} {'NumPy arrays':>17} {'torch tensors':>17}",
        f"{'call':44} {'shape':>6}" + f" {'median':>8} {'minimum':>8}" * 2,
    ]


def _lines(times: dict[Key, list[float]]) -> Iterable[str]:
    for call, shape in dict.fromkeys(key[:2] for key in times):
        line = f"{call:44} {shape:>6}"
        for kind in ("NumPy", "torch"):
            spent = times.get((call, shape, kind))
            cells = ("", "") if spent is None else (statistics.median(spent), min(spent))
            line += "".join(f" {cell if cell == '' else format(cell, '.1f'):>8}" for cell in cells)
        yield line.rstrip()
