# SPDX-License-Identifier: MIT
"""What a row, a group or a sample gives depends on it alone, to the bit.

Not on those around it, on alignment, strides, threads or the run; parameter gradients on shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cunorm
from tests.support.described import loaded_builds, stores_past_caches, with_empty_caches
from tests.support.gpu_arrays import GPUS, get_all
from tests.support.internals import collapsed, compiler
from tests.support.operands import assert_same_bits, at, draw, optional

# What a layer norm is told besides, and a group norm: the latter's channels are last or first.
POST = {"gate_activation": "silu", "gate_position": "post", "round_before_weight": True}
PRE = {"gate_activation": "gelu", "gate_position": "pre"}
NORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain, bfloat16": ("bfloat16", {}),
    "plain, float32": ("float32", {}),
    "pre-gate and groups, float16": ("float16", PRE | {"groups": 3, "weight_offset": 1.0}),
    "post-gate and groups, bfloat16": ("bfloat16", POST | {"groups": 3}),
    "group norm, last": ("float32", {"num_groups": 8, "channel_axis": -1, "activation": "silu"}),
    "group norm, first": ("float32", {"num_groups": 4, "channel_axis": 1, "activation": "silu"}),
}
norms = pytest.mark.parametrize("name", NORMS)
pytestmark = pytest.mark.compiled("O1")
# Of rows; of group norms, the shape of a sample: of one launch on a CPU or of three, of several
# samples at a time, in chunks, whole lines, packs of them.
WIDTHS = [(1,), (33,), (1000,), (5003,), (20480,)]
SAMPLES = {"last": [(300, 40), (700, 256), (4900, 72)], "first": [(40, 31), (72, 4900)]}
GPU_SHAPES = {"last": [(64, 32), (131, 40)], "first": [(40, 131)], None: [(999,)]}
OF_ROWS = ("y", "residual", "mean", "rstd", "dx", "dgate", "dresidual")


def shapes(name, is_gpu=False):
    memory = name.partition("group norm, ")[2] or None
    if is_gpu:
        return GPU_SHAPES[memory]
    return SAMPLES.get(memory, [(w * NORMS[name][1].get("groups", 1),) for (w,) in WIDTHS])


def drawn(name, shape, count=37):
    """Draw so many rows, or samples."""
    dtype, norm = NORMS[name]
    operands = ("x", "dy") if "num_groups" in norm else ("x", "dy", "residual", "d_residual")
    operands += ("gate",) if "gate_position" in norm else ()
    return {operand: draw(operand, (count, *shape), dtype) for operand in operands}


def few(shape):
    """Return enough rows, or samples, to be planned in another way than one is."""
    if len(shape) == 1:
        return 37 if shape[0] < 4000 else 5
    return 5 if shape[0] * shape[1] > 100_000 else 20


def run(name, rows, on=None, parameters=None):
    """Run both directions with everything; return the results by name."""
    dtype, norm = NORMS[name]
    put = (lambda array: array) if on is None else on.put
    width = rows["x"].shape[norm.get("channel_axis", -1)]
    parameters = parameters or [optional(p, width, dtype) for p in ("weight", "bias")]
    parameters = [put(parameter) for parameter in parameters]
    if "num_groups" in norm:
        f = cunorm.group_norm_forward(rows["x"], weight=parameters[0], bias=parameters[1], **norm)
        given = (rows["dy"], rows["x"], norm["num_groups"], *parameters)
        told = {key: norm[key] for key in ("activation", "channel_axis")}
        grads = cunorm.group_norm_backward(*given, mean=f.mean, rstd=f.rstd, **told)
    else:
        told = norm | ({"gate": rows["gate"]} if "gate" in rows else {})
        f = cunorm.layer_norm_forward(rows["x"], *parameters, residual=rows["residual"], **told)
        saved = {"rstd": f.rstd, "mean": f.mean, "d_residual": rows["d_residual"]}
        given = (rows["dy"], f.residual, *parameters)
        grads = cunorm.layer_norm_backward(*given, **saved, **told)
    results = f._asdict() | grads._asdict() if on is None else {}
    for result in () if on is None else (f, grads):
        results |= get_all(on, result)._asdict()
    return {field: array for field, array in results.items() if array is not None}


def assert_same(actual, expected, chosen=None):
    """Compare results; only of rows, and these where they are chosen, where some are."""
    assert actual.keys() == expected.keys()
    for field, right in expected.items():
        if chosen is None:
            assert_same_bits(actual[field], right, field)
        elif field in OF_ROWS:
            assert_same_bits(actual[field], np.ascontiguousarray(right[chosen]), field)


@norms
def test_results_ignore_the_order_number_and_position_of_rows(device, name):
    for shape in shapes(name, device.is_gpu):
        count = 5 if device.is_gpu else few(shape)
        rows = drawn(name, shape, count)
        there = {operand: device.put(array) for operand, array in rows.items()}
        expected = run(name, there, device)
        assert_same(run(name, there, device), expected)  # and the same again
        order = np.random.default_rng(0).permutation(count)
        choices = [order, order[:1]]
        choices += [] if device.is_gpu or len(shape) > 1 else [np.tile(order, 9)]
        for chosen in choices:
            part = {operand: device.put(array[chosen]) for operand, array in rows.items()}
            with at(shape, f"{len(chosen)} rows"):
                assert_same(run(name, part, device), expected, chosen)


@pytest.mark.parametrize("name", ["plain, float32", *(name for name in NORMS if "groups" in name)])
def test_a_groups_results_are_those_of_it_alone(device, name, monkeypatch):
    dtype, norm = NORMS[name]
    for (width,) in [(129,)] if device.is_gpu else WIDTHS:
        monkeypatch.setitem(NORMS, "together", (dtype, norm | {"groups": 3}))
        monkeypatch.setitem(NORMS, "alone", (dtype, norm | {"groups": 1}))
        rows = drawn("together", (3 * width,), 5 if device.is_gpu else 37)
        parameters = [optional(p, 3 * width, dtype) for p in ("weight", "bias")]
        there = {operand: device.put(array) for operand, array in rows.items()}
        expected = run("together", there, device, parameters)
        for group in range(3):
            own = np.s_[..., group * width : (group + 1) * width]
            part = {operand: device.put(array[own]) for operand, array in rows.items()}
            got = run("alone", part, device, [parameter[own] for parameter in parameters])
            for field, right in expected.items():
                mine = right[:, group] if field in ("mean", "rstd") else right[own]
                with at(f"width {width}", f"group {group}"):
                    assert_same_bits(got[field], np.ascontiguousarray(mine), field)


# --- memory ---------------------------------------------------------------------------------------


def shifted(array, elements):
    """Return a copy that begins so many elements after an address of the greatest alignment."""
    memory = np.zeros(array.size + 128, array.dtype)
    start = -memory.ctypes.data % 64 // array.itemsize + elements
    copy = memory[start : start + array.size].reshape(array.shape)
    copy[...] = array
    return copy


def unaligned(array):
    bytes_ = np.frombuffer(b" " + array.tobytes(), np.uint8)[1:]
    return bytes_.view(array.dtype).reshape(array.shape)


VIEWS = {
    **{f"{n} elements on": lambda a, n=n: shifted(a, n) for n in (1, 8, 31)},
    "padded": lambda a: np.pad(a, [(0, 0)] * (a.ndim - 1) + [(3, 2)])[..., 3:-2],
    "reversed": lambda a: a[::-1].copy()[::-1],
    "columns first": lambda a: np.asfortranarray(a) if a.ndim == 2 else a,  # another layout
    "unaligned": unaligned,
}


@norms
def test_results_ignore_alignment_and_strides(name):
    for shape in shapes(name):
        rows = drawn(name, shape, 4)
        expected = run(name, rows)
        for view, of in VIEWS.items():
            with at(shape, view):
                assert_same(run(name, {o: of(array) for o, array in rows.items()}), expected)
        expanded = {o: np.broadcast_to(a[2], a.shape) for o, a in rows.items() if "res" not in o}
        copied = {o: array.copy() for o, array in (rows | expanded).items()}
        with at(shape, "expanded"):
            assert_same(run(name, rows | expanded), run(name, copied))


@norms
@pytest.mark.parametrize("device", GPUS[:1], indirect=True)
def test_results_ignore_alignment_on_a_gpu(device, name):
    for shape in shapes(name, is_gpu=True):
        rows = drawn(name, shape, 3)
        there = {o: device.put(array) for o, array in rows.items()}
        padded = {o: device.put(VIEWS["padded"](a).base)[..., 3:-2] for o, a in rows.items()}
        assert_same(run(name, padded, device), run(name, there, device))


LEVELS = {
    2: lambda array: array[:, :, :, :4],
    3: lambda array: array.transpose(2, 0, 1, 3, 4),
    4: lambda array: array.transpose(3, 1, 0, 2, 4),
}


@pytest.mark.parametrize("name", ["plain, float32", "pre-gate and groups, float16"])
@pytest.mark.parametrize("levels", LEVELS)
def test_results_ignore_how_many_strides_walk_the_rows(levels, name):
    """A slice of a fused qkv has two strides, transposed three; of four, there is a copy."""
    dtype = NORMS[name][0]
    full = {operand: draw(operand, (2, 3, 2, 5, 2, 33), dtype) for operand in drawn(name, (3,))}
    rows = {operand: LEVELS[levels](array[..., 1, :]) for operand, array in full.items()}
    strides = tuple(stride // rows["x"].itemsize for stride in rows["x"].strides[:-1])
    assert len(collapsed(rows["x"].shape[:-1], strides)) == levels
    assert_same(run(name, rows), run(name, {o: array.copy() for o, array in rows.items()}))


# --- threads, repetition, stores past the caches --------------------------------------------------


@pytest.fixture
def default_threads():
    yield
    cunorm.set_num_threads(None)


MANY = {1: [((257,), 600), ((5003,), 9)], 2: [((300, 40), 9), ((4900, 72), 3)]}


@norms
def test_results_do_not_depend_on_the_number_of_threads_nor_on_the_run(name, default_threads):
    for shape, count in MANY[1 + ("group norm" in name)]:
        shape = (3 * shape[0],) if "groups" in NORMS[name][1] else shape
        rows = drawn(name, shape[:: 1 if name != "group norm, first" else -1], count)
        cunorm.set_num_threads(1)
        expected = run(name, rows)
        for threads in (2, 2, 3):
            cunorm.set_num_threads(threads)
            with at(shape, f"{threads} threads"):
                assert_same(run(name, rows), expected)


# More than 32 MiB of results, whose build stores them otherwise than that of a few rows.
LARGE = {"plain, bfloat16": ((1024,), 17000, 40), "group norm, last": ((300, 48), 600, 20)}


@pytest.mark.compiled("O3")
@pytest.mark.skipif(compiler() is None, reason="without a compiler nothing is stored past caches")
@pytest.mark.parametrize("name", LARGE)
def test_results_do_not_show_that_large_ones_are_stored_past_the_caches(name, monkeypatch):
    shape, count, part = LARGE[name]
    rows, macro = drawn(name, shape, part), "WRITE" if "group norm" in name else "X_T"
    rows = {operand: np.resize(array, (count, *shape)) for operand, array in rows.items()}
    with_empty_caches(monkeypatch)
    whole = run(name, rows)
    assert all(stores_past_caches(build) for build in loaded_builds(macro))
    chosen = slice(count // 2, count // 2 + part)
    results = run(name, {operand: array[chosen] for operand, array in rows.items()})
    assert not all(stores_past_caches(build) for build in loaded_builds(macro))
    assert_same(results, whole, chosen)
