# SPDX-License-Identifier: MIT
"""`--plot`: speed over size, of cunorm, of plain formulas and of PyTorch's own functions."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import cunorm
from cunorm._core.build import KernelBuild
from cunorm._demo.device import DemoError, Device, keep_freed_memory
from cunorm._demo.operators import Operands, Operator, operators
from cunorm._demo.screen import Screen
from cunorm._warmup import planned
from cunorm.results import AddNorm, NormForward

Calls = dict[str, Callable[[], Any]]  # by who makes them
Speeds = dict[str, list[float]]  # over SIZES

NORMS = ("rms_norm", "add_rms_norm", "layer_norm")
DIRECTIONS = ("forward", "backward")
SIZES = tuple(1 << power for power in range(15, 26, 2))  # bytes of x
_PRINTED = len(SIZES) // 2  # of these
_WIDTH = 1024
_LEAST, _MOST, _SECONDS = 5, 101, 0.15  # rounds at a point, and for how long there are more
_MARKERS = {"cunorm": "o", "PyTorch": "^"}


def check(path: Path) -> None:
    """Raise DemoError if no plot can be drawn to a path."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise DemoError("--plot needs matplotlib: pip install matplotlib") from None
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in kinds:
        raise DemoError(f"--plot {path}: expected a name that ends in .{', .'.join(kinds)}")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise DemoError(f"--plot {path}: cannot write to {path.parent}: {error.strerror}") from None
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        raise DemoError(f"--plot {path}: it is there, and is no file that can be written to")


def draw(path: Path, device: Device) -> None:
    """Time all norms, print some speeds, and draw the plot."""
    chosen = [one for one in operators(_WIDTH) if str(one) in NORMS]
    _compile(chosen, device)
    note = "calls allocate their results"
    if device.name == "cpu" and keep_freed_memory():
        note += ", and freed memory is kept"
    rows, size = f"rows of {_WIDTH} float32", _size(SIZES[_PRINTED])
    print(f"\nspeed by the size of x, {rows}, calls in turn, medians; GB/s at {size};\n{note}:")
    speeds: dict[tuple[str, str], Speeds] = {}
    for operator in chosen:
        of_norm = _speeds(operator, device)
        for direction, of_direction in of_norm.items():
            speeds[operator.name, direction] = of_direction
            figures = ", ".join(f"{who} {one[_PRINTED]:.1f}" for who, one in of_direction.items())
            print(f"{operator!s:26} {direction:9} {figures}", flush=True)
    try:
        _picture(speeds, f"{device.title}, {rows}", note).savefig(path, dpi=120)
    except OSError as error:
        raise DemoError(f"--plot {path}: {error}") from error
    print(f"drawn to {path}")


def _compile(chosen: list[Operator], device: Device) -> None:
    """Compile what calls of all sizes need, before one is timed."""
    if not device.has_kernels:
        return
    builds: dict[KernelBuild, None] = {}
    for operator in chosen:
        described = operator.described(_operands(operator, 1))
        described["rows"] = [_rows(size) for size in SIZES]
        builds |= dict.fromkeys(planned(device=device.place, **described))
    with Screen(len(builds)) as screen:
        screen.say("compiling for the plot")
        device.compile(list(builds), screen.step)


# --- speeds ---------------------------------------------------------------------------------------


def _speeds(operator: Operator, device: Device) -> dict[str, Speeds]:
    """Return the speeds of both directions, in GB/s."""
    speeds: dict[str, Speeds] = {direction: {} for direction in DIRECTIONS}
    for size in SIZES:
        operands = device.put_all(_operands(operator, _rows(size)))
        moved = operator.moved_bytes(operands, operator.run(operands))
        for direction, amount in zip(DIRECTIONS, moved, strict=True):
            seconds = _medians(calls(operator, direction, operands, device), device)
            for who, median in seconds.items():
                speeds[direction].setdefault(who, []).append(amount / median / 1e9)
    return speeds


def _medians(calls: Calls, device: Device) -> dict[str, float]:
    """Return the median times of calls that are made in turn, each after one untimed."""
    times: dict[str, list[float]] = {who: [] for who in calls}
    end = time.perf_counter() + _SECONDS
    for number in range(_MOST):
        if number >= _LEAST and time.perf_counter() > end:
            break
        for who, call in calls.items():
            call()
            times[who].append(device.seconds(call))
    return {who: statistics.median(of_call) for who, of_call in times.items()}


def _rows(size: int) -> int:
    return size // (4 * _WIDTH)


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >> 20 else f"{size >> 10} KiB"


def _operands(operator: Operator, rows: int) -> Operands:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, _WIDTH), dtype=np.float32)
    like_x = {name: x.copy() for name in ("residual", "dy", "d_residual")}
    parameters = dict.fromkeys(("weight", "bias"), 1 + x[0] / 8)
    return operator.operands({"x": x, **like_x, **parameters})


# --- who is timed ---------------------------------------------------------------------------------


