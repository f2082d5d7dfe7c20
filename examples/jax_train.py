# SPDX-License-Identifier: MIT
"""Train a small Transformer in JAX twice: with norms written by hand, and with cunorm.jax.

Both runs begin with the same parameters and read the same characters of Python's documentation. The
script prints and draws both loss curves. It exits with 1 if the curves differ by more than the
tolerance, or if the last loss is not below the first.

Usage: ``python examples/jax_train.py --output jax_train.png``
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial

import jax
import numpy as np
from char_lm.data import Corpus, corpus, installation_text, random_windows
from devices import jax_device
from jax_char_lm.model import Shape, initial, step
from jax_char_lm.norms import CUNORM, HAND_WRITTEN, Norms
from options import parse, rate, seed, size
from pictures import save_picture
from two_runs import Run, draw, report

# The tolerance is in nats per character, for float32. The runs round differently, by 6e-8 of each
# number, and each training step may enlarge the difference. The largest difference seen in 400
# steps on a CPU was 1e-6.
TOLERANCE = 1e-3
QUICK = {"steps": 100}


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=size, default=300)
    parser.add_argument("--width", type=size, default=64)
    parser.add_argument("--layers", type=size, default=1)
    parser.add_argument("--heads", type=size, default=4)
    parser.add_argument("--context", type=size, default=32, help="characters in a window")
    parser.add_argument("--batch", type=size, default=16, help="windows of a step")
    parser.add_argument("--rate", type=rate, default=1e-2, help="learning rate")
    parser.add_argument("--seed", type=seed, default=0)
    return parser


def train(norms: Norms, data: Corpus, options: argparse.Namespace) -> Run:
    """Train a new model with one choice of norms."""
    sizes = (options.width, options.layers, options.heads, options.context)
    shape = Shape(len(data.characters), *sizes)
    advance = jax.jit(partial(step, norms, shape, options.rate), donate_argnums=0)
    state, rng, losses = initial(shape, options.seed), np.random.default_rng(options.seed), []
    start = time.perf_counter()
    for number in range(options.steps):
        batch = random_windows(rng, data.training, options.batch, options.context)
        state, loss = advance(state, *(ids.astype(np.int32) for ids in batch))
        losses.append(float(loss))
        if not number:
            start = time.perf_counter()
    return Run(losses, time.perf_counter() - start)


def main(argv: list[str] | None = None) -> int:
    """Train twice and compare; return the exit status."""
    parser = command_line()
    options = parse(parser, argv, picture="jax_train.png", quick=QUICK)
    if options.width % options.heads:
        parser.error(f"--width is {options.width}, expected a multiple of --heads, {options.heads}")
    name, text = installation_text()
    data = corpus(text)
    longest = len(data.training) - 1
    if options.context > longest:
        parser.error(f"--context is {options.context}, expected at most {longest} for this text")
    device = jax_device(parser, options.device)
    print(f"{name}: {len(text)} characters, {len(data.characters)} different; on {device}")
    with jax.default_device(device):
        choices = {"jax.numpy": HAND_WRITTEN, "cunorm.jax": CUNORM}
        runs = {name: train(norms, data, options) for name, norms in choices.items()}
    difference = report(runs)

    losses = runs["cunorm.jax"].losses
    print(f"largest difference: {difference:.1e}, tolerance {TOLERANCE} nats per character")
    print(f"loss: {losses[0]:.4f} at first, {losses[-1]:.4f} at last, in nats per character")
    save_picture(draw(runs, TOLERANCE), options.output)
    alike, learnt = difference <= TOLERANCE, losses[-1] < losses[0]
    print(
        f"With cunorm's norms the model {'trains' if alike else 'does not train'} as with norms "
        f"written in jax.numpy: in {options.steps} steps the losses differ by at most "
        f"{difference:.1e}, and {'fall' if learnt else 'do not fall'}: from {losses[0]:.2f} to "
        f"{losses[-1]:.2f} nats per character."
    )
    return 0 if alike and learnt else 1


if __name__ == "__main__":
    sys.exit(main())
