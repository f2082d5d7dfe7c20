# SPDX-License-Identifier: MIT
"""Repeated calls of all sorts, in any order, give the results of calls without caches.

Most of a call's work is cached under its options and the specs and alignment of its arrays. Here
each call, valid or wrong, differs from an earlier call in a single way. At the end each call is
repeated with empty caches: errors must be the same, and results must have the same bits.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product

import numpy as np
import pytest

import cunorm
from cunorm import NormForward
from tests.support.calls import (
    FUNCTIONS,
    GROUP_NORMS,
    arrays_of,
    call_of,
    fields,
    host,
    parameters_of,
    strides_of,
    to,
)
from tests.support.operands import at, bits
from tests.support.remembered import caches, clear_plans

KINDS = ["numpy", "torch"] if find_spec("torch") else ["numpy"]
ROWS = [(5, 8), (3, 8), (5, 16), (2, 5, 8), (0, 8), (10, 8)]
IMAGES = [(3, 8, 8), (2, 4, 8), (3, 8, 16), (3, 2, 4, 8), (0, 8, 8)]
# Valid and wrong values of options, some of them equal but of different types.
OPTIONS = {
    "eps": [1.0, 2, 0.0, -0.0, True, -1.0],
    "c": [2, 2.0, 0.0, -0.0, True, "2"],
    "weight_offset": [1.0, 2, True],
    "groups": [1, 2, True, 3],
    "axis": [-1, 1, True],
    "num_groups": [4, 2, 1, True, 3],
    "channel_axis": [-1, 1, -1.0],
    "center": [True, 1],
}
NEEDS = {"needs": [("x", "weight"), ("x",), ["x"], ("y",), "x"], "accumulate": [False, True, 0]}
SIZES = {"groups": (1, 2), "num_groups": (1, 2, 4), "channel_axis": (-1, 1)}  # fit the shapes
INPUTS = ("x", "dy", "residual", "gate", "d_residual", "weight", "bias", "mean", "rstd")
RESULTS = ("y", "residual", "mean", "rstd", "dx", "dweight", "dbias", "dgate")
OPERANDS = (*INPUTS, *(f"out.{field}" for field in RESULTS), "workspace")
SLOT = 1 << 13  # bytes of memory for each operand


def change_one(spec, kinds, rng):
    """Return the spec of a call that differs from another in one thing."""

    def pick(some):
        return some[rng.integers(len(some))]

    name, call = spec["name"], call_of(spec["name"])
    values = OPTIONS | (NEEDS if name == "layer_norm_backward" else {})
    option = pick([key for key in values if key in parameters_of(name)])
    parts = [*arrays_of(call.arrays), *(f"out.{field}" for field in call.out), "workspace"]
    choices = {
        "shape": IMAGES if name in GROUP_NORMS else ROWS,
        "kind": kinds,
        "dtype": ["float32", "float16" if name in ("l2_norm", "group_norm") else "float32"],
        "options": [spec["options"] | {option: value} for value in values[option]],
        "seed": range(3),
        "gap": [0, 4],
        "moved": [{}, *({pick(parts): distance} for distance in (1, 4, 8, 16, 64, 512))],
        "instead": [{}, {pick(parts): pick(parts)}],
        "given": [(), parts, [part for part in parts if rng.random() < 0.5]],
    }
    what = pick(list(choices))
    return spec | {what: pick(choices[what])}


def view(memory, spec, key, shape):
    """Return an array of random numbers in the memory slot of a key, with a gap after each line."""
    kind, is_small = spec["kind"], key.removeprefix("out.").removeprefix("d") in INPUTS[5:]
    dtype = np.dtype("u1" if key == "workspace" else "f4")
    dtype = np.dtype(spec["dtype"]) if key in ("x", "out.y") else dtype
    gap = 0 if is_small or key == "workspace" else spec["gap"]
    steps = np.empty((*shape[:-1], shape[-1] + gap), dtype).strides if shape else ()
    distance = spec["moved"].get(key, 0)
    distance = 32 if distance == 1 and kind != "numpy" else distance
    start = OPERANDS.index(spec["instead"].get(key, key)) * SLOT + distance
    numbers = np.random.default_rng([spec["seed"], OPERANDS.index(key)]).standard_normal(shape)
    if kind == "cupy":
        import cupy

        array = cupy.ndarray(shape, dtype, memory[start:].data, steps)
    else:
        array = to(kind, np.ndarray(shape, dtype, memory, start, steps))
    array[...] = to(kind, numbers.astype(dtype))
    return array


def make(spec, memory):
    """Make a call; return its error or a description of results, the results, and the memory."""
    sizes = {k: v for k, v in spec["options"].items() if v in SIZES.get(k, ()) and type(v) is int}
    call = call_of(spec["name"], spec["shape"], **sizes)
    memory[...] = 0
    size = 0 if call.workspace is None else 2 * call.workspace.size
    workspace = {"workspace": (size,)} if size and "workspace" in spec["given"] else {}
    shapes = {key: array.shape for key, array in arrays_of(call.arrays).items()} | workspace
    out = {
        field: view(memory, spec, f"out.{field}", array.shape)
        for field, array in call.out.items()
        if f"out.{field}" in spec["given"]
    }
    arrays = {key: view(memory, spec, key, shape) for key, shape in shapes.items()}
    given = arrays | {f"out.{field}": array for field, array in out.items()}
    kwargs = call.arrays | arrays | spec["options"] | ({"out": call.out_of(out)} if out else {})
    before = host(memory).copy()
    try:
        results = fields(call.function(**kwargs))
    except (TypeError, ValueError) as error:
        np.testing.assert_array_equal(host(memory), before)
        return repr(error), {}, None
    specs = [
        (field, type(a), a.shape, a.dtype, strides_of(a), [k for k in given if given[k] is a])
        for field, a in results.items()
    ]
    if workspace:
        arrays["workspace"][...] = 0
    return specs, results, host(memory).copy()


def check_calls(specs, kinds, steps):
    """Make calls that each differ from an earlier call in one thing; repeat each without caches."""
    if "cupy" in kinds:
        import cupy

        memory = cupy.zeros(SLOT * len(OPERANDS), "uint8")
    else:
        memory = np.zeros(SLOT * len(OPERANDS) + 64, np.uint8)
        memory = memory[-memory.ctypes.data % 64 :][:-64]
    rng = np.random.default_rng(0)
    while len(specs) < steps:
        specs.append(change_one(specs[rng.integers(len(specs))], kinds, rng))
    outcomes = [make(one, memory) for one in specs]
    for one, (described, results, after) in zip(specs, outcomes, strict=True):
        clear_plans()
        with at(one):
            right_described, right, right_after = make(one, memory)
            assert described == right_described
            np.testing.assert_array_equal(after, right_after)
            for field in results.keys() - {entry[0] for entry in described if entry[-1]}:
                mine, its = (bits(host(found[field])) for found in (results, right))
                np.testing.assert_array_equal(mine, its, field)


def first_calls(names, kind):
    """Yield specs of first calls. Options are 1.0: later calls have True, which equals 1.0."""
    rest = {"dtype": "float32", "seed": 0, "gap": 0, "moved": {}, "instead": {}}
    for name in names:
        options = {k: 1.0 for k in ("weight_offset", "eps") if k in parameters_of(name)}
        shape = (IMAGES if name in GROUP_NORMS else ROWS)[0]
        yield {"name": name, "shape": shape, "kind": kind, "options": options, "given": (), **rest}


OF_GPUS = ["rms_norm", "layer_norm_backward", "group_norm", "group_norm_backward"]


@pytest.mark.parametrize(
    ("names", "kinds", "steps"),
    [
        pytest.param([n for n in FUNCTIONS if n not in GROUP_NORMS], KINDS, 700, id="rows"),
        pytest.param(GROUP_NORMS, KINDS, 200, id="groups"),
        pytest.param(OF_GPUS, ["cupy"], 150, marks=pytest.mark.gpu, id="cupy"),
    ],
)
def test_repeated_calls_give_the_results_of_first_calls(names, kinds, steps):
    """On a GPU a misaligned access is an error too."""
    check_calls(list(first_calls(names, kinds[0])), kinds, steps)


def test_thousands_of_shapes_do_not_grow_the_caches_without_bound():
    ones = np.ones((40, 80), np.float32)
    clear_plans()
    for rows, width in product(range(1, 36), range(1, 33)):
        x, weight = ones[:rows, :width], ones[0, :width]
        saved = cunorm.rms_norm_forward(x, weight, out=NormForward(y=np.empty(x.shape, "f4")))
        cunorm.rms_norm_backward(x, x, weight, rstd=saved.rstd)
        cunorm.group_norm(x, 1)
    infos = [one.cache_info() for one in caches()]
    assert all((info.maxsize or 0) <= 4096 for info in infos)
    assert all(info.currsize < 100 for info in infos if info.maxsize is None)
    assert max(info.misses for info in infos) > 1024  # so that some entries are evicted
