# SPDX-License-Identifier: MIT
"""Checks of drawn JAX programs of norms; a failure is printed as a script."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from itertools import combinations, starmap

from tests.fuzz.jax_oracle import Oracle
from tests.fuzz.jax_programs import Program, kinds, program
from tests.fuzz.jax_runs import compare, in_threads, once, worlds, x64
from tests.support.operands import at

_SCRIPT = """# If this passes, earlier programs matter: run them, too, by `check_all`.
import os
os.environ["XLA_FLAGS"] = {flags!r}
from tests.fuzz.jax_examples import check
from tests.fuzz.jax_nets import Net, Node, Operand, Use
from tests.fuzz.jax_programs import Program, Run

check({program!r})
"""


def check(program: Program) -> Counter[str]:
    """Check the runs of a program; return the number of compared derivatives."""
    oracle, late = Oracle(program.net, program.values), []
    kept: dict[object, object] = {}
    counts: Counter[str] = Counter()
    for number, run in enumerate(program.runs):
        context = f"run {number}, {run.derivative} by {', '.join(run.wanted)}"
        with x64(program.net):
            try:
                found = in_threads(oracle, run) if run.threads > 1 else [once(oracle, run, kept)]
                if run.derivative == "vjp_late":
                    late.append((context, run, found[0]))
                else:
                    counts["derivatives"] += sum(compare(oracle, run, one) for one in found)
            except Exception as error:
                raise AssertionError(f"{context}: {type(error).__name__}: {error}") from error
    for context, run, pull in reversed(late):
        with x64(program.net), at(context):
            counts["derivatives"] += compare(oracle, run, pull())
    return counts


def drawn(seed: int, number: int) -> Program | None:
    """Draw a program, with values that tell right gradients from wrong; None if 8 draws fail."""
    first = program(seed, number)
    for values in range(first.values, first.values + 8):
        oracle = Oracle(first.net, values)
        of_runs = {world for run in first.runs for world in worlds(first.net, run)}
        pairs = combinations(of_runs, 2)
        if all(map(oracle.can_tell, of_runs)) and all(starmap(oracle.can_tell_apart, pairs)):
            return first._replace(values=values)
    return None


def check_all(seed: int, numbers: Iterable[int]) -> Counter[str]:
    """Check programs, and count their features."""
    found: Counter[str] = Counter()
    for number in numbers:
        one = drawn(seed, number)
        if one is None:
            found["left out"] += 1
            continue
        try:
            found += check(one) + kinds(one) + Counter(programs=1)
        except Exception as error:
            script = _SCRIPT.format(flags=os.environ.get("XLA_FLAGS"), program=one)
            text = f"program {number} of seed {seed}: {error}\n{script}"
            raise AssertionError(text) from error
    return found
