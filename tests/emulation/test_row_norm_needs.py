# SPDX-License-Identifier: MIT
"""A backward reads what the wanted gradients need, and adds to what there is where it is told to.

Every input lies in memory, so that the emulator counts what is read of it.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.support.bounds import check_backward
from tests.support.gradients import MADE_OF, NEEDS
from tests.support.operands import assert_same_bits

from .arrays import EPS, FAMILIES, Operands, saved
from .emulator import unavailable
from .kernels import emulate_backward
from .plans import Plan

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

ROWS = {"dy", "x", "d_residual", "gate"}


def read(position, needs, kind, center):
    """Run a backward, hold it to the oracle, and return what it loaded of each input, in bytes."""
    width, team = FAMILIES[kind]
    make = Operands((1, 1, 5, width))
    dy, x, d_residual, gate = (make.rows("float32") for _ in range(4))
    weight, bias = make.param("float32"), make.param("float32")
    norm = {"center": center, "round_before_weight": True, "weight_offset": 1.0}
    norm |= {"gate": gate, "gate_position": position} if position else {}
    given = {"d_residual": d_residual, **norm}
    options = {**given, **saved(x, **norm), "needs": needs}
    ran = emulate_backward(dy, x, weight, bias, **options, plan=Plan(team=team))
    worst = check_backward(ran.result, dy, x, weight, bias, eps=EPS, **given)
    assert worst.keys() == {f"d{name}" for name in needs}
    inputs = ROWS | {"weight", "bias", "mean", "rstd"}
    return {n: b for n, b in ran.moved["row_norm_backward"].loaded.items() if n in inputs and b}


def expected(position, needs, center):
    """Return which inputs the gradients are made of."""
    inputs = set().union(*(MADE_OF[position][name] for name in needs))
    return inputs if center else inputs - {"mean"}


def kept():
    """Yield cases whose rows stay in registers; of clusters, those of no gate in CI."""
    for kind, (position, needs) in product(("warp teams", "cluster"), NEEDS):
        is_more = kind == "cluster" and position is not None
        marks = pytest.mark.exhaustive if is_more else ()
        yield pytest.param(position, needs, kind, marks=marks)


@pytest.mark.parametrize(("position", "needs", "kind"), list(kept()))
def test_a_backward_reads_once_what_the_wanted_gradients_need(position, needs, kind):
    loaded = read(position, needs, kind, center=True)
    assert loaded.keys() == expected(position, needs, center=True)
    of_a_row = FAMILIES[kind][0] * 4
    assert {loaded[name] for name in ROWS & loaded.keys()} == {loaded["dy"]} == {5 * of_a_row}


# What the sums of a row's first pass are over is read again in the second, where there is a first.
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize(("position", "needs"), [case for case in NEEDS if len(case[1]) == 1])
def test_a_streamed_backward_reads_twice_only_for_sums(position, needs, center):
    loaded = read(position, needs, "streamed", center=center)
    assert loaded.keys() == expected(position, needs, center)
    needs_dp = needs == ("x",) or (position == "pre" and needs == ("gate",))
    has_sums = needs_dp or (center and needs != ("bias",))
    again = {"dy", "x", "gate"} if has_sums else set()
    for name in ROWS & loaded.keys():
        assert loaded[name] == 5 * 3100 * 4 * (2 if name in again else 1)


@pytest.mark.parametrize("compute", ["float32", "float64"])
@pytest.mark.parametrize("needs", [("weight",), ("bias",), ("weight", "bias")])
def test_accumulating_is_adding_with_one_rounding(needs, compute):
    make = Operands((1, 1, 50, 3 * 33))
    dy, x, weight, bias = make.rows("bfloat16"), make.rows(compute), *2 * (make.param("float16"),)
    norm = {"center": True, "groups": 3}
    options = {**norm, **saved(x, **norm), "needs": needs}
    names = [f"d{name}" for name in needs]
    exact = {name: make.param("float64") for name in names}
    result = emulate_backward(dy, x, weight, bias, out=exact, **options).result
    for dtypes in product(("float32", "float64"), repeat=len(names)):
        before = {name: make.param(dtype) for name, dtype in zip(names, dtypes, strict=True)}
        options["accumulate"] = True
        total = emulate_backward(dy, x, weight, bias, out=before, **options).result
        for name, array in before.items():
            added = array.astype(np.float64) + getattr(result, name)
            assert_same_bits(getattr(total, name), added.astype(array.dtype), name)
