# SPDX-License-Identifier: MIT
"""Argument types of the command lines, for argparse."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable

from bench.timing.cases import Shape


def list_of(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated names among `allowed`; duplicates are dropped."""
    choices = list(allowed)

    def parse(text: str) -> list[str]:
        given = list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in given if name not in choices]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}, expected some of {choices}")
        return given

    return parse


def shapes(text: str) -> list[Shape]:
    """Read comma-separated shapes of rows or of images; duplicates are dropped."""
    try:
        found = [tuple(map(int, shape.split("x"))) for shape in text.split(",")]
    except ValueError:
        found = [()]
    if not {len(shape) for shape in found} <= {2, 4}:
        raise argparse.ArgumentTypeError(f"{text!r}, expected ROWSxWIDTH,... or NxCxHxW,...")
    if min(map(min, found)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected sizes of at least 1")
    return list(dict.fromkeys(found))


def count(text: str) -> int:
    """Read a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number of at least 1")
    return number


def seconds(text: str) -> float:
    """Read a number of seconds above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}, expected seconds above 0")
    return number
