# SPDX-License-Identifier: MIT
"""Run the MLPs of a Transformer with matrix products of 8-bit floats, and compare with bfloat16.

Before each MLP, one call of cunorm adds a branch to the residual stream, normalises the new stream
and quantises the result to float8_e4m3fn, with a scale for each token. The matrix product takes
both. Weights have a scale for each output; the input of the second product, which is no norm's
result, is quantised by torch's operations. Where torch has no such product of 8-bit floats, the
factors are dequantised and multiplied in float32. The script prints and draws how far the stream is
from that of float32 after each layer. It exits with 1 if 8-bit floats are too far from bfloat16.

Usage: ``python examples/torch_fp8_mlp.py --output torch_fp8_mlp.png``
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from devices import torch_device
from matplotlib.figure import Figure
from options import parse, seed, size
from pictures import CUNORM, OTHER, save_picture
from torch import Tensor

import cunorm

# With 3 fraction bits, the root mean square of relative errors is some 2.6 %. A product of two such
# factors is off by 3.7 %, and gate * up, two of these, by 5.3 %. With the second product it is
# 6.5 %; later layers add their own errors, and what earlier errors make of their input.
TOLERANCE = 0.1
LARGEST = torch.finfo(torch.float8_e4m3fn).max
QUICK = {"layers": 2, "width": 128, "tokens": 64}


class Quantized(NamedTuple):
    """Rows in float8_e4m3fn."""

    q: Tensor
    scale: Tensor  # one for each row


class Layer(NamedTuple):
    """The parameters of an MLP with its norm."""

    norm: Tensor  # weight of the norm
    into: Tensor  # (2 * hidden, width): gate and up
    out: Tensor  # (width, hidden)


Layers = list[Layer]
Product = Callable[[Quantized, Quantized], Tensor]


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=size, default=8)
    parser.add_argument("--width", type=size, default=512, help="a multiple of 16")
    parser.add_argument("--tokens", type=size, default=256, help="a multiple of 16")
    parser.add_argument("--seed", type=seed, default=0)
    return parser


def quantize_rows(x: Tensor) -> Quantized:
    """Quantise rows as cunorm does, with torch's operations."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(1 / (LARGEST * 512))
    return Quantized((wide / scale).to(torch.float8_e4m3fn), scale)


def scaled_product(a: Quantized, b: Quantized) -> Tensor:
    """Return a @ b.T in bfloat16, by torch's product of 8-bit floats."""
    scales = {"scale_a": a.scale, "scale_b": b.scale.T}
    return torch._scaled_mm(a.q, b.q.T, **scales, out_dtype=torch.bfloat16)


def dequantized_product(a: Quantized, b: Quantized) -> Tensor:
    """Return the same product of dequantised float32 factors."""
    wide_a, wide_b = (q.float() * scale for q, scale in (a, b))
    return (wide_a @ wide_b.T).bfloat16()


def product_of(device: str) -> Product:
    """Return the product of 8-bit floats, or its replacement if torch has none on the device."""
    trial = quantize_rows(torch.ones(16, 16, device=device))
    try:
        scaled_product(trial, trial)
    except (RuntimeError, ValueError, AttributeError):
        return dequantized_product
    return scaled_product


def swiglu(x: Tensor) -> Tensor:
    """Multiply one half of the columns by the SiLU of the other."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def in_float8(layers: Layers, x: Tensor, product: Product) -> list[Tensor]:
    """Return the stream after each layer; x is the first branch."""
    branch, stream, streams = x.bfloat16(), torch.zeros_like(x), []
    for layer in layers:
        found = cunorm.rms_norm_quantized(branch, layer.norm.bfloat16(), residual=stream)
        stream = found.residual
        hidden = swiglu(product(Quantized(found.q, found.scale), quantize_rows(layer.into)))
        branch = product(quantize_rows(hidden), quantize_rows(layer.out))
        streams.append(stream + branch)
    return streams


def in_dtype(layers: Layers, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the same streams, of norms and products in another dtype."""
    branch, stream, streams = x.to(dtype), torch.zeros_like(x), []
    for layer in (Layer(*(one.to(dtype) for one in parameters)) for parameters in layers):
        y, stream = cunorm.add_rms_norm(branch, stream, layer.norm)
        branch = swiglu(y @ layer.into.T) @ layer.out.T
        streams.append(stream + branch)
    return streams


def drawn_layers(options: argparse.Namespace) -> tuple[Layers, Tensor]:
    """Return random layers and tokens; some columns of the stream are far larger than others."""
    generator = torch.Generator().manual_seed(options.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(options.device)

    width, hidden = options.width, 2 * options.width
    layers = [
        Layer(
            1 + normal(width) / 4,
            normal(2 * hidden, width) / width**0.5,
            normal(width, hidden) / hidden**0.5,
        )
        for _ in range(options.layers)
    ]
    x = normal(options.tokens, width)
    x[:, :: width // 8] *= 20
    return layers, x


def errors(streams: list[Tensor], right: list[Tensor], x: Tensor) -> list[float]:
    """Return the relative errors of all that the layers have added to x."""
    pairs = zip(streams, right, strict=True)
    return [float((one - other).norm() / (other - x).norm()) for one, other in pairs]


def draw(found: dict[str, list[float]]) -> Figure:
    """Draw the errors of each dtype over the layers."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, of_layers), colour in zip(found.items(), (OTHER, CUNORM), strict=True):
        axes.semilogy(range(1, len(of_layers) + 1), of_layers, "o-", color=colour, label=name)
    axes.set(xlabel="layers", ylabel="relative error of what they add", ylim=(1e-3, 1))
    axes.legend()
    return figure


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    """Run the layers three times, compare, and draw; return the exit status."""
    parser = command_line()
    options = parse(parser, argv, picture="torch_fp8_mlp.png", quick=QUICK)
    for name in ("width", "tokens"):
        if getattr(options, name) % 16:
            parser.error(f"--{name} is {getattr(options, name)}, expected a multiple of 16")
    options.device = torch_device(parser, options.device)
    layers, x = drawn_layers(options)
    product = product_of(options.device)
    is_scaled = product is scaled_product
    print(f"products: {'torch._scaled_mm' if is_scaled else 'of dequantised float32 factors'}")

    right = in_dtype(layers, x, torch.float32)
    half, quantized = in_dtype(layers, x, torch.bfloat16), in_float8(layers, x, product)
    of_each = {"bfloat16": errors(half, right, x), "float8": errors(quantized, right, x)}
    print(f"{'layer':>5} {'bfloat16':>9} {'float8':>9}   relative error to float32")
    for number, (one, other) in enumerate(zip(*of_each.values(), strict=True), start=1):
        print(f"{number:5} {one:9.2%} {other:9.2%}")
    save_picture(draw(of_each), options.output)
    difference = errors(quantized, half, x)[-1]
    print(
        f"{options.layers} MLPs with 8-bit floats differ by {100 * difference:.1f} % from bfloat16"
        f"{', which is too much' if difference > TOLERANCE else ''} "
        f"(tolerance {100 * TOLERANCE:.0f} %)."
    )
    return 0 if difference <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
