# SPDX-License-Identifier: MIT
"""Contiguous arrays with a new number of rows reuse a plan, without any change of results."""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import product
from struct import unpack_from

import numpy as np
import pytest

import cunorm
from tests.support.calls import (
    NORMS,
    assert_same,
    call_of,
    call_uncached,
    kinds,
    strides_of,
    to,
)
from tests.support.gpus import ARCHITECTURES, limits_of
from tests.support.internals import (
    ROW_BACKWARD,
    ROW_FORWARD,
    CpuCaps,
    _cpu,
    _dispatch,
    _loading,
    contiguous_plan,
)
from tests.support.operands import at, draw

every_norm = pytest.mark.parametrize("name", NORMS)
every_kind = pytest.mark.parametrize(
    "kind", ["numpy", "torch", pytest.param("cupy", marks=pytest.mark.gpu)]
)


# --- results --------------------------------------------------------------------------------------


@every_norm
@every_kind
def test_a_new_number_of_rows_is_not_planned_and_has_the_results_of_its_own_plan(
    name, kind, planned
):
    """Results are allocated, or written to given arrays."""
    first = call_of(name, (40, 72), kind)
    first.make()
    first.run(without="workspace")
    for shape in ((41, 72), (16, 72), (100, 72), (17, 72)):
        call, count = call_of(name, shape, kind), len(planned)
        found, written = call.make(), call.run(without="workspace")
        assert len(planned) == count
        with at(shape):
            assert_same(found, call_uncached(call.make))
            for again in (written, call.make()):
                assert_same(again, found)


@every_kind
def test_leading_axes_groups_and_row_axes_give_the_results_of_their_own_plan(kind, planned):
    for options, width in (({"groups": 3}, 72), ({"axis": -2}, 24)):
        for shape in ((5, 7, 3, width), (2, 9, 3, width), (1, 40, 3, width), (4, 1, 3, width)):
            call = call_of("l2_norm_forward", shape, kind, **options)
            assert_same(call.make(), call_uncached(call.make))


def test_an_output_that_overlaps_an_input_is_an_error_for_each_number_of_rows():
    memory = np.ones(90 * 72, np.float32)
    for rows in (40, 41, 42, 30):
        x, *overlapping, apart = (
            memory[first * 72 :][: rows * 72].reshape(rows, 72) for first in (0, 1, rows - 1, rows)
        )
        for out in (x, apart):
            assert cunorm.rms_norm(x, out=out) is out
        for out in overlapping:
            with pytest.raises(ValueError, match=r"^rms_norm: out overlaps x, "):
                cunorm.rms_norm(x, out=out)


def test_a_cpu_has_the_blocks_and_the_workspace_of_each_number_of_rows(planned, monkeypatch):
    sizes, take = [], _cpu.take

    def take_filled(size):
        sizes.append(size)
        piece = take(max(size, 1 << 20))
        piece.array.fill(np.nan)
        return piece

    monkeypatch.setattr(_cpu, "take", take_filled)
    call_of("layer_norm_backward", (40, 72)).make()
    for rows in (1000, 41, 2000):
        call, count = call_of("layer_norm_backward", (rows, 72)), len(planned)
        found = call.make()
        assert len(planned) == count
        assert_same(found, call_uncached(call.make))
        assert sizes[-2] == sizes[-1]
    assert len({*sizes}) == 3


# --- what does not fit ----------------------------------------------------------------------------


def test_other_dtypes_make_another_plan_and_wrong_shapes_are_refused(planned):
    """Wrong arrays are errors, even after a valid call with another number of rows.

    Another operand of the call is a wrong array, too, if its shape differs. A weight or bias may
    have x's shape, but not the shape of another call's x.
    """
    first = call_of("layer_norm_backward", (40, 72))
    first.make()
    first.make(weight=first.arrays["x"], bias=first.arrays["x"])
    call = call_of("layer_norm_backward", (41, 72))
    arrays = {key: one for key, one in call.arrays.items() if isinstance(one, np.ndarray)}
    for key, array in arrays.items():
        others = [other for other in arrays.values() if other.shape != array.shape]
        if key in ("weight", "bias"):
            others = [other[:-1] for other in others]
        for wrong in (array[:-1].copy(), np.concatenate([array, array]), array[..., None], *others):
            with pytest.raises(ValueError, match=r"^layer_norm_backward: \w+ has shape "):
                call.make(**{key: wrong})
    assert_same(call.make(), call_uncached(call.make))
    in_float64 = {key: call.arrays[key].astype(np.float64) for key in ("weight", "dy")}
    assert_same(call.make(**in_float64), call_uncached(lambda: call.make(**in_float64)))


