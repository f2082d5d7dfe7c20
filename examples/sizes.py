# SPDX-License-Identifier: MIT
"""Argument types for the numbers on an example's command line."""

from __future__ import annotations

import argparse


def size(text: str) -> int:
    """Parse an int of at least 1."""
    return at_least(1, text)


def seed(text: str) -> int:
    """Parse an int of at least 0."""
    return at_least(0, text)


def at_least(smallest: int, text: str) -> int:
    """Parse an int that is not smaller than `smallest`."""
    number = int(text)
    if number < smallest:
        raise argparse.ArgumentTypeError(f"is {number}, expected at least {smallest}")
    return number


def rate(text: str) -> float:
    """Parse a finite number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"is {text}, expected a finite number above 0")
    return number
