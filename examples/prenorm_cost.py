# SPDX-License-Identifier: MIT
"""What norms and additions cost in the two forms of `prenorm_stack`: bytes by count, and time."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

from devices import wait

import cunorm

Array = Any
Costs = dict[str, tuple[float, float]]  # of each form, forward and backward


class Recorded(NamedTuple):
    """A layer that takes no time, as it returns what it was given: norms and additions are left."""

    weight: Array
    branch: Array
    d_y: Array

    def forward(self, y: Array) -> Array:
        """Return the branch that was recorded."""
        return self.branch

    def backward(self, d_branch: Array, y: Array) -> tuple[Array, None]:
        """Return the gradient that was recorded."""
        return self.d_y, None


def bytes_moved(depth: int, elements: int, size: int) -> Costs:
    """Count the bytes of rows that norms and additions read and write, forward and backward.

    A stream's element has `stream` bytes, a branch's, y's and dy's `size`; weights and rstd are
    small against the rows. Each term is one pass over the rows: what it reads + what it writes.
    """
    stream = 4
    plain_norm = stream + size
    addition = (size + stream) + stream
    fused_norm = (size + stream) + (stream + size)
    norm_backward = (size + stream) + stream  # of dy and stream, dx
    fused_backward = (size + 2 * stream) + stream  # and of d_residual
    d_addition = 2 * stream + stream
    rounding = stream + size if size < stream else 0  # of d_stream to the branch's dtype
    rounded = size if size < stream else 0  # the same as a second result of fused_backward
    per_element = {
        "naive": (
            depth * (plain_norm + addition),
            depth * (rounding + norm_backward + d_addition),
        ),
        "fused": (
            plain_norm + (depth - 1) * fused_norm + addition,
            rounding + depth * fused_backward + (depth - 1) * rounded,
        ),
    }
    return {
        form: (forward * elements, backward * elements)
        for form, (forward, backward) in per_element.items()
    }


def median_seconds(
    xp: Any,
    forms: dict[str, Any],
    layers: list[Recorded],
    x: Array,
    d_output: Array,
    repeats: int,
) -> Costs:
    """Time norms and additions, forward and backward; the forms take turns.

    On a CPU all of it runs on one thread, as NumPy's additions have no more.
    """
    cunorm.set_num_threads(1)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for _ in range(repeats + 1):
        for name, form in forms.items():
            start = now(xp)
            saved = form.forward(layers, x, layers[0].branch.dtype)
            middle = now(xp)
            gradients = form.backward(layers, saved, d_output)
            times[name].append((middle - start, now(xp) - middle))
            del saved, gradients  # or freeing them would be part of the next form's time
    cunorm.set_num_threads(None)
    medians = {}
    for name, runs in times.items():
        forward, backward = zip(*runs[1:], strict=True)  # the first run warms up
        medians[name] = statistics.median(forward), statistics.median(backward)
    return medians


def now(xp: Any) -> float:
    """Return the time, when everything that was started is done."""
    wait(xp)
    return time.perf_counter()


def print_table(title: str, unit: str, scale: float, costs: Costs) -> None:
    """Print a line for each form, forward and backward, and what the fused one saves."""
    print(f"\n{title}:\n{'':8}{'forward':>12}{'backward':>12}{'both':>12}")
    both = {name: (*pair, sum(pair)) for name, pair in costs.items()}
    for name, numbers in both.items():
        print(f"{name:8}" + "".join(f"{scale * number:9.1f} {unit}" for number in numbers))
    savings = (1 - fused / naive for naive, fused in zip(*both.values(), strict=True))
    print(f"{'saved':8}" + "".join(f"{100 * saving:9.1f} % " for saving in savings))
