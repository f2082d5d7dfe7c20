# SPDX-License-Identifier: MIT
"""On a CPU, results do not depend on the plan.

All cores may share a long row or samples, a short row may be one run, results may bypass the
caches, and a build may keep computed values until the last pass.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import cunorm
from tests.support.cases import call_of
from tests.support.described import clear_all, loaded_builds, with_empty_caches
from tests.support.gpu_arrays import OnNumpy
from tests.support.internals import _build, _cpu_plan, _group_plan, compiler, thread_count
from tests.support.operands import assert_same_bits, assert_same_fields, at, draw
from tests.support.placed import Samples
from tests.support.quantized import quantized_call

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

MANY = 16  # rows, too many to be shared
# A part has PART columns; in a centred forward, the first has FIRST. In both cases, some width ends
# with a whole part, some with one column after a whole part, some with one after a shorter part.
FIRST, PART = 112 * 64, 128 * 64
OTHER_WIDTHS = (3 * PART, 2 * PART + 1, 2 * PART + 116 * 64 + 1)
WIDTHS = (FIRST + 2 * PART, FIRST + 2 * PART + 1, FIRST + PART + 116 * 64 + 1, *OTHER_WIDTHS)
PRE = {"gate": "float16", "gate_position": "pre", "stream": "+ float16"}
POST = {"gate": "float32", "center": True, "stream": "+ float32"}
CASES = {
    "rms, a gate before, a stream": dict.fromkeys(("x", "dy", "d_residual"), "float16") | PRE,
    "centred, a gate after, a stream": {"d_residual": "float32", **POST},
    "centred, float64": {"x": "float64", "dy": "float64", "center": True},
}
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    with_empty_caches(monkeypatch)


def forward(name, rows, width, **more):
    """Return a call on rows: the first columns have another mean, the last are larger."""
    case = CASES[name] | {"shape": (1, 1, rows, width)} | more
    call = call_of("row_norm_forward", case, OnNumpy())
    x = call.inputs["x"].host
    x[..., :64] += x.dtype.type(1000)
    x[..., 2 * PART :] *= x.dtype.type(3)
    return call


def backward(name, rows, width, **more):
    case = CASES[name] | {"shape": (1, 1, rows, width)} | more
    return call_of("row_norm_backward", case, OnNumpy())


def is_shared():
    return bool(loaded_builds("SHARED_ROWS"))


@every_case
def test_a_long_row_alone_gives_the_bits_that_it_gives_among_many(name):
    for width in WIDTHS:
        among_many = forward(name, MANY, width).run()
        assert is_shared() == (width != WIDTHS[0])  # builds for earlier widths stay loaded
        for picked in ([0], [2, 0, 1]):
            alone = forward(name, MANY, width, picked=picked).run()
            for field, array in alone._asdict().items():
                if array is not None:
                    expected = getattr(among_many, field).reshape(MANY, -1)[picked]
                    assert_same_bits(array.reshape(expected.shape), expected, field)
    assert is_shared()


@pytest.mark.parametrize(("make", "rows", "over"), [(forward, 2, "all"), (backward, 3, "dy")])
@every_case
def test_shared_rows_are_right_and_may_be_written_over_their_inputs(name, make, rows, over):
    expected = make(name, rows, WIDTHS[1]).check()
    assert is_shared()
    assert_same_fields(make(name, rows, WIDTHS[1], in_place=over).run(), expected)


@every_case
def test_gradients_of_shared_rows_have_the_bits_of_rows_that_are_not_shared(name, monkeypatch):
    sizes = [(rows, width) for width in OTHER_WIDTHS for rows in (1, 3)]
    shared = [backward(name, *size).run() for size in sizes]
    assert is_shared()
    monkeypatch.setattr(_cpu_plan, "CPU_SHARED_ROWS", 0)
    clear_all()
    for (rows, width), expected in zip(sizes, shared, strict=True):
        found = backward(name, rows, width).run()
        if rows > 1:  # without sharing, several rows of partial sums are added up
            found, expected = (one._replace(dweight=None, dbias=None) for one in (found, expected))
        assert_same_fields(found, expected)
    assert not is_shared()


def test_a_gradient_of_shared_rows_is_the_same_alone_and_among_others():
    name = "centred, a gate after, a stream"
    expected = backward(name, 2, WIDTHS[1]).run()
    for need in ("weight", "gate"):
        result = backward(name, 2, WIDTHS[1], needs=(need,)).run()
        assert_same_bits(getattr(result, f"d{need}"), getattr(expected, f"d{need}"), need)


def test_groups_of_shared_rows_give_the_bits_of_separate_rows():
    width = FIRST + 5 * PART + 1
    x, weight = draw("x", (2, 3 * width), "float32"), draw("weight", (3 * width,), "float32")
    result = cunorm.layer_norm_forward(x, weight, groups=3)
    assert is_shared()
    for group in range(3):
        own = np.ascontiguousarray(x.reshape(2, 3, width)[:, group])
        alone = cunorm.layer_norm_forward(own, weight[group * width :][:width])
        assert_same_bits(result.y.reshape(2, 3, width)[:, group], alone.y, "y")
        assert_same_bits(result.rstd[:, group], alone.rstd, "rstd")


def test_shared_rows_ignore_the_number_of_threads():
    x, before = draw("x", (2, FIRST + 34 * PART), "float32"), thread_count()
    weight, found = x[0], []
    try:
        for threads in (before, 1, 2, 5):
            cunorm.set_num_threads(threads)
            f = cunorm.layer_norm_forward(x, weight, weight)
            given = {"weight": weight, "bias": weight, "mean": f.mean, "rstd": f.rstd}
            found.append((f, cunorm.layer_norm_backward(x, x, **given)))
    finally:
        cunorm.set_num_threads(before)
    assert is_shared()
    for results in found[1:]:
        for fields, expected in zip(results, found[0], strict=True):
            assert_same_fields(fields, expected)


@pytest.mark.parametrize("center", [False, True])
def test_rows_that_end_near_the_end_of_a_part_are_right(center):
    """A missing or superfluous part would change the sums; results are written nowhere else."""
    case = {"center": center, "weight": None, "bias": None}
    ends = (n * PART - at for n in (3, 4, 9) for at in (0, 1024))
    for width, more in product(ends, (-65, -1, 0, 1)):
        sized = case | {"shape": (1, 1, 1, width + more)}
        with at(width + more):
            call_of("row_norm_forward", sized, OnNumpy()).check()
    assert is_shared()


@pytest.mark.parametrize(
    ("center", "width"),
    [(False, 5 * PART), (False, 5 * PART - 1024 + 72), (True, 5 * PART - 2048 + 72)],
)
def test_blocks_of_columns_of_a_long_row_alone_have_the_right_bits(center, width):
    """Each of the two last widths ends with a part of 8 columns, which are in the block before."""
    case = {"center": center, "weight": None, "block": 128, "return_y": False}
    before = thread_count()
    try:
        cunorm.set_num_threads(2)
        quantized_call(case | {"shape": (1, 1, 1, width)}, OnNumpy()).check()
    finally:
        cunorm.set_num_threads(before)
    assert is_shared()


# --- rows of one run ------------------------------------------------------------------------------

# Rows of one run have up to eight packs of 16, 32 or 64 columns.
RUNS, NO_RUNS = (16, 112, 96, 64, 512), (8, 72, 144, 576)


@pytest.mark.parametrize("width", [*RUNS, *NO_RUNS])
@every_case
def test_short_rows_are_right_whether_or_not_they_are_one_run(name, width):
    for make in (forward, backward):
        make(name, 9, width).check()
        assert bool(loaded_builds("ONE_RUN")) == (width in RUNS)


# --- results that bypass the caches ---------------------------------------------------------------


# Rows are whole lines of the caches: three of cut packs, two of one run.
SIZES_IN_LINES = [("float32", 528), ("float16", 544), ("bfloat16", 544)]
SIZES_IN_LINES += [("float32", 112), ("bfloat16", 96)]


@pytest.mark.parametrize(("x", "width"), SIZES_IN_LINES)
@pytest.mark.parametrize("offset", [0, 8, 1])
def test_results_that_bypass_the_caches_have_the_same_bits(x, width, offset, monkeypatch):
    case = {"x": x, "dy": x, "shape": (1, 1, 17, width), "offset": offset, "center": True}
    calls = {"row_norm_forward": ("y",), "row_norm_backward": ("dx",)}

    def results():
        return [
            call_of(name, case | {"given": given}, OnNumpy()).run() for name, given in calls.items()
        ]

    expected = results()
    assert not loaded_builds("NON_TEMPORAL")
    monkeypatch.setattr(_build, "_LARGE", 0)
    clear_all()
    for fields, kept in zip(results(), expected, strict=True):
        assert_same_fields(fields, kept)
    assert len(loaded_builds("NON_TEMPORAL")) == len(calls)


# --- kept rows ------------------------------------------------------------------------------------

# With a pre-gate: rows that both directions keep, that only a forward keeps, that neither keeps.
KEPT_WIDTHS = (1000, (1 << 14) + 1, (1 << 15) + 1)


def keeping(direction):
    """Return a set: whether the loaded builds of a direction keep packs (True), or not (False)."""
    builds = loaded_builds("PRE_GATE")
    macros = [dict(b.macros) for b in builds if b.kernel == f"row_norm_{direction}"]
    return {"HELD_PACKS" in names for names in macros}


@pytest.mark.parametrize("position", ["pre", "post"])
def test_results_do_not_depend_on_kept_values(position, monkeypatch):
    case = dict.fromkeys(("x", "dy", "weight", "gate"), "bfloat16") | {"gate_position": position}

    def results():
        for width, direction in product(KEPT_WIDTHS, ("forward", "backward")):
            # Up to 4 rows are read at once, and 17 is no multiple of 4.
            sized = case | {"bias": None, "shape": (1, 1, 17, width)}
            yield call_of(f"row_norm_{direction}", sized, OnNumpy()).run()

    kept = list(results())
    assert keeping("backward") == {True, False}
    assert keeping("forward") == ({True, False} if position == "pre" else {False})
    monkeypatch.setattr(_cpu_plan, "_KEPT_BYTES", 0)
    with_empty_caches(monkeypatch)
    for fields, computed in zip(kept, results(), strict=True):
        assert_same_fields(fields, computed)
    assert keeping("backward") == keeping("forward") == {False}


def test_rows_of_float64_sums_are_not_kept():
    x, gate = draw("x", (2, 64), "float64"), draw("gate", (2, 64), "bfloat16")
    cunorm.rms_norm(x, gate=gate, gate_position="pre")
    assert keeping("forward") == {False}


# --- kept activations of groups -------------------------------------------------------------------

# Samples, positions, channels, groups, whether channels are last in memory. In the first list,
# cores have samples or groups of their own; in the second list, all cores share samples.
KEPT_GROUPS = [(20, (31,), 40, 8, True), (4, (600,), 16, 4, False), (1, (33,), 15, 5, False)]
HANDED_GROUPS = [(1, (700,), 72, 4, True), (3, (301,), 128, 2, True), (1, (4900,), 8, 2, False)]


def group_calls(sizes):
    case = {"x": "bfloat16", "dy": "bfloat16", "activation": "silu"}
    for size in sizes:
        yield call_of("group_norm_backward", case | {"samples": Samples(*size, -1)}, OnNumpy())


@pytest.mark.parametrize(
    ("macro", "bound", "sizes"),
    [("KEPT_H", "_CPU_KEPT_H", KEPT_GROUPS), ("HANDED_H", "_CPU_HANDED_H", HANDED_GROUPS)],
)
def test_gradients_of_groups_do_not_depend_on_kept_values(macro, bound, sizes, monkeypatch):
    kept = [call.check() for call in group_calls(sizes)]
    assert loaded_builds(macro) == loaded_builds("CHANNELS_LAST")
    monkeypatch.setattr(_group_plan, bound, 0)
    clear_all()
    for fields, call in zip(kept, group_calls(sizes), strict=True):
        assert_same_fields(call.run(), fields)
    assert not loaded_builds(macro)


def test_no_chunk_hands_on_more_than_its_memory_has_room_for():
    x, weight = draw("x", (5, 9000, 48), "bfloat16"), draw("weight", 48, "float32")
    norm = {"num_groups": 4, "weight": weight, "activation": "silu"}
    found = cunorm.group_norm_forward(x, **norm)
    size = cunorm.workspace_size("group_norm_backward", x, weight, num_groups=4)
    memory = np.full(size + (8 << 20), 0xFF, np.uint8)
    statistics = {"mean": found.mean, "rstd": found.rstd}
    cunorm.group_norm_backward(x, x, **norm, **statistics, workspace=memory[:size])
    assert loaded_builds("HANDED_H")
    assert (memory[size:] == 0xFF).all()
