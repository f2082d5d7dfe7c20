# SPDX-License-Identifier: MIT
"""What a sample's results do not depend on, to the last bit, with a GPU's launches."""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.operands import assert_same_bits

from .emulator import unavailable
from .group_arrays import EPS, FAMILIES, LAYOUTS, Operands
from .group_kernels import GroupPlan, emulate_group_backward, emulate_group_forward

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

SAMPLES = 7
OF_SAMPLE = ("y", "mean", "rstd", "dx")

# The layout of the arrays and what the plan is told, by what differs from the usual.
PLACES = {
    **{layout: (layout, {}) for layout in LAYOUTS if layout != "contiguous"},
    "one element off": ("contiguous", {"offset": 1}),
    "two elements off": ("contiguous", {"offset": 2}),
    "after a guard page": ("contiguous", {"at": "start"}),
}
ORDERS = {
    "reverse": {"order": "reverse"},
    **{f"random {seed}": {"order": "random", "seed": seed} for seed in range(2)},
}
CHUNKS = {"one sample": {"chunk": 1}, "three samples": {"chunk": 3}}

every_family = pytest.mark.parametrize("name", FAMILIES)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def run(name, dtype, *, layout="contiguous", samples=None, in_place=False, **plan):
    """Run forward and backward of all samples, or of these; return every result by its name."""
    family = FAMILIES[name]
    make = Operands(family.of(SAMPLES), far=True)
    x, dy = make.x("float64"), make.dy("float64")
    picked = list(range(SAMPLES)) if samples is None else samples
    grid = family.of(len(picked))
    x, dy = (grid.spread(values[picked], dtype, layout) for values in (x, dy))
    operands = (family.groups, make.param(dtype), make.param(dtype))
    told = {"activation": "silu", "channel_axis": grid.channel_axis}
    told["plan"] = GroupPlan(**family.plan, **plan)
    y = x if in_place else grid.empty(dtype, layout)
    f = emulate_group_forward(x, *operands, **told, eps=EPS, out={"y": y}).result
    statistics = {"mean": f.mean, "rstd": f.rstd}
    dx = dy if in_place else grid.empty(dtype, layout)
    grads = emulate_group_backward(dy, x, *operands, **told, **statistics, out={"dx": dx}).result
    return f._asdict() | grads._asdict()


@cache
def usual(name, dtype):
    """Return the results that others must be equal to."""
    return run(name, dtype)


def assert_same(results, expected, names):
    for name in names:
        assert_same_bits(results[name], expected[name], name)


@every_family
@every_dtype
@pytest.mark.parametrize("place", PLACES)
def test_results_do_not_depend_on_alignment_or_strides(name, dtype, place):
    layout, plan = PLACES[place]
    results = run(name, dtype, layout=layout, **plan)
    assert_same(results, usual(name, dtype), results)


@every_family
@pytest.mark.parametrize("order", ORDERS)
def test_results_do_not_depend_on_the_order_of_blocks_and_warps(name, order):
    results = run(name, "float32", **ORDERS[order])
    assert_same(results, usual(name, "float32"), results)


@every_family
def test_results_do_not_depend_on_being_computed_in_place(name):
    results = run(name, "float32", in_place=True)
    assert_same(results, usual(name, "float32"), results)


@every_family
@pytest.mark.parametrize("chunk", CHUNKS)
def test_results_do_not_depend_on_how_many_samples_are_gone_over_at_a_time(name, chunk):
    results = run(name, "float32", **CHUNKS[chunk])
    assert_same(results, usual(name, "float32"), results)


@every_family
@every_dtype
@pytest.mark.parametrize(
    "samples",
    [[0], [4], [5, 6], list(range(SAMPLES))[::-1], [3, 3, 6, 0]],
    ids=["first alone", "alone", "some", "reversed", "repeated"],
)
def test_a_sample_does_not_depend_on_other_samples_nor_its_place(name, dtype, samples):
    results = run(name, dtype, samples=samples)
    expected = usual(name, dtype)
    assert_same(results, {field: expected[field][samples] for field in OF_SAMPLE}, OF_SAMPLE)
