# SPDX-License-Identifier: MIT
"""A text that every Python installation has, its batches, and a bigram model as a baseline."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Ids = np.ndarray[Any, np.dtype[np.intp]]

VALIDATION_PART = 0.1


class Corpus(NamedTuple):
    """A text as indices into its characters. The last part is for validation only."""

    characters: list[str]
    training: Ids
    validation: Ids


def installation_text() -> tuple[str, str]:
    """Return a source's name and its text: Python's language reference or, without it, docstrings.

    The reference repeats some sections. Repeated paragraphs are removed, so that the validation
    part is new to a model trained on the rest.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        name, text = "docstrings of the standard library", _docstrings()
    else:
        name, text = "pydoc_data.topics", "\n\n".join(topics[key] for key in sorted(topics))
    return name, "\n\n".join(dict.fromkeys(text.split("\n\n")))


def _docstrings() -> str:
    """Return the docstrings of the standard library's top-level modules and of what they define."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_bytes()))
        found += [ast.get_docstring(node) for node in nodes if isinstance(node, documented)]
    return "\n\n".join(text for text in found if text)


def corpus(text: str) -> Corpus:
    """Split a text and number its characters."""
    characters = sorted(set(text))
    number = {character: index for index, character in enumerate(characters)}
    ids = np.array([number[character] for character in text], np.intp)
    boundary = round(len(ids) * (1 - VALIDATION_PART))
    return Corpus(characters, ids[:boundary], ids[boundary:])


def random_windows(rng: np.random.Generator, ids: Ids, batch: int, context: int) -> tuple[Ids, Ids]:
    """Return random windows of a text and their next characters, each (batch, context)."""
    starts = rng.integers(0, len(ids) - context, batch)
    inputs = starts[:, None] + np.arange(context)
    return ids[inputs], ids[inputs + 1]


def all_windows(ids: Ids, context: int) -> tuple[Ids, Ids]:
    """Return consecutive windows of a text and their next characters, each (windows, context)."""
    length = (len(ids) - 1) // context * context
    return ids[:length].reshape(-1, context), ids[1 : length + 1].reshape(-1, context)


def bigram_loss(training: Ids, inputs: Ids, targets: Ids, vocabulary: int) -> float:
    """Return the cross-entropy of a bigram model, in nats per character.

    The model's probabilities are proportional to 1 + the count of a pair in the training part.
    """
    counts = np.ones((vocabulary, vocabulary))
    np.add.at(counts, (training[:-1], training[1:]), 1)
    log_probabilities = np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(-log_probabilities[inputs, targets].mean())
