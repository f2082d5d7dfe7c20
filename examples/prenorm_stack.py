# SPDX-License-Identifier: MIT
"""A stack of pre-norm layers, naive and fused, forward and backward by hand.

With x_0 = x, a pre-norm network of n layers is::

    naive:  x_k = f_k(norm(x_{k-1})) + x_{k-1}             output x_n

The addition of one layer and the norm of the next read the same stream, so one call of cunorm does
both::

    fused:  r_k = p_{k-1} + r_{k-1}, q_k = norm(r_k)       output p_n + r_n
            p_k = f_k(q_k)

The backward of a norm adds the stream's gradient in the same pass. Source: "Normalize with Residual
or Gate" (xopes), "Fusing Normalize and Residual", where p_0 = x and r_0 = 0; here the first norm
reads only x.

The option --dtype is the dtype of the branches p_k and of the norms' results q_k; the stream and
the parameters are float32. The script checks that both variants agree, counts the bytes that norms
and additions move, measures the time of norms and additions, and draws bytes and time. It exits
with 1 if the variants differ by more than `TOLERANCE`.

Usage: ``python examples/prenorm_stack.py --dtype bfloat16 --output prenorm_stack.png``
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from devices import array_module, keep_freed_memory
from options import parse, size
from pictures import save_picture
from prenorm_cost import (
    Costs,
    Recorded,
    bytes_moved,
    draw_costs,
    median_seconds,
    print_table,
    saved_percent,
)

import cunorm

Array = Any  # of NumPy or CuPy; NumPy's functions take both

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
STREAM = np.dtype(np.float32)

# The most that `relative_error` may be. cunorm rounds a fused sum like a separate addition, forward
# and backward, so both variants give the same bits. There are two exceptions: matrix products may
# differ from call to call, and without a C++ compiler cunorm's float64 fallback rounds a fused
# backward once, not twice. In these cases each layer may add some float32 roundings of 6e-8, and a
# number that is rounded to bfloat16 may change by 2**-7 of itself.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-6}
QUICK = {"layers": 4, "rows": 1024, "dtype": "bfloat16"}


@dataclass(frozen=True)
class Layer:
    """f(y) = tanh(y @ matrix), and the weight of the norm before it.

    The product mixes the channels, so that a wrong gradient spreads to all of them. tanh keeps the
    branch as small as the stream. f is computed in float32 and rounded to y's dtype.
    """

    weight: Array
    matrix: Array

    def forward(self, y: Array) -> Array:
        """Return the branch."""
        return self._in_float32(y).astype(y.dtype, copy=False)

    def backward(self, d_branch: Array, y: Array) -> tuple[Array, Array]:
        """Return the gradients of y and of the matrix."""
        d_product = d_branch.astype(np.float32) * (1 - self._in_float32(y) ** 2)
        d_matrix = y.astype(np.float32).T @ d_product
        return (d_product @ self.matrix.T).astype(y.dtype, copy=False), d_matrix

    def _in_float32(self, y: Array) -> Array:
        return np.tanh(y.astype(np.float32) @ self.matrix)


class Forward(NamedTuple):
    """A stack's output, and the arrays that each layer's backward needs."""

    output: Array
    streams: list[Array]  # the norms' inputs
    norms: list[cunorm.NormForward]


class Gradients(NamedTuple):
    """The gradient of the input, and the layers' gradients from the last layer to the first."""

    x: Array
    weights: list[Array]
    ys: list[Array]
    matrices: list[Array]

    def append(self, weight: Array, y: Array, matrix: Array) -> None:
        """Append the gradients of one layer."""
        self.weights.append(weight)
        self.ys.append(y)
        self.matrices.append(matrix)


def naive_forward(layers: list[Any], x: Array, dtype: np.dtype[Any]) -> Forward:
    """Compute x_k = f_k(norm(x_{k-1})) + x_{k-1}: a norm and an addition for each layer."""
    stream, streams, norms = x, [], []
    for layer in layers:
        norm = cunorm.rms_norm_forward(stream, layer.weight, dtype=dtype)
        streams.append(stream)
        norms.append(norm)
        stream = layer.forward(norm.y) + stream
    return Forward(stream, streams, norms)


def fused_forward(layers: list[Any], x: Array, dtype: np.dtype[Any]) -> Forward:
    """Compute r_k = p_{k-1} + r_{k-1} and q_k = norm(r_k) in one call, then p_k = f_k(q_k)."""
    norms = [cunorm.rms_norm_forward(x, layers[0].weight, dtype=dtype)]
    streams = [x]
    for layer, next_layer in pairwise(layers):
        branch = layer.forward(norms[-1].y)
        norm = cunorm.rms_norm_forward(branch, next_layer.weight, residual=streams[-1])
        streams.append(norm.residual)
        norms.append(norm)
    return Forward(layers[-1].forward(norms[-1].y) + streams[-1], streams, norms)


def naive_backward(layers: list[Any], saved: Forward, d_output: Array) -> Gradients:
    """Backpropagate with separate passes for norm, addition and, for bfloat16, rounding."""
    d_stream, gradients = d_output, Gradients(None, [], [], [])
    for layer, stream, norm in reversed(list(zip(layers, saved.streams, saved.norms, strict=True))):
        d_branch = d_stream.astype(norm.y.dtype, copy=False)
        d_y, d_matrix = layer.backward(d_branch, norm.y)
        grads = cunorm.rms_norm_backward(d_y, stream, layer.weight, rstd=norm.rstd)
        d_stream = grads.dx + d_stream
        gradients.append(grads.dweight, d_y, d_matrix)
    return gradients._replace(x=d_stream)


