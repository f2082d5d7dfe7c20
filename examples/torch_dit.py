# SPDX-License-Identifier: MIT
"""Train a diffusion transformer in PyTorch twice: with torch's own modulated norms, and cunorm's.

The blocks are those of DiT (adaLN-Zero): time and class of a sample scale and shift each norm, and
gate each branch. With cunorm, each norm is one call, with its modulation and with the addition of
the gated branch before it. The model learns velocities from noise to small pictures of strokes
(flow matching). Both runs begin with the same parameters and draw the same pictures and noise. The
script prints and draws both loss curves and new pictures of the model. It exits with 1 if the
curves differ by more than the tolerance, or if few pictures show the stroke that was asked for.

Usage: ``python examples/torch_dit.py --output torch_dit.png``
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import torch
from devices import torch_device
from dit.model import AddNorm, Model, fused, plain
from dit.strokes import NAMES, SIDE, nearest, strokes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from options import parse, rate, seed, size
from pictures import save_picture
from two_runs import Run, draw_curves, report

import cunorm.torch

# The runs round differently, by some 6e-8 of each number. Training enlarges the difference, to some
# 3e-6 in 500 steps. A gradient of x that was 0.1 % too large made a difference of 4e-4 in 100
# steps.
TOLERANCE = 1e-4
DRAWN = 256  # new pictures, as many of each class
STEPS_TO_DRAW = 20
ENOUGH = 0.5  # of the new pictures; by chance it would be a quarter
QUICK = {"steps": 150, "width": 32, "layers": 1, "rate": 1e-2}


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=size, default=500)
    parser.add_argument("--width", type=size, default=64)
    parser.add_argument("--layers", type=size, default=2)
    parser.add_argument("--heads", type=size, default=4)
    parser.add_argument("--batch", type=size, default=64, help="pictures of a step")
    parser.add_argument("--rate", type=rate, default=3e-3, help="learning rate")
    parser.add_argument("--seed", type=seed, default=0)
    return parser


def train(model: Model, add_norm: AddNorm, options: argparse.Namespace) -> Run:
    """Train a model on pictures, noise and times drawn with the seed."""
    generator, losses = torch.Generator().manual_seed(options.seed), []
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate)
    start = time.perf_counter()
    for number in range(options.steps):
        label = torch.randint(len(NAMES), (options.batch,), generator=generator)
        picture = strokes(label, generator)
        noise = torch.randn(picture.shape, generator=generator)
        when = torch.rand(options.batch, generator=generator)
        mixed = torch.lerp(noise, picture, when[:, None, None])
        given = (array.to(options.device) for array in (mixed, when, label))
        velocity = (picture - noise).to(options.device)
        loss = torch.nn.functional.mse_loss(model(*given, add_norm), velocity)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not number:
            start = time.perf_counter()
    return Run(losses, time.perf_counter() - start)


@torch.no_grad()
def new_pictures(model: Model, label: torch.Tensor, device: str) -> torch.Tensor:
    """Follow the model's velocities from noise to pictures."""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn((len(label), SIDE, SIDE), generator=generator).to(device)
    for step in range(STEPS_TO_DRAW):
        when = torch.full((len(label),), (step + 0.5) / STEPS_TO_DRAW, device=device)
        pictures = pictures + model(pictures, when, label.to(device), fused) / STEPS_TO_DRAW
    return pictures.cpu()


def draw_all(runs: dict[str, Run], pictures: NDArray[np.float32]) -> Figure:
    """Draw the losses, their difference, and a row of new pictures for each class."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(3, 2))
    draw_curves(left, runs, TOLERANCE, "mean squared error of velocities")
    right.suptitle("new pictures by the model")
    for row, of_class in zip(right.subplots(len(NAMES), 6), pictures, strict=True):
        for axes, picture in zip(row, of_class[:6], strict=True):
            axes.imshow(picture, cmap="gray", vmin=-1, vmax=1)
            axes.axis("off")
    return figure


def main(argv: list[str] | None = None) -> int:
    """Train twice, compare, and draw; return the exit status."""
    parser = command_line()
    options = parse(parser, argv, picture="torch_dit.png", quick=QUICK)
    if options.width % (2 * options.heads):
        multiple = f"expected a multiple of twice --heads, {2 * options.heads}"
        parser.error(f"--width is {options.width}, {multiple}")
    options.device = torch_device(parser, options.device)
    # On several threads, a small model is slow if other programs use the same cores.
    torch.set_num_threads(1)
    cunorm.set_num_threads(1)
    runs = {}
    for name, add_norm in (("PyTorch", plain), ("cunorm.torch", fused)):
        torch.manual_seed(options.seed)
        sizes = (options.width, options.layers, options.heads)
        model = Model(SIDE, len(NAMES), *sizes).to(options.device)
        runs[name] = train(model, add_norm, options)
    difference = report(runs)
    print(f"largest difference: {difference:.1e}, tolerance {TOLERANCE}")

    label = torch.arange(len(NAMES)).repeat_interleave(DRAWN // len(NAMES))
    pictures = new_pictures(model, label, options.device)
    share = float((nearest(pictures) == label).float().mean())
    by_class = pictures.unflatten(0, (len(NAMES), -1)).numpy()
    save_picture(draw_all(runs, by_class), options.output)
    alike, learned = difference <= TOLERANCE, share >= ENOUGH
    print(
        f"With cunorm's norms the model {'trains' if alike else 'does not train'} as with "
        f"PyTorch's: in {options.steps} steps the losses differ by at most {difference:.1e}; "
        f"{'' if learned else 'only '}{100 * share:.0f} % of its new pictures show the stroke "
        f"that was asked for."
    )
    return 0 if alike and learned else 1


if __name__ == "__main__":
    sys.exit(main())
