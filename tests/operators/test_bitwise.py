# SPDX-License-Identifier: MIT
"""A row's results depend on that row alone, to the bit; parameter gradients on shapes alone."""

from typing import Any, NamedTuple

import numpy as np
import pytest

import cunorm
from cunorm import NormForward, NormGrads
from cunorm._cpu import compiler
from cunorm._layout import collapsed
from tests.support.described import loaded_builds, stores_past_caches, with_empty_caches
from tests.support.operands import DTYPES, assert_same_bits, at, draw, optional

ROWS = 37
WIDTHS = (1, 7, 33, 64, 129, 1000, 5003, 20480)
ROW_OPERANDS = ("x", "residual", "dy", "d_residual", "gate")
ROW_RESULTS = ("y", "residual", "mean", "rstd", "dx", "dgate")
# What a layer norm is told besides: no gate, a gate, groups of columns, or both.
PLAIN: dict[str, Any] = {}
GROUPS = {"groups": 3, "weight_offset": 1.0}
PRE = {"gate_activation": "gelu", "gate_position": "pre"}
POST = {"gate_activation": "silu", "gate_position": "post", "round_before_weight": True}
norms = pytest.mark.parametrize(
    ("dtype", "norm"),
    [
        pytest.param("float16", PLAIN, id="float16"),
        pytest.param("bfloat16", PLAIN, id="bfloat16"),
        pytest.param("float32", PLAIN, id="float32"),
        pytest.param("float32", PRE, id="float32, pre-gate"),
        pytest.param("float16", PRE | GROUPS, id="float16, pre-gate, groups"),
        pytest.param("bfloat16", POST | GROUPS, id="bfloat16, post-gate, groups"),
    ],
)


class Results(NamedTuple):
    y: np.ndarray
    residual: np.ndarray
    mean: np.ndarray
    rstd: np.ndarray
    dx: np.ndarray
    dweight: np.ndarray
    dbias: np.ndarray
    dgate: np.ndarray | None


def draw_rows(width, dtype, norm=PLAIN, rows=ROWS):
    shape = (rows, width * norm.get("groups", 1))
    return {name: draw(name, shape, dtype) for name in ROW_OPERANDS}


def draw_parameters(width, dtype):
    return [optional(name, width, dtype) for name in ("weight", "bias")]


def run(rows, norm=PLAIN, out=None, sums=None, parameters=None):
    """Layer norm with everything, forward and backward.

    `out` makes an array for the result of a name, and `sums` has arrays to which dweight and dbias
    are added.
    """
    weight, bias = parameters or draw_parameters(rows["x"].shape[-1], str(rows["x"].dtype))
    out = out or (lambda name: None)
    given = dict(norm)
    if "gate_position" in norm:
        given["gate"] = rows["gate"]
    forward = cunorm.layer_norm_forward(
        rows["x"], weight, bias, residual=rows["residual"], out=NormForward(y=out("y")), **given
    )
    grads = NormGrads(dx=out("dx"), dgate=out("dgate") if "gate" in given else None)
    if sums is not None:
        grads = grads._replace(**sums)
    grads = cunorm.layer_norm_backward(
        rows["dy"],
        forward.residual,
        weight,
        bias,
        rstd=forward.rstd,
        mean=forward.mean,
        d_residual=rows["d_residual"],
        out=grads,
        accumulate=sums is not None,
        **given,
    )
    return Results(*forward, grads.dx, grads.dweight, grads.dbias, grads.dgate)


def assert_same(actual, expected, fields=Results._fields, rows=slice(None)):
    """Compare results; `rows` of what is expected where they are those of x."""
    for name in fields:
        one, other = getattr(actual, name), getattr(expected, name)
        if other is None:
            assert one is None
        else:
            assert_same_bits(one, other[rows] if name in ROW_RESULTS else other, name)


# --- rows -----------------------------------------------------------------------------------------