def test_with_a_square_x_no_parameter_is_mistaken_for_a_statistic(planned):
    """If x is 72 by 72, weight and rstd have the same shape; if x is 40 by 72, they do not."""
    for rows in (72, 40, 72, 41):
        call = call_of("layer_norm_forward", (rows, 72))
        found = call.make()
        assert found.rstd.shape == (rows,)
        assert_same(found, call_uncached(call.make))


@kinds  # not CuPy, which gives an axis of one element its stride in C order
def test_strides_along_an_axis_of_one_element_do_not_count_for_other_rows(kind, planned):
    array = to(kind, draw("x", (1, 40, 24), "float32"))
    odd, even = array.swapaxes(0, 1), array.reshape(20, 2, 24)
    assert strides_of(odd) != strides_of(array.reshape(40, 1, 24))
    for x in (even, odd, even[:10], odd[:30]):
        assert_same(cunorm.rms_norm(x), call_uncached(cunorm.rms_norm, x))


@pytest.mark.gpu
def test_misaligned_rows_have_a_plan_of_their_own(planned):
    for offset, rows in product((0, 1, 2, 4), (40, 41)):
        memory = to("cupy", draw("x", rows * 72 + 4, "float16"))
        x = memory[offset : offset + rows * 72].reshape(rows, 72)
        assert_same(cunorm.rms_norm(x), call_uncached(cunorm.rms_norm, x))


@pytest.mark.parametrize(
    "why", ["no compiler", "no output is wanted", "a copy is read", "a gate has rows"]
)
def test_calls_that_cannot_serve_other_rows_are_not_kept_for_other_rows(why, planned, monkeypatch):
    kept = []
    monkeypatch.setattr(_dispatch, "rows_entry", lru_cache()(lambda *key: kept))
    if why == "no compiler":
        monkeypatch.setattr(_loading, "has_compiler", lambda: False)
    for rows in (40, 41):
        call = call_of("rms_norm_backward", (rows, 72))
        memory = np.zeros(rows * 72 * 4 + 1, np.uint8)
        misaligned = memory[1:].view(np.float32).reshape(rows, 72)
        x = np.ones((rows, 72), np.float32)
        options = {
            "no output is wanted": {"needs": ()},
            "a copy is read": {"x": misaligned},
            "a gate has rows": {"gate": x, "gate_position": "branch", "branch": x},
        }
        call.make(**options.get(why, {}))
    assert len(planned) == 2 and not kept


# --- plans ----------------------------------------------------------------------------------------


CPUS = [CpuCaps(last_cache_bytes=size) for size in (1 << 16, 32 << 20)]
MACHINES = [one for limits in map(limits_of, ARCHITECTURES) for one in (*CPUS, limits)]


@pytest.mark.parametrize("op", [ROW_FORWARD, ROW_BACKWARD], ids=lambda op: op.name)
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_changed_to_other_rows_equals_the_plan_of_those_rows(op, seed):
    rng = random.Random(f"{op.name} {seed}")
    same, other = 0, 0
    for number in range(84):
        plan_of = contiguous_plan(op, rng)
        caps = MACHINES[number % len(MACHINES)]
        rows = rng.sample([*range(2, 20), 255, 256, 257, 4000, 100_003], 5)
        lowered = plan_of(rows[0]).lower(caps, None)
        for count in rows:
            own, sizes = plan_of(count).lower(caps, None), lowered.sizes(count)
            builds = [[one.build for one in low.launches] for low in (own, lowered)]
            if sizes is None:
                assert isinstance(caps, CpuCaps)  # a GPU needs no other builds
                assert builds[0] != builds[1]
                other += 1
                continue
            same += 1
            assert builds[0] == builds[1]
            workspace, calls = sizes
            assert workspace == own.workspace
            each = zip(own.calls(), lowered.calls(), calls, strict=True)
            for expected, before, (grid, work, words) in each:
                assert (grid, work) == (expected.launch.grid, expected.work)
                assert expected.parts == before.parts
                assert expected.args.relocations == before.args.relocations
                assert words_of(expected.args) == words_of(before.args, words)
    assert same > 100
    assert other > 2


def words_of(args, words=None):
    """Return the words of arguments; `words` replace those that depend on the number of rows."""
    found = [*unpack_from(f"<{len(args.data) // 8}q", args.data)]
    for word, value in zip(args.sized, words or [found[word] for word in args.sized], strict=True):
        found[word] = value
    return found