def fused_backward(layers: list[Any], saved: Forward, d_output: Array) -> Gradients:
    """Backpropagate with one pass over the rows for each layer."""
    dtype = saved.norms[0].y.dtype
    d_stream, d_branch = d_output, d_output.astype(dtype, copy=False)
    gradients = Gradients(None, [], [], [])
    for layer, stream, norm in reversed(list(zip(layers, saved.streams, saved.norms, strict=True))):
        d_y, d_matrix = layer.backward(d_branch, norm.y)
        first = layer is layers[0]  # its x is the stream, so its dx is float32
        grads = cunorm.rms_norm_backward(
            d_y,
            stream,
            layer.weight,
            rstd=norm.rstd,
            d_residual=d_stream,
            x_dtype=STREAM if first else dtype,
        )
        d_branch, d_stream = grads.dx, grads.dresidual
        gradients.append(grads.dweight, d_y, d_matrix)
    return gradients._replace(x=d_stream)


class Variant(NamedTuple):
    """One of the two implementations of the stack."""

    forward: Callable[[list[Any], Array, np.dtype[Any]], Forward]
    backward: Callable[[list[Any], Forward, Array], Gradients]


VARIANTS = {
    "naive": Variant(naive_forward, naive_backward),
    "fused": Variant(fused_forward, fused_backward),
}


def draw_stack(xp: Any, depth: int, rows: int, width: int) -> tuple[list[Layer], Array, Array]:
    """Return layers, x and the gradient of the output; every device gets the same numbers."""
    rng = np.random.default_rng(0)

    def draw(*shape: int, scale: float = 1.0) -> Array:
        return xp.asarray(scale * rng.standard_normal(shape, np.float32), np.float32)

    layers = [
        Layer(1 + draw(width, scale=0.1), draw(width, width, scale=width**-0.5))
        for _ in range(depth)
    ]
    return layers, draw(rows, width), draw(rows, width)


def run(
    variant: Variant, layers: list[Layer], x: Array, d_output: Array, dtype: np.dtype[Any]
) -> dict[str, list[Array]]:
    """Return all results of a variant by name; layers go from the last to the first."""
    saved = variant.forward(layers, x, dtype)
    gradients = variant.backward(layers, saved, d_output)
    return {
        "output": [saved.output],
        "y": [norm.y for norm in reversed(saved.norms)],
        "dx": [gradients.x],
        "dweight": gradients.weights,
        "dy": gradients.ys,
        "dmatrix": gradients.matrices,
    }


def relative_error(result: Array, expected: Array) -> float:
    """Return the largest difference over the largest magnitude."""
    result, expected = result.astype(np.float32), expected.astype(np.float32)
    return float(abs(result - expected).max() / abs(expected).max())


def summary(errors: dict[str, float], tolerance: float, moved: Costs, seconds: Costs) -> str:
    """Return the result of the run as a sentence."""
    wrong = [kind for kind, error in errors.items() if not error <= tolerance]  # a NaN is wrong
    if wrong:
        return f"The fused stack does not give the naive stack's results of {', '.join(wrong)}."
    worst = max(errors.values())
    agree = "to the last bit"
    if worst:
        agree = f"with differences of at most {worst:.1e} of the largest magnitude"
    of_bytes, of_time = (saved_percent(costs)[-1] for costs in (moved, seconds))
    return (
        f"The fused stack gives the naive stack's results {agree}; its norms and additions move "
        f"{of_bytes:.0f} % fewer bytes and take {abs(of_time):.0f} % "
        f"{'less' if of_time >= 0 else 'more'} time."
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=size, default=8)
    parser.add_argument("--rows", type=size, default=4096)
    parser.add_argument("--width", type=size, default=1024)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the branches")
    parser.add_argument("--repeats", type=size, default=21, help="timed runs of each variant")
    return parse(parser, argv, picture="prenorm_stack.png", quick=QUICK)


def main(argv: list[str] | None = None) -> int:
    """Compare, count, time and draw the two variants; return the exit status."""
    options = arguments(argv)
    xp, dtype = array_module(options.device), DTYPES[options.dtype]
    keep_freed_memory()
    layers, x, d_output = draw_stack(xp, options.layers, options.rows, options.width)
    title = (
        f"{options.layers} layers, {options.rows} rows of {options.width}, {options.dtype} "
        f"branches on a float32 stream, {xp.__name__}"
    )
    print(title)
    naive, fused = (run(each, layers, x, d_output, dtype) for each in VARIANTS.values())
    errors = {kind: np.max([*map(relative_error, fused[kind], naive[kind])]) for kind in naive}
    tolerance = TOLERANCE[options.dtype]
    print(f"\nlargest difference over largest magnitude, at most {tolerance:.2g} allowed:")
    for kind, error in errors.items():
        print(f"  {kind:8} {error:.1e}{'' if error else '  (the same bits)'}")

    moved = bytes_moved(options.layers, x.size, dtype.itemsize)
    print_table("bytes of rows that norms and additions move, by count", "MB", 1e-6, moved)
    recorded = [
        Recorded(layer.weight, y, d_y)  # y takes the place of the branch: only its size matters
        for layer, y, d_y in zip(layers, fused["y"], fused["dy"], strict=True)
    ]
    seconds = median_seconds(xp, VARIANTS, recorded, x, d_output, options.repeats)
    thread = " on one thread" if xp is np else ""
    runs = f"median of {options.repeats} runs in turn"
    print_table(f"time of norms and additions{thread}, {runs}", "ms", 1e3, seconds)
    save_picture(draw_costs(title, moved, seconds), options.output)
    print(summary(errors, tolerance, moved, seconds))
    return 0 if all(error <= tolerance for error in errors.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
