# SPDX-License-Identifier: MIT
"""Denoise a picture with a residual block of the autoencoders of VQGAN and Stable Diffusion.

The package `denoiser` has the block, x + conv2(silu(gn2(conv1(silu(gn1(x)))))), on bare
channels-last arrays of NumPy or CuPy. Every group norm + SiLU, forward and backward, is a call of
cunorm. The model learns to remove noise from one picture, with new noise at each step, and is
tested with other noise. The script exits with 1 if the gradient differs from finite differences, or
if the model's error is not below that of a blur.

Usage: ``python examples/vae_block.py --output vae_block.png``
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from char_lm.adam import Adam, learning_rate
from denoiser.model import Array, Denoiser
from denoiser.picture import NAME, Shown, draw_figure, picture
from devices import array_module, keep_freed_memory
from options import parse, rate, seed, size
from pictures import save_picture
from tqdm import trange

import cunorm

MAX_SHRINK = 40  # leaves 10x12 pixels of the picture
NOISE = 0.15  # the standard deviation; white is 1
STEP = 1e-4  # of the central difference; with this step its relative error is some 1e-10
TOLERANCE = 1e-7
QUICK = {"steps": 100, "channels": 8, "groups": 2, "shrink": 14}


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=size, default=120)
    parser.add_argument("--channels", type=size, default=32)
    parser.add_argument("--groups", type=size, default=8)
    parser.add_argument("--shrink", type=size, default=5, help="divides both sides of 400x480")
    parser.add_argument("--rate", type=rate, default=5e-3, help="largest learning rate")
    parser.add_argument("--seed", type=seed, default=0)
    return parser


def with_noise(clean: Array, rng: np.random.Generator, xp: Any) -> Array:
    """Return the picture with noise, drawn on the host so that all devices get the same noise."""
    return clean + xp.asarray(NOISE * rng.standard_normal(clean.shape), clean.dtype)


def gradient_error(model: Denoiser, noisy: Array, clean: Array, xp: Any) -> float:
    """Return the relative difference between the gradient's slope and a central difference.

    Both are slopes of the loss, in float64, along a random direction in the picture and all
    parameters. The point is random, too, because some parameters begin as ones or zeros.
    """
    rng, kept = np.random.default_rng(0), model.parameters

    def draw(like: Array, scale: float) -> Array:
        return xp.asarray(scale * rng.standard_normal(like.shape))

    start = {"picture": noisy, **kept}
    length = sum(array.size for array in start.values()) ** 0.5
    point = {name: array + draw(array, 0.1) for name, array in start.items()}
    direction = {name: draw(array, 1 / length) for name, array in start.items()}

    def at(distance: float) -> tuple[float, dict[str, Array]]:
        model.parameters = {name: point[name] + distance * direction[name] for name in point}
        picture = model.parameters.pop("picture")
        loss, d_picture, grads = model.loss_and_gradients(picture, clean.astype(np.float64))
        return loss, {"picture": d_picture, **grads}

    grads = at(0)[1]
    slope = sum(float((grads[name] * direction[name]).sum()) for name in point)
    difference = (at(STEP)[0] - at(-STEP)[0]) / (2 * STEP)
    model.parameters = kept
    return abs(slope - difference) / abs(difference)


def blur_error(noisy: Array, clean: Array) -> float:
    """Return the least error of blurs with the weights 1 2 1 down and across, 1 to 8 times."""
    errors = []
    for _ in range(8):
        down = np.pad(noisy, ((0, 0), (1, 1), (0, 0), (0, 0)), "edge")
        noisy = (down[:, :-2] + 2 * noisy + down[:, 2:]) / 4
        across = np.pad(noisy, ((0, 0), (0, 0), (1, 1), (0, 0)), "edge")
        noisy = (across[:, :, :-2] + 2 * noisy + across[:, :, 2:]) / 4
        errors.append(float(((noisy - clean) ** 2).mean()))
    return min(errors)


def train(model: Denoiser, clean: Array, options: argparse.Namespace, xp: Any) -> list[float]:
    """Train the model and return its losses."""
    rng = np.random.default_rng(options.seed + 1)
    optimizer, losses = Adam(model.parameters), []
    progress = trange(options.steps, unit="step")
    for step in progress:
        loss, _, grads = model.loss_and_gradients(with_noise(clean, rng, xp), clean)
        optimizer.step(grads, learning_rate(step, options.steps, options.rate))
        losses.append(loss)
        progress.set_postfix(loss=f"{loss:.5f}", refresh=False)
    return losses


def main(argv: list[str] | None = None) -> int:
    """Check the gradient, train, report and draw; return the exit status."""
    parser = command_line()
    options = parse(parser, argv, picture="vae_block.png", quick=QUICK)
    if options.channels % options.groups:
        multiple = f"expected a multiple of --groups, {options.groups}"
        parser.error(f"--channels is {options.channels}, {multiple}")
    if options.shrink > MAX_SHRINK:
        parser.error(f"--shrink is {options.shrink}, expected at most {MAX_SHRINK}")
    xp = array_module(options.device)
    keep_freed_memory()
    # Threads of NumPy and of cunorm would slow each other down while they wait.
    cunorm.set_num_threads(1)
    clean = xp.asarray(picture(options.shrink))[None]
    rng = np.random.default_rng(options.seed)
    model = Denoiser(options.channels, options.groups, rng, xp)
    parameters = sum(array.size for array in model.parameters.values())
    print(f"{NAME}, {clean.shape[1]}x{clean.shape[2]}; {parameters} parameters, {xp.__name__}")

    noisy = with_noise(clean, rng, xp)
    wrong = gradient_error(model, noisy, clean, xp)
    print(f"gradient along a random direction: off a central difference by {wrong:.1e} of it")
    losses = train(model, clean, options, xp)

    loss, d_noisy, _ = model.loss_and_gradients(noisy, clean)
    saved, blurred = model.forward(noisy), blur_error(noisy, clean)
    shown = (clean, noisy, saved.output, d_noisy, saved.norms[1].y)
    on_host = [array[0] if xp is np else xp.asnumpy(array[0]) for array in shown]
    print(f"first and last loss: {losses[0]:.5f}, {losses[-1]:.5f}")
    print(f"best blur: {blurred:.5f}, model: {loss:.5f} mean squared error")
    save_picture(draw_figure(Shown(*on_host, losses, blurred)), options.output)
    right, better = wrong <= TOLERANCE, loss < blurred
    print(
        f"The block {'removes' if better else 'does not remove'} noise better than the best blur: "
        f"its mean squared error is {loss:.4f}, the blur's {blurred:.4f}; its gradient is "
        f"{'right' if right else 'wrong'}: off a central difference by {wrong:.1e} of it."
    )
    return 0 if right and better else 1


if __name__ == "__main__":
    sys.exit(main())
