# SPDX-License-Identifier: MIT
"""Train a small Transformer in PyTorch twice: with torch's own norms, and with cunorm's.

The model uses only `torch.nn`; `cunorm.torch.replace_norms` makes cunorm run its norms, forward and
backward. Both runs begin with the same parameters and read the same characters of Python's
documentation. The script prints and draws both loss curves. It exits with 1 if the curves differ by
more than the tolerance, or if the model's loss is not below that of a bigram model.

Usage: ``python examples/torch_train.py --output torch_train.png``
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import torch
from char_lm.data import Corpus, bigram_loss, corpus, installation_text, random_windows
from devices import torch_device
from options import parse, rate, seed, size
from pictures import save_picture
from torch_char_lm.model import Model, Shape
from two_runs import Run, draw, report

import cunorm.torch

# The tolerance is in nats per character, for float32. The runs round differently, by some 6e-8 of
# each number. Training enlarges the difference: to 7e-7 in 300 steps, and to 2e-5 in 400 steps at
# five times the rate. A gradient of x that was 0.1 % too large made a difference of 1e-4 in 60
# steps.
TOLERANCE = 1e-4
LAST = 10  # the mean loss of the last steps is compared with that of a bigram model
QUICK = {"steps": 200, "width": 64, "layers": 1, "context": 16, "rate": 1e-2}


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
        if not number:
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


def main(argv: list[str] | None = None) -> int:
    """Train twice and compare; return the exit status."""
    parser = command_line()
    options = parse(parser, argv, picture="torch_train.png", quick=QUICK)
    if options.width % options.heads:
        parser.error(f"--width is {options.width}, expected a multiple of --heads, {options.heads}")
    options.device = torch_device(parser, options.device)
    # On several threads, a small model is slow if other programs use the same cores.
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
    save_picture(draw(runs, TOLERANCE), options.output)
    alike, better = difference <= TOLERANCE, last < baseline
    print(
        f"With cunorm's norms the model {'trains' if alike else 'does not train'} as with "
        f"PyTorch's: in {options.steps} steps the losses differ by at most {difference:.1e}, and "
        f"at the end they are {last:.2f} nats per character, {'' if better else 'not '}less than "
        f"a bigram model's {baseline:.2f}."
    )
    return 0 if alike and better else 1


if __name__ == "__main__":
    sys.exit(main())