def calls(operator: Operator, direction: str, operands: Operands, device: Device) -> Calls:
    """Return the calls of cunorm, of a plain formula and, where it is, of PyTorch."""
    is_forward, name = direction == "forward", {"cpu": "NumPy", "cuda": "CuPy"}[device.name]
    saved = operator.forward(cunorm, operands)
    formula = (operator, operands, device.library)
    found: Calls = {
        "cunorm": (
            (lambda: operator.forward(cunorm, operands, operator.name))
            if is_forward
            else (lambda: operator.backward(cunorm, operands, saved))
        ),
        name: (lambda: _forward(*formula)) if is_forward else (lambda: _backward(*formula, saved)),
    }
    torch = _torch()
    if torch is not None and (device.name == "cpu" or torch.cuda.is_available()):
        tensors = {key: torch.as_tensor(a, device=device.name) for key, a in operands.items()}
        found["PyTorch"] = _torch_call(torch, operator, is_forward, tensors)
    return found


def _forward(operator: Operator, operands: Operands, library: Any) -> AddNorm[Any]:
    """Compute a norm as one writes it in NumPy or CuPy."""
    x, stream = operands["x"], None
    if "residual" in operands:
        x = stream = x + operands["residual"]
    if operator.center:
        x = x - x.mean(axis=-1, keepdims=True)
    y = x / library.sqrt((x * x).mean(axis=-1, keepdims=True) + operator.eps) * operands["weight"]
    return AddNorm(y + operands["bias"] if "bias" in operands else y, stream)


def _backward(operator: Operator, operands: Operands, library: Any, saved: NormForward[Any]) -> Any:
    """Differentiate it as one writes it in NumPy or CuPy."""
    x = operands["x"] if saved.residual is None else saved.residual
    n = (x if saved.mean is None else x - saved.mean[:, None]) * saved.rstd[:, None]
    dy = operands["dy"]
    g = dy * operands["weight"]
    dx = g - n * (g * n).mean(axis=-1, keepdims=True)
    if saved.mean is not None:
        dx = dx - g.mean(axis=-1, keepdims=True)
    dx = dx * saved.rstd[:, None]
    if "d_residual" in operands:
        dx = dx + operands["d_residual"]
    dbias = dy.sum(axis=0) if "bias" in operands else None
    return cunorm.NormGrads(dx, (dy * n).sum(axis=0), dbias)


def _torch() -> Any:
    """Return PyTorch, None where it is not installed or has no RMS norm.

    It is imported after cunorm's first call, so that the OpenMP threads of both wait as cunorm's
    do: for so short a time that they keep no core from what is timed in turn with them.
    """
    try:
        import torch
    except ImportError:
        return None
    return torch if hasattr(torch.nn.functional, "rms_norm") else None


def _torch_call(
    torch: Any, operator: Operator, is_forward: bool, tensors: Mapping[str, Any]
) -> Callable[[], Any]:
    """Return a call of torch.nn.functional or, for the backward, of autograd."""
    functional = torch.nn.functional
    names = [name for name in ("x", "residual", "weight", "bias") if name in tensors]
    leaves = {name: tensors[name].detach().requires_grad_(not is_forward) for name in names}

    def forward() -> tuple[Any, ...]:
        x, weight = leaves["x"], leaves["weight"]
        if "residual" in leaves:
            x = x + leaves["residual"]
        if operator.center:
            y = functional.layer_norm(x, weight.shape, weight, leaves["bias"], operator.eps)
        else:
            y = functional.rms_norm(x, weight.shape, weight, operator.eps)
        return (y, x) if "residual" in leaves else (y,)

    if is_forward:
        return forward
    outputs, inputs = forward(), list(leaves.values())
    upstream = [tensors[name] for name in ("dy", "d_residual") if name in tensors]
    return lambda: torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)


# --- the picture ----------------------------------------------------------------------------------


def _picture(speeds: dict[tuple[str, str], Speeds], title: str, note: str) -> Any:
    """Return a figure with a panel for each norm and direction."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    panels = figure.subplots(len(DIRECTIONS), len(NORMS), sharex=True, squeeze=False)
    for line, direction in zip(panels, DIRECTIONS, strict=True):
        for panel, norm in zip(line, NORMS, strict=True):
            for who, of_who in speeds[norm, direction].items():
                panel.plot(SIZES, of_who, marker=_MARKERS.get(who, "s"), label=who)
            panel.set_title(f"{norm}, {direction}")
            panel.set_xscale("log", base=2)
            panel.set_xticks(SIZES, [_size(size) for size in SIZES], fontsize="small")
            panel.set_ylim(bottom=0)
            panel.set_ylabel("GB/s")
            panel.grid(alpha=0.3)
    panels[0][0].legend()
    for panel in panels[-1]:
        panel.set_xlabel("size of x")
    figure.suptitle(f"{title}: bytes that a call must read and write, over its median time")
    figure.supxlabel(note, fontsize="medium")
    return figure
