# SPDX-License-Identifier: MIT
"""The results of a row, a group or a sample depend on its own data alone, bit for bit.

They do not depend on other rows, alignment, strides, threads or the run. Gradients of parameters
depend on the data of all rows or samples, and on shapes.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

import cunorm
from tests.support.cases import call_of
from tests.support.described import loaded_builds, stores_past_caches, with_empty_caches
from tests.support.gpu_arrays import OnNumpy
from tests.support.internals import compiler
from tests.support.norm_checks import check_norm
from tests.support.operands import assert_same_bits, assert_same_fields, at, draw
from tests.support.placed import Samples


def row_case(dtype, **norm):
    """Return a case whose operands are all of a dtype."""
    names = ("x", "dy", "weight", "bias", "d_residual", *(("gate",) if norm else ()))
    return dict.fromkeys(names, dtype) | {"stream": f"+ {dtype}", "center": True} | norm


NORMS = {
    "plain, float32": row_case("float32"),
    "pre-gate, float16": row_case("float16", gate_activation="gelu", gate_position="pre"),
    "post-gate, bfloat16": row_case("bfloat16", gate_position="post", round_before_weight=True),
    "group norm, last": {},
    "group norm, first": {},
}
norms = pytest.mark.parametrize("name", NORMS)
# Width and groups of rows; positions, channels and groups of samples. Their plans on a CPU differ.
WIDTHS = [(1, 1), (33, 3), (1000, 1), (5003, 3), (14_000, 1)]
SAMPLES = {
    "last": [(300, 40, 8), (700, 256, 8), (4900, 72, 8)],
    "first": [(31, 40, 4), (4900, 72, 4)],
}
GPU_SIZES = {"last": [(64, 32, 8), (131, 40, 8)], "first": [(131, 40, 4)], "rows": [(333, 3)]}
MANY = {"rows": [(257, 1, 600), (5003, 3, 9)], "last": [(300, 40, 8, 9), (4900, 72, 8, 3)]}
MANY["first"] = MANY["last"]
OF_A_ROW = {"y", "residual", "mean", "rstd", "dx", "dgate", "dresidual"}


def memory_of(name):
    return name.partition("group norm, ")[2] or "rows"


def sizes(name, is_gpu=False):
    memory = memory_of(name)
    return GPU_SIZES[memory] if is_gpu else SAMPLES.get(memory, WIDTHS)


def few(size):
    """Return a number of rows or samples whose plan differs from that of one row or sample."""
    elements = size[0] * size[1]
    return 36 if elements < 4000 else 20 if elements < 15_000 else 4


def run(name, size, count, on=None, **more):
    """Run both directions with all operands; return the results by name."""
    if memory_of(name) == "rows":
        leading = (2, 2, count // 4) if count % 4 == 0 else (1, 1, count)
        case = {"shape": (*leading, size[0]), "groups": size[1]}
    else:
        last = memory_of(name) == "last"
        case = {"samples": Samples(count, size[:1], *size[1:3], last, -1 if last else 1)}
    norm, results = "row" if "shape" in case else "group", {}
    for direction in ("forward", "backward"):
        call = call_of(f"{norm}_norm_{direction}", NORMS[name] | case | more, on or OnNumpy())
        results |= call.run()._asdict()
    return {field: array for field, array in results.items() if array is not None}


def assert_same(actual, expected, picked=None):
    """Compare results. With `picked`, `actual` has only these rows, and only OF_A_ROW counts."""
    assert actual.keys() == expected.keys()
    for field, right in expected.items():
        if picked is None:
            assert_same_bits(actual[field], right, field)
        elif field in OF_A_ROW:
            count = len(picked) * right.size // actual[field].size
            right = right.reshape(count, -1)[picked]
            assert_same_bits(actual[field].reshape(right.shape), right, field)


@norms
def test_results_ignore_other_rows_their_order_alignment_strides_and_being_in_place(device, name):
    arrangements = [{}, {"layouts": 1}, {"layouts": 2}, {"offset": 1}, {"in_place": "x"}]
    arrangements += [] if device.is_gpu else [{"offset": 8}, {"offset": 31}]
    for size in sizes(name, device.is_gpu):
        count = 8 if device.is_gpu else few(size)
        expected = run(name, size, count, device)
        for more in arrangements:  # the first is a second run
            with at(size, more):
                assert_same(run(name, size, count, device, **more), expected)
        order = np.random.default_rng(0).permutation(count)
        choices = [order, order[:1]]
        choices += [] if device.is_gpu or len(size) > 2 else [np.tile(order, 9)]
        for picked in choices:
            with at(size, f"{len(picked)} rows"):
                assert_same(run(name, size, count, device, picked=picked), expected, picked)


def test_a_groups_results_depend_only_on_the_group(device):
    def gated(columns, **norm):
        (x, dy, gate), parameters = rows[..., columns], parameters_of_all[..., columns]
        norm |= {"gate": gate.copy(), "gate_position": "pre", "center": True}
        f, grads = check_norm(device, x.copy(), dy.copy(), [p.copy() for p in parameters], **norm)
        return [f.y, grads.dx, grads.dgate, grads.dweight, grads.dbias], [f.mean, f.rstd]

    for width in (129,) if device.is_gpu else (33, 129, 1000, 5003):
        rows = draw("x", (3, 9, 3 * width), "float16")
        parameters_of_all = draw("weight", (2, 3 * width), "float16")
        whole, statistics = gated(np.s_[:], groups=3)
        for group in range(3):
            own = np.s_[group * width : (group + 1) * width]
            expected = [a[..., own] for a in whole] + [a[:, group] for a in statistics]
            for got, right in zip(chain(*gated(own)), expected, strict=True):
                with at(f"group {group} of width {width}"):
                    assert_same_bits(got, np.ascontiguousarray(right))


@pytest.fixture
def default_threads():
    yield
    cunorm.set_num_threads(None)


@norms
def test_results_are_the_same_in_every_run_with_any_number_of_threads(name, default_threads):
    for *size, count in MANY[memory_of(name)]:
        cunorm.set_num_threads(1)
        expected = run(name, tuple(size), count)
        for threads in (2, 2, 3):
            cunorm.set_num_threads(threads)
            with at(size, f"{threads} threads"):
                assert_same(run(name, tuple(size), count), expected)


# These calls move more than 64 MiB, and their builds store past the caches.
LARGE = {"rows": ((1024,), 17000, 40, "bfloat16"), "samples": ((300, 48), 600, 20, "float32")}


@pytest.mark.compiled("O3")
@pytest.mark.skipif(compiler() is None, reason="without a compiler nothing is stored past caches")
@pytest.mark.parametrize("kind", LARGE)
def test_large_results_stored_past_the_caches_have_the_same_bits(kind, monkeypatch):
    shape, count, part, dtype = LARGE[kind]
    x, dy = (draw(n, (part, *shape), dtype) for n in ("x", "dy"))
    x[1].flat[5], dy[2] = np.nan, 0  # NaN and zeros are rounded to 16 bits by other code
    x, dy = (np.resize(array, (count, *shape)) for array in (x, dy))
    with_empty_caches(monkeypatch)

    def y_in(out):
        if kind == "rows":
            return cunorm.layer_norm(x, out=out)
        return cunorm.group_norm(x, 8, out=out)

    def both(rows):
        if kind == "rows":
            f = cunorm.layer_norm_forward(x[rows])
            grads = cunorm.layer_norm_backward(dy[rows], x[rows], rstd=f.rstd, mean=f.mean)
        else:
            f = cunorm.group_norm_forward(x[rows], 8)
            grads = cunorm.group_norm_backward(dy[rows], x[rows], 8, mean=f.mean, rstd=f.rstd)
        builds = loaded_builds("X_T" if kind == "rows" else "WRITE")
        return f, grads.dx, [stores_past_caches(build) for build in builds]

    whole, dx, are_large = both(np.s_[:])
    assert all(are_large)
    few, few_dx, are_large = both(np.s_[:part])
    assert not all(are_large)
    assert_same_fields(few, type(few)(*(a if a is None else a[:part] for a in whole)))
    assert_same_bits(few_dx, dx[:part])
    for address in (0, 32, 16, 8, x.itemsize):  # only multiples of 16 allow stores past the caches
        out = np.empty(x.nbytes + 128, np.uint8)
        out = out[(address - out.ctypes.data) % 64 :][: x.nbytes].view(x.dtype).reshape(x.shape)
        assert_same_bits(y_in(out), whole.y)
