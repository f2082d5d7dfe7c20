# SPDX-License-Identifier: MIT
"""`--plot`: speed over size, of cunorm, of plain formulas and of PyTorch."""

import statistics
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import cunorm
from cunorm._demo import operators as demo
from cunorm._demo.operators import DemoError, Device, Operands, Operator

NORMS = ("rms_norm", "add_rms_norm", "layer_norm")
SIZES = tuple(1 << power for power in range(15, 26, 2))  # bytes of x
_WIDTH = 1024
_ROUNDS = 15  # timed calls of each library at each size


def saved_figure(path: Path) -> Any:
    """Save an empty figure, so that an error comes before the work, and return the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise DemoError(f"--plot {path}: {error}") from None
    return figure


def draw(figure: Any, path: Path, device: Device, out: Console) -> None:
    what = f"rows of {_WIDTH} float32; calls in turn, which allocate their results; medians"
    out.print(f"\nspeed by the size of x; {what};\nGB/s at {SIZES[-1] >> 20} MiB:")
    panels = figure.subplots(2, len(NORMS), sharex=True).T.flat
    for operator in (one for one in demo.operators(_WIDTH) if one.label in NORMS):
        for direction, panel in zip(("forward", "backward"), panels, strict=False):
            speeds = _speeds(operator, direction, device)
            figures = ", ".join(f"{who} {one[-1]:.1f}" for who, one in speeds.items())
            out.print(f"{operator.label:26} {direction:9} {figures}")
            for who, of_who in speeds.items():
                panel.semilogx(SIZES, of_who, "o-", base=2, label=who)
            panel.set(title=f"{operator.label}, {direction}", ylabel="GB/s", ylim=(0, None))
            panel.legend()
    figure.suptitle(f"{device.title}: bytes that a call must read and write, over its median time")
    figure.supxlabel(f"bytes of x; {what}", fontsize="medium")
    figure.savefig(path, dpi=120)
    out.print(f"drawn to {path}")


def _speeds(operator: Operator, direction: str, device: Device) -> dict[str, list[float]]:
    """Return the speeds of each library over SIZES, in GB/s; each call follows an untimed call."""
    speeds: dict[str, list[float]] = {}
    for size in SIZES:
        shape = size // (4 * _WIDTH), _WIDTH
        rows = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
        operands = device.placed(operator.operands(demo.row_operands(rows, np.float32)))
        made = calls(operator, direction, operands, device)
        times: dict[str, list[float]] = {who: [] for who in made}
        moved = demo.bytes_moved(made["cunorm"], made["cunorm"]())
        for _ in range(_ROUNDS):
            for who, call in made.items():
                call()
                times[who].append(device.seconds(call))
        for who, seconds in times.items():
            speeds.setdefault(who, []).append(moved / statistics.median(seconds) / 1e9)
    return speeds


def calls(operator: Operator, direction: str, operands: Operands, device: Device) -> dict[str, Any]:
    """Return the calls of cunorm, of a plain formula and, if installed, of PyTorch."""
    saved, on_cpu = operator.forward(cunorm, operands)(), device.library is np
    found = {"cunorm": operator.calls(operands, saved)}
    found["NumPy" if on_cpu else "CuPy"] = _plain_calls(operator, operands, saved)
    with suppress(ImportError):
        import torch  # later than cunorm, which makes OpenMP's threads wait only briefly

        if on_cpu or torch.cuda.is_available():
            found["PyTorch"] = _torch_calls(torch, operator, operands)
    return {who: of_who[direction] for who, of_who in found.items()}


def _plain_calls(operator: Operator, a: Operands, saved: Any) -> dict[str, Any]:
    """Return a norm and its gradients as users write them in NumPy or CuPy."""
    is_centred, is_added = "bias" in a, "residual" in a
    mean_of = partial(np.mean, axis=-1, keepdims=True)

    def forward() -> list[Any]:
        x = stream = a["x"] + a["residual"] if is_added else a["x"]
        x = x - mean_of(x) if is_centred else x
        y = x / (mean_of(x * x) + operator.eps) ** 0.5 * a["weight"]
        return [y + a["bias"] if is_centred else y, *[stream] * is_added]

    def backward() -> list[Any]:
        x, dy, rstd = saved.residual if is_added else a["x"], a["dy"], saved.rstd[:, None]
        n, g = (x - saved.mean[:, None] if is_centred else x) * rstd, dy * a["weight"]
        dx = g - n * mean_of(g * n)
        dx = (dx - mean_of(g) if is_centred else dx) * rstd
        dx = dx + a["d_residual"] if is_added else dx
        sums = [(dy * n).sum(axis=0), dy.sum(axis=0)]
        return [dx, *[dx] * is_added, *sums[: 1 + is_centred]]

    return {"forward": forward, "backward": backward}


def _torch_calls(torch: Any, operator: Operator, operands: Operands) -> dict[str, Any]:
    tensors = {name: torch.as_tensor(array) for name, array in operands.items()}
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items() if n in demo.INPUTS}
    norm = partial(getattr(torch.nn.functional, operator.base), eps=operator.eps)

    def forward(given: Operands = tensors) -> list[Any]:
        x = given["x"] + given["residual"] if "residual" in given else given["x"]
        y = norm(x, x.shape[-1:], *(given[name] for name in ("weight", "bias") if name in given))
        return [y, x] if "residual" in given else [y]

    upstream = [tensors[name] for name in ("dy", "d_residual") if name in tensors]
    gradients = partial(torch.autograd.grad, forward(leaves), [*leaves.values()], retain_graph=True)
    return {"forward": forward, "backward": lambda: gradients(upstream)}
