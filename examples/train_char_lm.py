# SPDX-License-Identifier: MIT
"""Train a small Transformer on the characters of Python's own documentation.

The package `char_lm` has the model, its gradients and the optimizer, written on bare arrays of
NumPy or CuPy. Every norm, forward and backward, is a call of cunorm. The script exits with 1 if the
model's cross-entropy on the held-out part of the text is not below that of a bigram model.

Usage: ``python examples/train_char_lm.py --output loss_curve.png``
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from char_lm.adam import Adam, learning_rate
from char_lm.curve import Losses, draw_curve
from char_lm.data import (
    Corpus,
    Ids,
    all_windows,
    bigram_loss,
    corpus,
    installation_text,
    random_windows,
)
from char_lm.layers import softmax
from char_lm.model import Model, Shape
from devices import array_module, keep_freed_memory
from options import parse, rate, seed, size
from pictures import save_picture
from tqdm import trange

import cunorm

VALIDATIONS = 10  # about as many validations in a run
VALIDATION_BATCH = 128  # windows
SAMPLE_LENGTH = 400
TEMPERATURE = 0.8  # of the sample; a temperature below 1 favours likely characters
QUICK = {"steps": 200, "width": 64, "layers": 1, "context": 16, "batch": 16, "rate": 1e-2}


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=size, default=800)
    parser.add_argument("--width", type=size, default=128)
    parser.add_argument("--layers", type=size, default=2)
    parser.add_argument("--heads", type=size, default=4)
    parser.add_argument("--context", type=size, default=64, help="characters in a window")
    parser.add_argument("--batch", type=size, default=32, help="windows of a step")
    parser.add_argument("--rate", type=rate, default=5e-3, help="largest learning rate")
    parser.add_argument("--seed", type=seed, default=0)
    return parser


def find_wrong_options(options: argparse.Namespace, data: Corpus) -> str | None:
    """Return an error message if options do not fit together or to the text, else None."""
    if options.width % options.heads:
        return f"--width is {options.width}, expected a multiple of --heads, {options.heads}"
    longest = len(data.validation) - 1
    if options.context > longest:
        return f"--context is {options.context}, expected at most {longest} for this text"
    return None


def validation_loss(model: Model, inputs: Ids, targets: Ids, xp: Any) -> float:
    """Return the mean loss of all windows."""
    total = 0.0
    for start in range(0, len(inputs), VALIDATION_BATCH):
        part = slice(start, start + VALIDATION_BATCH)
        loss = model.loss(xp.asarray(inputs[part]), xp.asarray(targets[part]))
        total += loss * len(inputs[part])
    return total / len(inputs)


def train(model: Model, data: Corpus, options: argparse.Namespace, xp: Any) -> Losses:
    """Train the model and return its losses."""
    rng = np.random.default_rng(options.seed)
    optimizer, losses = Adam(model.parameters), Losses([], {})
    held_out = all_windows(data.validation, options.context)
    interval = max(1, options.steps // VALIDATIONS)
    progress = trange(options.steps, unit="step")
    for step in progress:
        if step % interval == 0:
            validation = validation_loss(model, *held_out, xp)
            losses.validation[step] = validation
        batch = random_windows(rng, data.training, options.batch, options.context)
        loss, grads = model.loss_and_gradients(*map(xp.asarray, batch))
        optimizer.step(grads, learning_rate(step, options.steps, options.rate))
        losses.training.append(loss)
        progress.set_postfix(loss=f"{loss:.3f}", validation=f"{validation:.3f}", refresh=False)
    losses.validation[options.steps] = validation_loss(model, *held_out, xp)
    return losses


def sample(model: Model, data: Corpus, rng: np.random.Generator, xp: Any) -> str:
    """Return a newline, and text that the model continues it with, character by character."""
    ids = [data.characters.index("\n")]
    for _ in range(SAMPLE_LENGTH):
        window = xp.asarray([ids[-model.shape.context :]])
        logits = model.forward(window)[0][0, -1].astype(np.float64)
        probabilities = softmax(logits / TEMPERATURE).tolist()
        ids.append(int(rng.choice(len(probabilities), p=probabilities)))
    return "".join(data.characters[index] for index in ids)


def main(argv: list[str] | None = None) -> int:
    """Train, report and draw; return the exit status."""
    parser = command_line()
    options = parse(parser, argv, picture="loss_curve.png", quick=QUICK)
    name, text = installation_text()
    data = corpus(text)
    if wrong := find_wrong_options(options, data):
        parser.error(wrong)
    xp = array_module(options.device)
    keep_freed_memory()
    # On a CPU, waiting threads of NumPy and of cunorm slow each other down. NumPy's matrix products
    # take longest, so they get all cores, and cunorm runs on one thread.
    cunorm.set_num_threads(1)
    vocabulary = len(data.characters)
    held_out = all_windows(data.validation, options.context)
    baseline = bigram_loss(data.training, *held_out, vocabulary)
    print(f"{name}: {len(text)} characters, {vocabulary} different")

    rng = np.random.default_rng(options.seed)
    shape = Shape(vocabulary, options.width, options.layers, options.heads, options.context)
    model = Model(shape, rng, xp, np.float32)
    print(f"{sum(array.size for array in model.parameters.values())} parameters, {xp.__name__}")
    losses = train(model, data, options, xp)

    final = losses.validation[options.steps]
    print(f"sample:\n{sample(model, data, rng, xp)}\n")
    print(f"bigram baseline:  {baseline:.4f} nats per character")
    print(f"validation loss:  {final:.4f} nats per character")
    save_picture(draw_curve(losses, baseline), options.output)
    better = final < baseline
    print(
        f"The model, with every norm by cunorm, {'predicts' if better else 'does not predict'} "
        f"text that it has not seen better than a bigram model: after {options.steps} steps its "
        f"loss is {final:.2f} nats per character, the bigram model's {baseline:.2f}."
    )
    return 0 if better else 1


if __name__ == "__main__":
    sys.exit(main())
