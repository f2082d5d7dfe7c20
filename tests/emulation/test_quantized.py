# SPDX-License-Identifier: MIT
"""Every kind of plan with quantised results: bits, races, orders of threads, GPUs and bytes."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from cunorm import reference
from tests.emulation.machine import SCHEDULES, gpu, machine, needs_softgpu
from tests.emulation.plans import FORWARD_PLANS, Planned, row_plan_name
from tests.softgpu.counters import counting
from tests.support.operands import DTYPES, assert_same_bits, assert_same_fields, at
from tests.support.quantized import (
    LARGEST,
    QUANTIZED,
    QuantizedCall,
    around,
    conversions,
    midpoints,
    norm_of_ones,
    quantized_call,
)

pytestmark = needs_softgpu

E8M0 = {"scale_dtype": "float8_e8m0fnu"}
BFLOAT16 = dict.fromkeys(("x", "weight"), "bfloat16") | {"stream": "+ bfloat16"}
VARIANTS: dict[str, dict[str, Any]] = {
    "rows": {},
    "rows, powers of two": E8M0 | {"q": "float8_e5m2"},
    "rows of bfloat16, bounded": BFLOAT16 | {"absmax_bound": 1.5, "return_y": False},
    "given": {"given_scale": 0.02, "q": "float8_e5m2", "return_y": False},
    "given for rows, int8": {"given_scale": "rows", "q": "int8"},
    "MXFP8": E8M0 | {"block": 32},
    "blocks of 64, int8": {"block": 64, "q": "int8", "return_y": False},
    "blocks of 128 of bfloat16": BFLOAT16 | {"block": 128},
    # Elements behind the row would be large.
    "rows far from zero": {"weight": None, "bias": None, "far": True},
    "blocks far from zero": {"weight": None, "bias": None, "far": True, "block": 64, "q": "int8"},
    "blocks of 128, gated": {"block": 128, "gate": "bfloat16", "center": False},
}


def has_blocks(plan: str) -> bool:
    """Return whether a plan's rows may have scales of blocks."""
    planned = FORWARD_PLANS[plan]
    return planned.width % 4 == 0 and planned.case.get("x") != "float64"


PAIRS = [
    (plan, variant)
    for plan, variant in product(FORWARD_PLANS, VARIANTS)
    if has_blocks(plan) or "block" not in VARIANTS[variant]
]
IN_CI = {
    *(("4 threads a row", "rows"), ("8 threads a row", "given for rows, int8")),
    *(("8 threads a row, of packs", "MXFP8"), ("16 threads a row", "rows of bfloat16, bounded")),
    *(("a warp a row", "blocks of 128 of bfloat16"), ("a block of 64 a row", "rows")),
    *(("a block of 96 a row", "blocks of 64, int8"), ("a block of 160 a row", "given")),
    *(("a block of 320 a row", "blocks of 128, gated"), ("streamed", "rows of bfloat16, bounded")),
    *(("streamed", "MXFP8"), ("a cluster of 4", "rows, powers of two")),
    *(("a cluster of 4", "blocks of 128 of bfloat16"), ("a cluster of 16", "rows")),
    *(("streamed in a cluster", "rows, powers of two"), ("a warp a row", "blocks far from zero")),
    *(("8 threads a row, of packs", "rows far from zero"), ("streamed", "blocks far from zero")),
}
assert {*PAIRS} >= IN_CI and {variant for _, variant in IN_CI} == {*VARIANTS}


def pairs(in_ci: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("plan", "variant"),
        [
            pytest.param(*pair, marks=() if pair in in_ci else pytest.mark.exhaustive)
            for pair in PAIRS
        ],
    )


