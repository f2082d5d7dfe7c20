# SPDX-License-Identifier: MIT
"""Check programs of PyTorch; a program that fails is printed as a script."""

from __future__ import annotations

import re
import warnings
from collections import Counter

import torch

from tests.fuzz.torch_programs import Program
from tests.fuzz.torch_runs import Results, Run
from tests.fuzz.torch_ways import WAYS

# The refusals that the documentation lists, each with its page. Any other exception is a failure.
REFUSALS = (
    (RuntimeError, "functionalize cannot follow derivatives", "docs/guides/pytorch.md"),
    (RuntimeError, "modified by an inplace operation", "docs/guides/pytorch.md"),
)
_SCRIPT = """As a script, for the root of the repository:
from tests.fuzz.torch_checks import check
from tests.fuzz.torch_programs import Program, Step

print(check({program!r}))
"""
_CLEAR = 4  # a result is clear if its largest number exceeds this many bounds
# How many roundings of a result's largest number are in the bound: in float32 64, because sums of
# short rows may be badly conditioned; in half precision 8, because sums are in float32; in float64
# 2**14, because the plain formulas are then the oracle, so their error adds nothing to the bound.
_ROUNDINGS = {torch.float32: 64, torch.float64: 2**14}
_FEW = 8  # numbers


class Failed(AssertionError):
    """A result of cunorm is wrong or missing, or cunorm raises an error."""


def check(program: Program) -> Counter[str]:
    """Compare cunorm's results of a program with formulas in float64; return counts of outcomes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        way = WAYS[program.way]
        try:
            exact = way(Run(program, "exact"))
            plain = way(Run(program, "plain"))
        except Exception:
            return Counter(["refused by PyTorch itself"])
        if [*plain] != [*exact]:  # such as a reentrant checkpoint whose inputs have no gradients
            return Counter(["refused by PyTorch itself"])
        try:
            found = way(Run(program, "cunorm"))
        except Exception as error:
            for kind, message, _ in REFUSALS:
                if isinstance(error, kind) and re.search(message, str(error)):
                    return Counter([f"refused: {message}"])
            raise Failed(f"{type(error).__name__}: {error}") from error
        return compare(found, plain, exact, getattr(torch, program.dtype))


def compare(
    found: Results, plain: Results, exact: Results, dtype: torch.dtype = torch.float32
) -> Counter[str]:
    """Compare results by name; `dtype` is that of x.

    The bound is 8 times the error of plain formulas in the same dtypes, plus some roundings. These
    are also x's roundings if a result has few numbers, of which plain formulas may get all right by
    chance. A result counts as unclear if all its numbers are within 4 bounds of zero.
    """
    counts: Counter[str] = Counter()
    if more := {*found} - {*exact}:
        raise Failed(f"{more} should not be there")
    for name, right in exact.items():
        if name not in found:
            raise Failed(f"{name} is missing")
        got, near = found[name], plain[name]
        if (got.shape, got.dtype) != (right.shape, near.dtype):
            raise Failed(f"{name} is {got.dtype} {got.shape}, expected {near.dtype} {right.shape}")
        if not right.numel():
            counts["empty"] += 1
            continue
        largest = float(right.abs().max())
        unit = torch.finfo(near.dtype).eps / 2
        bound = _ROUNDINGS.get(near.dtype, 8) * unit * max(largest, 1.0)
        bound += 8 * float((near.double() - right).abs().max())
        if right.numel() < _FEW:
            bound += torch.finfo(dtype).eps * largest
        off = float((got.double() - right).abs().nan_to_num(torch.inf).max())
        if not off <= bound:
            raise Failed(
                f"{name} is off by {off:.3g}, {off / bound:.3g} bounds: {got}, not {right}"
            )
        if not _CLEAR * bound < largest:
            counts["zeros" if largest < unit else "unclear"] += 1
            continue
        counts["compared"] += 1
        others = [one for its, one in exact.items() if its != name and one.shape == right.shape]
        apart = [float((one - right).abs().max()) > 2 * bound for one in others]
        counts["others of the shape"] += len(apart)
        counts["others that would not pass"] += sum(apart)
    return counts


def run(program: Program) -> Counter[str]:
    """Check a program; if it fails, the error has it as a script."""
    try:
        return check(program)
    except Failed as failure:
        raise AssertionError(f"{failure}\n{_SCRIPT.format(program=program)}") from failure
