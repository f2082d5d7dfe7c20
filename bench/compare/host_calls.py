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
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

import cunorm.torch
from bench.timing import cases, peers
from bench.timing.arrays import as_jax, as_torch
from bench.timing.cases import Call, Operands, Operator

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
        found |= memory_timers() | autograd_timers()
        if find_spec("jax"):
            found |= jax_timers()
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


def _with_fresh(call: Callable[[Any], Any], make: Callable[[], Any], most: int) -> Timer:
    """Return a timer of a call that gets a new argument each time."""
    kept: list[Any] = []

    def run() -> float:
        calls = min(CALLS, most)
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
            function = peers.torch_function(torch, operator, sizes[1])
            theirs = f"torch's {operator.name}"
            found[theirs, shape, "torch"] = peers.torch_forward(function, operator, tensors)
            backward = peers.torch_backward(torch, function, operator, tensors)
            found[f"{theirs}, autograd.grad", shape, "torch"] = backward
    return {key: _repeated(call) for key, call in found.items()}


def _cunorm_calls(operator: Operator, operands: Operands) -> dict[str, Call]:
    """Return cunorm's calls: plain; with `out=`; with `out=` and `workspace=` if they use one."""
    forward = cases.forward(cunorm, operator, operands)
    training_forward = cases.training_forward(cunorm, operator, operands)
    saved, y = training_forward(), forward()
    backward = cases.backward(cunorm, operator, operands, saved)
    grads = backward()
    if getattr(grads, "dresidual", None) is grads.dx:  # one array cannot be two results of out=
        grads = grads._replace(dresidual=None)
    found: dict[str, Call] = {}
    for what, call, out in (
        ("", forward, y),
        ("_forward", training_forward, saved),
        ("_backward", backward, grads),
    ):
        with_out = partial(call, out=out)
        found |= {what: call, f"{what}, out=": with_out}
        if operator.of_channels or (what == "_backward" and operator.parameters):
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


def memory_timers() -> dict[Key, Timer]:
    """Return timers of `rms_norm` on new memory, on new shapes, and on strided arrays."""
    drawn = cases.host_operands(RMS_NORM, "float32", (MAX_ROWS, WIDTH))
    drawn["by columns"] = np.asfortranarray(drawn["x"][:ROWS])
    tensors = {name: as_torch(array) for name, array in drawn.items()}
    return _memory_timers("NumPy", drawn, np.ones_like) | _memory_timers(
        "torch", tensors, torch.ones_like
    )


def _memory_timers(
    kind: str, operands: Operands, ones_like: Callable[[Any], Any]
) -> dict[Key, Timer]:
    x, weight = operands["x"], operands["weight"]
    few, numbers = x[:ROWS], iter(random.Random(0).sample(range(2, MAX_ROWS), MAX_ROWS - 2))
    norm = partial(cunorm.rms_norm, weight=weight, eps=RMS_NORM.eps)
    narrow_norm = partial(cunorm.rms_norm, weight=weight[:NARROW], eps=RMS_NORM.eps)
    narrow = ones_like(x[:, :NARROW])

    def other_rows() -> Any:
        return narrow[: next(numbers)]

    def called_once() -> Any:
        rows = other_rows()
        narrow_norm(rows)
        return rows

    def new_out(out: Any) -> Any:
        return norm(few, out=out)

    found = {
        ("new out= in each call", SHAPE): _with_fresh(new_out, lambda: ones_like(few), CALLS),
        ("new number of rows in each call", f"Nx{NARROW}"): _with_fresh(
            narrow_norm, other_rows, FEW_CALLS
        ),
        ("second call on a number of rows", f"Nx{NARROW}"): _with_fresh(
            narrow_norm, called_once, FEW_CALLS
        ),
        ("x in Fortran order", SHAPE): _repeated(partial(norm, operands["by columns"])),
        ("every other row of x", SHAPE): _repeated(partial(norm, x[: 2 * ROWS : 2])),
    }
    return {(f"cunorm rms_norm, {what}", shape, kind): one for (what, shape), one in found.items()}


def jax_timers() -> dict[Key, Timer]:
    """Return timers of `rms_norm` on JAX arrays; a call waits for its result."""
    import cunorm.jax

    drawn = cases.host_operands(RMS_NORM, "float32", (ROWS, WIDTH))
    x, weight = as_jax(drawn["x"]), as_jax(drawn["weight"])
    functions = {"cunorm rms_norm": cunorm.rms_norm, "cunorm.jax.rms_norm": cunorm.jax.rms_norm}

    def waited(function: Callable[..., Any]) -> Any:
        return function(x, weight, eps=RMS_NORM.eps).block_until_ready()

    return {
        (name, SHAPE, "JAX"): _repeated(partial(waited, one)) for name, one in functions.items()
    }


class _Empty(torch.autograd.Function):
    """Allocates a result and a gradient, and does nothing else: the cost of autograd itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(dy)


def autograd_timers() -> dict[Key, Timer]:
    """Return timers of `_Empty` and two RMSNorms: unrecorded, recorded, and with the backward."""
    ours = partial(cunorm.torch.rms_norm, eps=RMS_NORM.eps)
    theirs = peers.torch_function(torch, RMS_NORM, WIDTH)
    dy, found = torch.ones(ROWS, WIDTH), {}
    for call, function, names in (
        ("an empty autograd.Function", _Empty.apply, ("x",)),
        ("cunorm.torch.rms_norm", ours, ("x", "weight")),
        ("torch's rms_norm", lambda x, weight: theirs(x, weight=weight), ("x", "weight")),
    ):
        drawn = cases.host_operands(RMS_NORM, "float32", (ROWS, WIDTH))
        leaves = [as_torch(drawn[name]).requires_grad_() for name in names]
        forward = partial(function, *leaves)
        found[call, SHAPE, "torch, no_grad"] = torch.no_grad()(_repeated(forward))
        found[call, SHAPE, "torch, forward"] = _repeated(forward)
        both = partial(_with_backward, forward, leaves, dy)
        found[call, SHAPE, "torch, forward, backward"] = _repeated(both)
    return found


def _with_backward(forward: Call, leaves: list[torch.Tensor], dy: torch.Tensor) -> Any:
    return torch.autograd.grad(forward(), leaves, dy)