def call(plan: str, variant: str) -> tuple[Planned, QuantizedCall]:
    """Return a call whose middle row has a NaN, and whose first row is of zeros."""
    planned = Planned("row_norm_forward", plan)
    usual = {"center": True, "stream": "+ float32", "bias": "float32"}
    case = usual | VARIANTS[variant] | planned.case
    made = quantized_call(case, gpu())
    x = made.norm.inputs["x"].host.reshape(-1, case["shape"][-1])
    x[len(x) // 2, -1] = np.nan
    x[0] = 0
    return planned, made


@pairs(IN_CI)
def test_every_kind_of_plan_has_the_right_bits_and_no_races(plan, variant):
    planned, made = call(plan, variant)
    with planned.machine(few=1, races=True, copies="late", schedule="random") as launches:
        made.check()
    names = [row_plan_name(launch) for launch in launches]
    assert names[0] == names[1], "the norm alone has other teams, so its y has other bits"
    if VARIANTS[variant].keys().isdisjoint({"x", "gate", "weight"}):
        assert names[1] == planned.rows.launch


IN_EVERY_ORDER = {
    *(("8 threads a row", "rows, powers of two"), ("a block of 96 a row", "rows")),
    *(("streamed", "blocks of 128 of bfloat16"), ("a cluster of 4", "rows")),
}


@pairs(IN_EVERY_ORDER)
def test_results_are_the_same_in_every_order_of_threads(plan, variant):
    planned, made = call(plan, variant)
    with planned.machine(few=1):
        expected = made.check()
    for order, settings in SCHEDULES.items():
        with at(order), planned.machine(few=1, **settings):
            assert_same_fields(made.run(), expected)


# --- GPUs -----------------------------------------------------------------------------------------

CAPABILITIES = (75, 80, 86, 89, 90, 100)
ON_EVERY_GPU = {("bfloat16", "float8_e4m3fn"), ("float16", "float8_e5m2")}
ON_EVERY_GPU |= {("float32", "float8_e4m3fn")}


@pytest.mark.parametrize(
    ("y", "q"),
    [
        pytest.param(*pair, marks=() if pair in ON_EVERY_GPU else pytest.mark.exhaustive)
        for pair in product(DTYPES, QUANTIZED)
    ],
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_gpu_makes_the_same_codes(capability, y, q):
    """Below compute capability 8.9, integer code replaces the instruction.

    Float32 has no normal inverse of 3e38, by which only int8 multiplies, and no finite quotients of
    most numbers by 2^-126.
    """
    for scale in (0.3, 1.0, 1.7 * 2.0**-126, 2.0**126 if q == "int8" else 3e38):
        values = conversions(y, q, scale)
        with machine(capability=capability):
            got, found, _ = norm_of_ones(gpu(), values, dtype=q, scale=scale)
        with at(scale):
            assert_same_bits(got, reference.quantize(found, dtype=q, scale=scale)[0])


@pytest.mark.parametrize(
    ("y", "q", "block"),
    [
        pytest.param(*case, marks=() if case[2] == 32 else pytest.mark.exhaustive)
        for case in product(("float32", "bfloat16", "float16"), QUANTIZED, (None, 32, 128))
    ],
)
def test_quotients_by_scales_that_are_found_have_the_right_codes(y, q, block):
    """In row i the largest number is (1 + i / 512) times LARGEST: every 9 bits of a scale occur.

    Each row has all midpoints times its scale, as near as y's dtype allows. If y can be so large,
    there are also scales of which 2**-24 / scale, a part of their inverse, is subnormal.
    """
    middles = around(midpoints(q)[:-1], np.dtype(np.float32))
    middles = np.concatenate([middles, -middles])
    columns = block or 1024
    rows = np.resize(middles, (512, 1024)).reshape(512, -1, columns).copy()
    rows[..., 0] = LARGEST[q]
    for power in (-7,) if y == "float16" else (-7, 110):
        scales = 2.0**power * (1 + np.arange(512) / 512)
        values = (rows.reshape(512, 1024) * scales[:, None]).astype(DTYPES[y])
        with machine(), at(power):
            got, found, _ = norm_of_ones(gpu(), values, dtype=q, block=block)
            assert_same_bits(got, reference.quantize(found, dtype=q, block=block)[0])


def test_a_block_of_columns_has_a_warp_even_if_a_thread_has_too_few_registers():
    case = {"x": "float16", "weight": "float16", "bias": "bfloat16", "gate": "bfloat16"}
    case |= {"stream": "+ bfloat16", "gate_position": "pre", "gate_activation": "tanh"}
    with machine():
        quantized_call(case | {"block": 128, "shape": (1, 1, 2, 13316)}, gpu()).check()


# --- bytes ----------------------------------------------------------------------------------------

# With a residual, x and residual are read, the stream and q are written.
MOVED = {"x": 3, "x, residual": 7}
BYTES = (({}, "row"), ({"block": 128}, "blocks"), ({"given_scale": 0.02}, "given"))


@pytest.mark.parametrize("operands", MOVED)
@pytest.mark.parametrize("of_scale", [case for case, _ in BYTES], ids=[name for _, name in BYTES])
def test_a_held_row_of_bfloat16_moves_no_more_bytes_than_it_must(operands, of_scale):
    case = {"x": "bfloat16", "weight": "bfloat16", "shape": (1, 1, 256, 1024), "return_y": False}
    case |= {"stream": "+ bfloat16"} if operands == "x, residual" else {}
    made, moved = quantized_call(case | of_scale, gpu()).call, 0
    with machine(), counting() as launches:
        made.run()
    for one in launches[0].ranges:
        is_weight = one.begin <= made.inputs["weight"].array.data.ptr < one.end
        moved += one.distinct_loaded if is_weight else one.loaded + one.stored
    least = MOVED[operands] * 256 * 1024
    assert least <= moved <= 1.02 * least


@pytest.mark.parametrize(
    ("of_scale", "reads"), [({}, 3), ({"block": 128}, 2), ({"given_scale": 1.0}, 2)]
)
def test_a_streamed_row_is_read_once_more_for_its_scale(of_scale, reads):
    case = {"shape": (1, 1, 2, 40_004), "out": ("q",), "return_y": False}
    made = quantized_call(case | of_scale, gpu()).call
    with machine(), counting() as launches:
        made.run()
    x, q = (launches[0].range_at(one.array.data.ptr) for one in (made.inputs["x"], made.out.q))
    size = 2 * 40_004
    assert (x.loaded, x.stored) == (4 * size * reads, 0)
    assert (q.loaded, q.stored) == (0, size)
