# SPDX-License-Identifier: MIT
"""Timers of small calls on a CPU: calls of cunorm's public functions, and of torch.

Calls repeat on the same arrays, with three exceptions for `rms_norm`: each call has new memory in
`out=`; each call is the first one with its number of rows; or each call is the second one with its
number of rows. The arrays for `out=` are allocated before the clock starts and stay alive, so that
no address occurs twice.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

import cunorm
from bench.timing import cases
from bench.timing.arrays import as_torch
from bench.timing.cases import Call, Operands, Operator
from bench.timing.providers import autograd

SHAPES = {2: ((1, 64), (4, 64)), 4: ((1, 64, 2, 2), (4, 64, 2, 2))}  # by the number of axes
CALLS = 1000  # in a run
FEW_CALLS = 50  # in a run of calls on other numbers of rows
RMS_NORM = next(one for one in cases.OPERATORS if one.name == "rms_norm")
ROWS, WIDTH = SHAPES[2][1]
SHAPE = f"{ROWS}x{WIDTH}"  # of the calls that only rms_norm has
MAX_ROWS, NARROW = 1 << 11, 16  # so few elements that one thread works on them

Key = tuple[str, str, str]  # call, shape, array library
Timer = Callable[[], float]  # makes a run of calls, and returns µs per call


def serve(names: Sequence[str], threads: int) -> None:
    """Print the keys of all timers; then, for each number that is read, print a timer's result."""
    torch.set_num_threads(threads)
    cunorm.set_num_threads(threads)
    found = operator_timers([one for one in cases.OPERATORS if one.name in names])
    if RMS_NORM.name in names:
        found |= memory_timers("NumPy", np.asarray) | memory_timers("torch", as_torch)
    print(json.dumps(list(found)), flush=True)
    for line in sys.stdin:
        print(list(found.values())[int(line)](), flush=True)


def _repeated(call: Call) -> Timer:
    def run() -> float:
        call()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        return 1e6 * (time.perf_counter() - start) / CALLS

    return run


def _with_fresh(call: Callable[[Any], Any], make: Callable[[], Any], calls: int) -> Timer:
    """Return a timer of a call that gets a new argument each time; one more call is a warmup."""
    kept: list[Any] = []

    def run() -> float:
        kept.extend(make() for _ in range(calls + 1))
        call(kept[-calls - 1])
        start = time.perf_counter()
        for argument in kept[-calls:]:
            call(argument)
        return 1e6 * (time.perf_counter() - start) / calls

    return run


def operator_timers(operators: Iterable[Operator]) -> dict[Key, Timer]:
    """Return timers of all functions of operators, on NumPy arrays and on tensors."""
    found: dict[Key, Call] = {}
    for operator in operators:
        for sizes in SHAPES[operator.axes]:
            host = cases.host_operands(operator, "float32", sizes)
            tensors = {name: as_torch(array) for name, array in host.items()}
            shape = f"{operator.memory} {'x'.join(map(str, sizes))}".lstrip()
            for kind, operands in (("NumPy", host), ("torch", tensors)):
                for what, call in _cunorm_calls(operator, operands).items():
                    found[f"cunorm {operator.name}{what}", shape, kind] = call
            function = autograd.torch_function(operator, sizes[1])
            theirs = f"torch's {operator.name}"
            found[theirs, shape, "torch"] = autograd.forward(function, operator, tensors)
            backward = autograd.backward(function, operator, tensors)
            found[f"{theirs}, autograd.grad", shape, "torch"] = backward
    return {key: _repeated(call) for key, call in found.items()}


def _cunorm_calls(operator: Operator, operands: Operands) -> dict[str, Call]:
    forward = cases.forward(cunorm, operator, operands)
    training_forward = cases.training_forward(cunorm, operator, operands)
    return {
        "": forward,
        ", out=": partial(forward, out=forward()),
        "_forward": training_forward,
        "_backward": cases.backward(cunorm, operator, operands, training_forward()),
    }


def memory_timers(kind: str, convert: Callable[[Any], Any]) -> dict[Key, Timer]:
    """Return timers of `rms_norm` on new memory, and on new shapes."""
    drawn = cases.host_operands(RMS_NORM, "float32", (MAX_ROWS, WIDTH))
    x, weight = convert(drawn["x"]), convert(drawn["weight"])
    narrow = convert(drawn["x"][:, :NARROW].copy())
    numbers = iter(random.Random(0).sample(range(2, MAX_ROWS), MAX_ROWS - 2))
    norm = partial(cunorm.rms_norm, weight=weight, eps=RMS_NORM.eps)
    narrow_norm = partial(cunorm.rms_norm, weight=weight[:NARROW], eps=RMS_NORM.eps)

    def other_rows() -> Any:
        return narrow[: next(numbers)]

    def called_once() -> Any:
        rows = other_rows()
        narrow_norm(rows)
        return rows

    def new_out(out: Any) -> Any:
        return norm(x[:ROWS], out=out)

    return {
        ("cunorm rms_norm, new out= in each call", SHAPE, kind): _with_fresh(
            new_out, lambda: convert(np.ones((ROWS, WIDTH), np.float32)), CALLS
        ),
        ("cunorm rms_norm, new number of rows in each call", f"Nx{NARROW}", kind): _with_fresh(
            narrow_norm, other_rows, FEW_CALLS
        ),
        ("cunorm rms_norm, second call on a number of rows", f"Nx{NARROW}", kind): _with_fresh(
            narrow_norm, called_once, FEW_CALLS
        ),
    }
