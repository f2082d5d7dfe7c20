# SPDX-License-Identifier: MIT
"""Every combination of operands' dtypes at some width, every set of operands at every width.

Each group of cases runs in a process of its own, with a cache of its own: together they are more
libraries than one process can load, and than anyone wants to keep.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from os import environ
from tempfile import TemporaryDirectory

import pytest
from covers import Case, everything
from operands import WIDTHS

from .covered import (
    ARRANGEMENT,
    DTYPES,
    FORWARD,
    OPTIONAL,
    check_backward_case,
    check_forward_case,
)
from .emulator import unavailable

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]

# Where dx and dresidual are asked for, and of which dtype; None: x's.
OUTPUTS = (("", None), ("dx", None), ("dresidual", None), *product(["dx dresidual"], DTYPES))


def forward_types(x: str, stream: str | None) -> Iterator[Case]:
    """Yield all combinations of the other dtypes, for these of x and the residual stream."""
    factors = {name: FORWARD[name] for name in ("weight", "bias", "y", "center")}
    for case in everything(factors):
        yield {"x": x, "stream": stream, **case}


def backward_types(dy: str, x: str, outputs: str, dx: str | None) -> Iterator[Case]:
    """Yield all combinations of the other dtypes, for these of dy, x and the outputs."""
    factors = {
        "d_residual": OPTIONAL if outputs else (None,),
        "weight": OPTIONAL,
        "needs": (("weight", "bias"), ("weight",), ("bias",), ()),
        "center": (False, True),
    }
    for case in everything(factors):
        if "weight" in case["needs"] and case["weight"] is None:
            continue  # as without
        if outputs or case["needs"]:
            yield {"dy": dy, "x": x, "outputs": outputs, "dx": dx, **case}


def arranged(cases: Iterator[Case], seed: object, **factors) -> Iterator[Case]:
    """Draw for each case what it does not say of the operands, of memory and of the launch."""
    draw = random.Random(repr(seed))
    for case in cases:
        yield {name: draw.choice(c) for name, c in (ARRANGEMENT | factors).items()} | case


def run_in_a_process(check, cases: list[Case]) -> None:
    """Check all cases and report those that fail."""
    assert cases
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, get_context("spawn"), _use_cache, (folder,)) as pool,
    ):
        failures = pool.submit(_failures, check, cases).result()
    assert not failures, f"{len(failures)} of {len(cases)} fail, such as\n" + failures[0]


def _use_cache(folder: str) -> None:
    environ["CUNORM_EMULATION_CACHE"] = folder


def _failures(check, cases: list[Case]) -> list[str]:
    failures = []
    for case in cases:
        try:
            check(case)
        except (AssertionError, RuntimeError) as error:
            failures.append(f"{case}\n{error}")
    return failures


@pytest.mark.parametrize("stream", FORWARD["stream"])
@pytest.mark.parametrize("x", DTYPES)
def test_forward_is_right_for_every_combination_of_dtypes(x, stream):
    widths = {"width": WIDTHS, "c": (None, 1.0)}
    cases = list(arranged(forward_types(x, stream), (x, stream), **widths))
    run_in_a_process(check_forward_case, cases)


@pytest.mark.parametrize(("outputs", "dx"), OUTPUTS)
@pytest.mark.parametrize("x", DTYPES)
@pytest.mark.parametrize("dy", DTYPES)
def test_backward_is_right_for_every_combination_of_dtypes(dy, x, outputs, dx):
    types = backward_types(dy, x, outputs, dx)
    others = {"width": WIDTHS, "c": (None, 1.0), "bias": DTYPES}
    cases = list(arranged(types, (dy, x, outputs, dx), **others))
    run_in_a_process(check_backward_case, cases)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_set_of_operands_is_right_at_every_width(dtype, width):
    one = {"width": (width,), "center": (False, True)}
    optional = dict.fromkeys(("weight", "bias"), (None, dtype))
    forward = everything(
        {"x": (dtype,), "y": (dtype,), "stream": (None, f"+ {dtype}"), **optional, **one}
    )
    run_in_a_process(check_forward_case, list(arranged(forward, width, c=(None, 1.0))))
    backward = everything(
        {
            **{"dy": (dtype,), "x": (dtype,), "dx": (None,), "d_residual": (None, dtype)},
            **{"outputs": ("dx", "dresidual", "dx dresidual"), "needs": (("weight", "bias"), ())},
            **optional,
            **one,
        }
    )
    run_in_a_process(check_backward_case, list(arranged(backward, width, c=(None, 1.0))))
