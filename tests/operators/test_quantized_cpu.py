# SPDX-License-Identifier: MIT
"""A CPU's quantised results: widths of every size, shared rows, threads and instruction sets."""

from __future__ import annotations

import numpy as np
import pytest

import cunorm
from tests.support.described import loaded_builds, with_empty_caches
from tests.support.gpu_arrays import OnNumpy
from tests.support.host_code import needs_a_compiler, runs_here
from tests.support.internals import thread_count
from tests.support.machines import compiled_for
from tests.support.operands import assert_same_bits, assert_same_fields, at
from tests.support.quantized import conversions, norm_of_ones, quantized_call, rounded

pytestmark = needs_a_compiler

BFLOAT16 = {"x": "bfloat16", "weight": "bfloat16"}
# Without a weight, elements behind a row that is far from zero are large if they are not left out.
OF_BLOCKS = {
    "32, e4m3": BFLOAT16 | {"block": 32, "scale_dtype": "float8_e8m0fnu"},
    "64, int8": {
        **{"block": 64, "q": "int8", "absmax_bound": 2.5},
        **{"center": True, "weight": None, "far": True},
    },
    "128, e4m3": BFLOAT16 | {"block": 128},
}


@pytest.mark.parametrize("name", OF_BLOCKS)
def test_blocks_and_packs_that_are_cut_are_right(name):
    for width in range(4, 201, 4):
        case = OF_BLOCKS[name] | {"shape": (1, 1, 3, width), "out": ("q", "scale")}
        call = quantized_call(case | {"layouts": "padded"}, OnNumpy())
        with at(width):
            call.check()


# --- rows that threads share ----------------------------------------------------------------------

# Widths by the number of rows: one ends in a block and a pack that are cut, one has whole parts.
LONG = {1: 100_004, 15: 15 * 128 * 64}
SHARED = {
    "rows": BFLOAT16 | {"stream": "+ bfloat16"},
    "blocks of 128": BFLOAT16 | {"block": 128},
    "centred blocks": {"block": 64, "q": "int8", "center": True},
}


@pytest.fixture
def nothing_loaded(monkeypatch):
    with_empty_caches(monkeypatch)


@pytest.mark.parametrize(("rows", "width"), LONG.items())
@pytest.mark.parametrize(
    "name", ["rows", "blocks of 128", pytest.param("centred blocks", marks=pytest.mark.exhaustive)]
)
def test_threads_that_share_long_rows_find_the_scales_of_whole_rows(
    name, rows, width, nothing_loaded
):
    """In each row the largest element is in another part."""
    call = quantized_call(SHARED[name] | {"shape": (1, 1, rows, width)}, OnNumpy())
    x = call.norm.inputs["x"].host.reshape(rows, width)
    for row in range(rows):
        x[row, (row * 7919 + 50_000) % width] = 100
    call.check()
    assert any(dict(build.macros).get("Q_T") for build in loaded_builds("SHARED_ROWS"))


def test_the_number_of_threads_changes_no_bit():
    before, found = thread_count(), []
    call = quantized_call(SHARED["rows"] | {"shape": (1, 1, 2, 100_004)}, OnNumpy())
    try:
        for threads in (1, 2, 5):
            cunorm.set_num_threads(threads)
            found.append(call.run())
    finally:
        cunorm.set_num_threads(before)
    for result in found[1:]:
        assert_same_fields(result, found[0])


# --- instruction sets -----------------------------------------------------------------------------

CASES = OF_BLOCKS | {
    "rows, e4m3": SHARED["rows"],
    "centred rows, int8": {"q": "int8", "bias": "float32", "center": True, "return_y": False},
    "float64, e5m2": {
        **{"x": "float64", "q": "float8_e5m2", "scale_dtype": "float8_e8m0fnu"},
        "return_y": False,
    },
}
OLDER = ("x86-64-v3", "x86-64")
IN_CI = {("128, e4m3", "x86-64"), ("float64, e5m2", "x86-64-v3"), ("64, int8", "x86-64-v3")}


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        pytest.param(*pair, marks=() if pair in IN_CI else pytest.mark.exhaustive)
        for pair in ((name, machine) for name in CASES for machine in OLDER)
    ],
)
def test_older_instruction_sets_give_the_same_bits(name, machine):
    if not runs_here(machine):
        pytest.skip(f"this machine does not run code for {machine}")
    calls = [
        quantized_call(CASES[name] | {"shape": (1, 1, 4, width)}, OnNumpy())
        for width in (4, 100, 200, 2052)
    ]
    expected = [call.check() for call in calls]
    with compiled_for(machine):
        for call, right in zip(calls, expected, strict=True):
            assert_same_fields(call.check(), right)


ON_OLDER = {("bfloat16", "float8_e4m3fn", "x86-64"), ("float64", "int8", "x86-64-v3")}


@pytest.mark.parametrize(
    ("y", "q", "machine"),
    [
        pytest.param(*case, marks=() if case in ON_OLDER else pytest.mark.exhaustive)
        for case in (
            (y, q, machine)
            for y in ("bfloat16", "float16", "float32", "float64")
            for q in ("float8_e4m3fn", "float8_e5m2", "int8")
            for machine in OLDER
        )
    ],
)
@np.errstate(over="ignore", invalid="ignore")
def test_older_instruction_sets_convert_every_number_of_16_bits_and_every_midpoint(y, q, machine):
    if not runs_here(machine):
        pytest.skip(f"this machine does not run code for {machine}")
    with compiled_for(machine):
        got, found, _ = norm_of_ones(OnNumpy(), conversions(y, q, 0.5), dtype=q, scale=0.5)
    assert_same_bits(got, rounded(found.astype(np.float64) / 0.5, q))
