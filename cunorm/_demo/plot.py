# SPDX-License-Identifier: MIT
"""`--plot`: speed over size, of cunorm, of plain formulas and of PyTorch's own functions."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import cunorm
from cunorm._demo.device import DemoError, Device, keep_freed_memory
from cunorm._demo.operators import DIRECTIONS, INPUTS, Operands, Operator, bytes_moved, operators
from cunorm.results import AddNorm, NormGrads

Calls = dict[str, Callable[[], Any]]

NORMS = ("rms_norm", "add_rms_norm", "layer_norm")
SIZES = tuple(1 << power for power in range(15, 26, 2))  # bytes of x
_PRINTED = len(SIZES) // 2  # of these
_WIDTH = 1024
_LEAST, _MOST, _SECONDS = 5, 101, 0.15  # rounds at a point, and for how long there are more


def check(path: Path) -> None:
    """Raise DemoError if no plot can be drawn to a path: draw an empty one."""
    try:
        from matplotlib.figure import Figure

        Figure().savefig(path)
    except ImportError:
        raise DemoError("--plot needs matplotlib: pip install matplotlib") from None
    except (OSError, ValueError) as error:
        raise DemoError(f"--plot {path}: {error}") from None


def draw(path: Path, device: Device, out: Console) -> None:
    """Time some norms, print some speeds, and draw the plot."""
    from matplotlib.figure import Figure

    note = "calls allocate their results"
    note += ", and freed memory is kept" if device.library is np and keep_freed_memory() else ""
    what = f"rows of {_WIDTH} float32, calls in turn, medians"
    out.print(f"\nspeed by the size of x, {what}; GB/s at {SIZES[_PRINTED] >> 20} MiB;\n{note}:")
    figure = Figure(figsize=(12, 7), layout="constrained")
    panels = figure.subplots(len(DIRECTIONS), len(NORMS), sharex=True).T.flat
    for operator in (one for one in operators(_WIDTH) if one.label in NORMS):
        for direction, panel in zip(DIRECTIONS, panels, strict=False):
            speeds = _speeds(operator, direction, device)
            figures = ", ".join(f"{who} {one[_PRINTED]:.1f}" for who, one in speeds.items())
            out.print(f"{operator.label:26} {direction:9} {figures}")
            for who, of_who in speeds.items():
                panel.semilogx(SIZES, of_who, "o-", base=2, label=who)
            panel.set(title=f"{operator.label}, {direction}", ylabel="GB/s", ylim=(0, None))
            panel.grid(alpha=0.3)
            panel.legend()
    figure.suptitle(f"{device.title}: bytes that a call must read and write, over its median time")
    figure.supxlabel(f"bytes of x, {what}; {note}", fontsize="medium")
    figure.savefig(path, dpi=120)
    out.print(f"drawn to {path}")


def _speeds(operator: Operator, direction: str, device: Device) -> dict[str, list[float]]:
    """Return the speeds of all over SIZES, in GB/s."""
    speeds: dict[str, list[float]] = {}
    for size in SIZES:
        operands = device.placed(_operands(operator, size // (4 * _WIDTH)))
        moved = bytes_moved(operands, operator.forward(cunorm, operands), None)[direction]
        for who, seconds in _medians(calls(operator, direction, operands, device), device).items():
            speeds.setdefault(who, []).append(moved / seconds / 1e9)
    return speeds


def _operands(operator: Operator, rows: int) -> dict[str, Any]:
    x = np.random.default_rng(0).standard_normal((rows, _WIDTH), dtype=np.float32)
    like_x = {name: x.copy() for name in ("residual", "dy", "d_residual")}
    return operator.operands({"x": x, **like_x, **dict.fromkeys(("weight", "bias"), 1 + x[0] / 8)})


def _medians(calls: Calls, device: Device) -> dict[str, float]:
    """Return the median times of calls that are made in turn, each after one untimed."""
    times: dict[str, list[float]] = {who: [] for who in calls}
    end = time.perf_counter() + _SECONDS
    for number in range(_MOST):
        if number >= _LEAST and time.perf_counter() > end:
            break
        for who, call in calls.items():
            call()  # the first compiles
            times[who].append(device.seconds(call))
    return {who: statistics.median(of_call) for who, of_call in times.items()}


def calls(operator: Operator, direction: str, operands: Operands, device: Device) -> Calls:
    """Return the calls of cunorm, of a plain formula and, where it is, of PyTorch."""
    saved, on_cpu = operator.forward(cunorm, operands), device.library is np
    ours, plain = operator.calls(operands, saved), _plain_calls(operator, operands, saved)
    found = {"cunorm": ours[direction], "NumPy" if on_cpu else "CuPy": plain[direction]}
    try:  # after a call of cunorm, so that OpenMP threads of both wait for a short time
        import torch
    except ImportError:
        return found
    if on_cpu or torch.cuda.is_available():
        found["PyTorch"] = _torch_calls(torch, operator, operands)[direction]
    return found


def _plain_calls(operator: Operator, a: Operands, saved: Any) -> Calls:
    """Return a norm and its gradients as one writes them in NumPy or CuPy."""
    is_centred, is_added = saved.mean is not None, "residual" in a

    def mean_of(x: Any) -> Any:
        return x.mean(axis=-1, keepdims=True)

    def forward() -> Any:
        x = stream = a["x"] + a["residual"] if is_added else a["x"]
        x = x - mean_of(x) if is_centred else x
        y = x / (mean_of(x * x) + operator.eps) ** 0.5 * a["weight"]
        return AddNorm(y + a["bias"] if is_centred else y, stream if is_added else None)

    def backward() -> Any:
        x, dy = saved.residual if is_added else a["x"], a["dy"]
        n = (x - saved.mean[:, None] if is_centred else x) * saved.rstd[:, None]
        g = dy * a["weight"]
        dx = g - n * mean_of(g * n)
        dx = (dx - mean_of(g) if is_centred else dx) * saved.rstd[:, None]
        dx = dx + a["d_residual"] if is_added else dx
        return NormGrads(dx, (dy * n).sum(axis=0), dy.sum(axis=0) if is_centred else None)

    return {"forward": forward, "backward": backward}


def _torch_calls(torch: Any, operator: Operator, operands: Operands) -> Calls:
    """Return calls of torch.nn.functional and of autograd."""
    tensors = {name: torch.as_tensor(array) for name, array in operands.items()}
    leaves = {name: tensors[name].clone().requires_grad_() for name in INPUTS if name in tensors}
    norm = partial(getattr(torch.nn.functional, operator.base), eps=operator.eps)

    def forward(given: Operands = tensors) -> list[Any]:
        x = given["x"] + given["residual"] if "residual" in given else given["x"]
        parameters = [given[name] for name in ("weight", "bias") if name in given]
        y = norm(x, x.shape[-1:], *parameters)
        return [y, x] if "residual" in given else [y]

    upstream = [tensors[name] for name in ("dy", "d_residual") if name in tensors]
    gradients = partial(torch.autograd.grad, forward(leaves), [*leaves.values()], retain_graph=True)
    return {"forward": forward, "backward": lambda: gradients(upstream)}