@norms
def test_results_ignore_the_order_number_and_position_of_rows(dtype, norm):
    for width in WIDTHS:
        rows = draw_rows(width, dtype, norm)
        expected = run(rows, norm)
        order = np.random.default_rng(width).permutation(ROWS)
        for chosen in (order, order[:1], order[:2], np.arange(ROWS)[5:22], np.tile(order, 9)):
            part = run({name: array[chosen] for name, array in rows.items()}, norm)
            with at(f"width {width}", f"{len(chosen)} rows"):
                assert_same(part, expected, ROW_RESULTS, chosen)


@pytest.mark.parametrize(
    ("dtype", "norm"),
    [("bfloat16", PLAIN), ("float32", PLAIN), ("float32", POST)],
    ids=["bfloat16", "float32", "float32, post-gate"],
)
@pytest.mark.skipif(compiler() is None, reason="without a compiler nothing is stored past caches")
def test_results_do_not_show_that_large_ones_are_stored_past_the_caches(dtype, norm, monkeypatch):
    """More than 32 MiB of results, whose build stores them otherwise than that of a few rows."""
    width, few = 1024, slice(300, 340)
    rows = draw_rows(width, dtype, norm, rows=17000 if dtype == "bfloat16" else 8500)
    with_empty_caches(monkeypatch)
    expected = run(rows, norm)
    assert all(stores_past_caches(build) for build in loaded_builds("X_T"))
    part = run({name: array[few] for name, array in rows.items()}, norm)
    assert not all(stores_past_caches(build) for build in loaded_builds("X_T"))
    assert_same(part, expected, ROW_RESULTS, few)


@norms
def test_a_groups_results_are_those_of_it_alone(dtype, norm):
    together, alone = norm | {"groups": 3}, norm | {"groups": 1}
    for width in WIDTHS:
        rows = draw_rows(width, dtype, together)
        parameters = draw_parameters(3 * width, dtype)
        expected = run(rows, together, parameters=parameters)
        for group in range(3):
            own = slice(group * width, (group + 1) * width)
            part = run(
                {name: array[:, own] for name, array in rows.items()},
                alone,
                parameters=[parameter[own] for parameter in parameters],
            )
            with at(f"width {width}", f"group {group}"):
                assert_same(part, of_group(expected, group, own))


def of_group(results, group, own):
    """Return the results of one group, in its own columns."""
    statistics = {name: getattr(results, name)[:, group] for name in ("mean", "rstd")}
    others = {n: getattr(results, n) for n in Results._fields if n not in statistics}
    sliced = {n: None if array is None else array[..., own] for n, array in others.items()}
    return Results(**statistics, **sliced)


# --- memory ---------------------------------------------------------------------------------------


def shifted(array, offset):
    """Return a copy that begins some elements after an address of the greatest alignment."""
    memory = np.zeros(array.size + 128, array.dtype)
    start = -memory.ctypes.data % 64 // array.itemsize + offset
    view = memory[start : start + array.size].reshape(array.shape)
    view[...] = array
    return view


@norms
def test_results_ignore_alignment(dtype, norm):
    for width in WIDTHS:
        rows = draw_rows(width, dtype, norm)
        expected = run(rows, norm)
        for offset in (0, 1, 2, 3, 5, 8, 16, 31):
            moved = {name: shifted(array, offset) for name, array in rows.items()}
            out = np.zeros(rows["x"].shape, DTYPES[dtype])
            there = run(moved, norm, lambda name, out=out, by=offset + 1: shifted(out, by))
            with at(f"width {width}", f"offset {offset}"):
                assert_same(there, expected)


@norms
def test_results_ignore_that_they_are_written_over_inputs(dtype, norm):
    for width in WIDTHS:
        rows = draw_rows(width, dtype, norm)
        expected = run(rows, norm)
        for over in ("gate", "dy"), ("d_residual", "gate"), ("dy", "d_residual"):
            given = {name: array.copy() for name, array in rows.items()}
            places = {"y": given["x"]} | dict(
                zip(("dx", "dgate"), map(given.get, over), strict=True)
            )
            with at(f"width {width}", f"dx over {over[0]}"):
                assert_same(run(given, norm, places.get), expected)


