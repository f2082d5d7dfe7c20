# SPDX-License-Identifier: MIT
"""Train a small Transformer in PyTorch twice: with torch's own norms, and with cunorm's.

The model uses only `torch.nn`; `cunorm.torch.replace_norms` makes cunorm run its norms, forward and
backward. Both runs begin with the same parameters and read the same characters of Python's
documentation. The script prints both loss curves. It exits with 1 if they differ by more than the
tolerance, or if the model's loss is not below a bigram model's.

Usage: ``python examples/torch_train.py --steps 300``
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import NamedTuple

import numpy as np
import torch
from char_lm.data import Corpus, bigram_loss, corpus, installation_text, random_windows
from sizes import rate, seed, size
from torch_char_lm.model import Model, Shape

import cunorm.torch

# In nats per character, for float32. The runs round differently, by some 6e-8 of each number.
# Training enlarges this from step to step: to 7e-7 in the 300 steps, to 2e-5 in 400 at five times
# the rate. A gradient of x that was 0.1 % too large made a difference of 1e-4 in 60 steps.
TOLERANCE = 1e-4
REPORTS = 10  # lines of the printed curves
LAST = 10  # steps whose mean loss is compared with the bigram's


class Run(NamedTuple):
    """The loss of each step in nats per character, and the seconds of all steps but the first."""

    losses: list[float]
    seconds: float


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=size, default=300)
    parser.add_argument("--width", type=size, default=128)
    parser.add_argument("--layers", type=size, default=2)
    parser.add_argument("--heads", type=size, default=4)
    parser.add_argument("--context", type=size, default=64, help="characters in a window")
    parser.add_argument("--batch", type=size, default=16, help="windows of a step")
    parser.add_argument("--rate", type=rate, default=2e-3, help="learning rate")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser


def train(model: Model, data: Corpus, options: argparse.Namespace) -> Run:
    """Train a model on batches drawn with the seed."""
    rng, losses = np.random.default_rng(options.seed), []
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate)
    start = time.perf_counter()
    for number in range(options.steps):
        batch = random_windows(rng, data.training, options.batch, options.context)
        inputs, targets = (torch.from_numpy(ids).to(options.device) for ids in batch)
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not number:  # the first step compiles
            start = time.perf_counter()
    return Run(losses, time.perf_counter() - start)


def train_both(data: Corpus, options: argparse.Namespace) -> dict[str, Run]:
    """Train the same model with torch's norms and with cunorm's."""
    sizes = (options.width, options.layers, options.heads, options.context)
    runs = {}
    for name in ("torch.nn", "cunorm.torch"):
        torch.manual_seed(options.seed)
        model = Model(Shape(len(data.characters), *sizes)).to(options.device)
        if name == "cunorm.torch":
            print(cunorm.torch.replace_norms(model))
        runs[name] = train(model, data, options)
    return runs


def report(runs: dict[str, Run]) -> float:
    """Print both curves; return their largest difference."""
    first, second = (run.losses for run in runs.values())
    steps = len(first)
    print(f"{'step':>6}" + "".join(f"{name:>14}" for name in runs) + f"{'difference':>14}")
    for number in range(0, steps, max(1, steps // REPORTS)):
        losses = (first[number], second[number])
        values = "".join(f"{loss:14.5f}" for loss in losses)
        print(f"{number:6}{values}{abs(losses[0] - losses[1]):14.1e}")
    for name, run in runs.items():
        print(f"{name}: {run.seconds / max(1, steps - 1) * 1e3:.1f} ms a step")
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def main(argv: list[str] | None = None) -> int:
    """Train twice and compare; return the exit status."""
    parser = command_line()
    options = parser.parse_args(argv)
    if options.width % options.heads:
        parser.error(f"--width is {options.width}, expected a multiple of --heads, {options.heads}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a PyTorch with CUDA and an NVIDIA GPU")
    # Threads wait by spinning. On cores that other programs use too, they slow a small model down.
    torch.set_num_threads(1)
    cunorm.set_num_threads(1)
    name, text = installation_text()
    data = corpus(text)
    vocabulary = len(data.characters)
    print(f"{name}: {len(text)} characters, {vocabulary} different; on {options.device}")
    runs = train_both(data, options)
    difference = report(runs)

    windows = random_windows(np.random.default_rng(1), data.training, 256, options.context)
    baseline = bigram_loss(data.training, *windows, vocabulary)
    last = float(np.mean(runs["cunorm.torch"].losses[-LAST:]))
    print(f"largest difference: {difference:.1e}, tolerance {TOLERANCE} nats per character")
    print(f"bigram model: {baseline:.4f}, last losses: {last:.4f} nats per character")
    return 0 if difference <= TOLERANCE and last < baseline else 1


if __name__ == "__main__":
    sys.exit(main())