VIEWS = {
    "padded": lambda array: np.pad(array, ((0, 0), (3, 2)))[:, 3:-2],
    "every other row": lambda array: np.repeat(array, 2, axis=0)[::2],
    "reversed": lambda array: array[::-1].copy()[::-1],
    "columns first": lambda array: np.asfortranarray(array),
    "unaligned": lambda array: (
        np.frombuffer(b" " + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)
    ),
}


@norms
@pytest.mark.parametrize("view", VIEWS)
def test_results_ignore_strides(view, dtype, norm):
    for width in WIDTHS:
        rows = draw_rows(width, dtype, norm)
        viewed = {name: VIEWS[view](array) for name, array in rows.items()}
        with at(f"width {width}"):
            assert_same(run(viewed, norm), run(rows, norm))


@norms
def test_results_ignore_that_rows_are_expanded(dtype, norm):
    for width in WIDTHS:
        rows = draw_rows(width, dtype, norm)
        expanded = {n: np.broadcast_to(rows[n][3], rows[n].shape) for n in ("x", "dy", "gate")}
        copied = {name: array.copy() for name, array in (rows | expanded).items()}
        with at(f"width {width}"):
            assert_same(run(rows | expanded, norm), run(copied, norm))


LEVELS = {
    2: lambda array: array[:, :, :, :4],
    3: lambda array: array.transpose(2, 0, 1, 3, 4),
    4: lambda array: array.transpose(3, 1, 0, 2, 4),
}


@pytest.mark.parametrize("norm", [PLAIN, PRE, POST | GROUPS], ids=["plain", "pre", "groups"])
@pytest.mark.parametrize("levels", LEVELS)
def test_results_ignore_how_many_strides_walk_the_rows(levels, norm):
    """A slice of a fused qkv has two strides, transposed three; of four, there is a copy.

    Groups are one more.
    """
    full = {name: draw(name, (2, 3, 2, 5, 2, 33), "float32") for name in ROW_OPERANDS}
    rows = {name: LEVELS[levels](array[..., 1, :]) for name, array in full.items()}
    strides = tuple(stride // 4 for stride in rows["x"].strides[:-1])
    assert len(collapsed(rows["x"].shape[:-1], strides)) == levels
    assert_same(run(rows, norm), run({name: array.copy() for name, array in rows.items()}, norm))


# --- threads and repetition -----------------------------------------------------------------------


@pytest.fixture
def default_threads():
    yield
    cunorm.set_num_threads(None)


def with_sums(rows, norm):
    """Run with dweight and dbias added to arrays, the same ones each time."""
    shape = rows["x"].shape[-1:]
    return run(
        rows, norm, sums={name: draw(name, shape, "float32") for name in ("dweight", "dbias")}
    )


@norms
@pytest.mark.parametrize(("rows", "width"), [(3000, 257), (20, 5003), (1000, 64), (4, 70000)])
def test_results_do_not_depend_on_the_number_of_threads(dtype, norm, rows, width, default_threads):
    operands = draw_rows(width, dtype, norm, rows)
    cunorm.set_num_threads(1)
    expected, added = run(operands, norm), with_sums(operands, norm)
    for threads in (2, 3, 7):
        cunorm.set_num_threads(threads)
        with at(f"{threads} threads"):
            assert_same(run(operands, norm), expected)
            assert_same(with_sums(operands, norm), added)


@pytest.mark.parametrize("norm", [PLAIN, POST | GROUPS], ids=["plain", "post-gate, groups"])
def test_results_are_the_same_every_time(norm):
    operands = draw_rows(257, "float32", norm, 3000)
    expected, added = run(operands, norm), with_sums(operands, norm)
    for _ in range(10):
        assert_same(run(operands, norm), expected)
        assert_same(with_sums(operands, norm), added)
