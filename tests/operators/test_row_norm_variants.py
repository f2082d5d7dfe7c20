# SPDX-License-Identifier: MIT
"""Heads, groups and gates as they lie in memory, of any framework; and what dtype y has."""

import numpy as np
import pytest

import cunorm
from cunorm import NormForward, NormGrads
from tests.support.bounds import check_backward, check_forward
from tests.support.calls import launched
from tests.support.kinds import KINDS, is_of, numbers, pointer, to
from tests.support.operands import DTYPES, assert_same_bits, draw, optional

TOKENS, HEADS, HEAD_DIM = (2, 9), 4, 33
ON_HOST = ["numpy", "torch"]


@pytest.fixture
def calls(monkeypatch):
    return launched(monkeypatch)


def dense(array):
    """Return a result's numbers, or a view's, in memory of their own."""
    return np.array(numbers(array), order="C")


def assert_equal(actual, expected):
    """Compare results of a view with those of its copy, field by field."""
    for name, one, other in zip(actual._fields, actual, expected, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            assert_same_bits(numbers(one), numbers(other), name)


# --- heads ----------------------------------------------------------------------------------------

QKV = {
    "tokens, qkv, heads": ((*TOKENS, 3, HEADS, HEAD_DIM), lambda qkv: qkv[:, :, 1]),
    "tokens, heads, qkv": ((*TOKENS, HEADS, 3, HEAD_DIM), lambda qkv: qkv[:, :, :, 2]),
    "heads before tokens": (
        (*TOKENS, 3, HEADS, HEAD_DIM),
        lambda qkv: qkv[:, :, 1].swapaxes(1, 2),
    ),
    "columns of a projection": (
        (*TOKENS, (HEADS + 2) * HEAD_DIM),
        lambda qkv: qkv[..., HEAD_DIM:-HEAD_DIM].reshape(*TOKENS, HEADS, HEAD_DIM),
    ),
}


@pytest.mark.parametrize("kind", ON_HOST)
@pytest.mark.parametrize("layout", QKV)
def test_heads_of_a_fused_projection_are_normalised_where_they_are(calls, layout, kind):
    shape, view = QKV[layout]
    if layout == "columns of a projection" and kind == "numpy":
        view = numpy_columns
    weight = optional("weight", HEAD_DIM, "float32")
    qkv, dqkv = (draw(name, shape, "float32") for name in ("x", "dy"))
    q, dy = view(to(kind, qkv.copy())), view(to(kind, dqkv))
    theirs = to(kind, weight)
    forward = cunorm.rms_norm_forward(q, theirs)
    assert calls[0].x.pointer == pointer(q)
    grads = cunorm.rms_norm_backward(dy, q, theirs, rstd=forward.rstd)
    assert (calls[1].x.pointer, calls[1].dy.pointer) == (pointer(q), pointer(dy))

    x, dy = dense(q), dense(dy)
    assert forward.rstd.shape == x.shape[:-1]
    check_forward(NormForward(*map(numbers, forward)), x, weight, None, eps=1e-6)
    check_backward(NormGrads(*map(numbers, grads)), dy, x, weight, None, eps=1e-6)

    expected = qkv.copy()
    numbers(view(to(kind, expected)))[...] = numbers(forward.y)
    whole = to(kind, qkv.copy())
    q = view(whole)
    assert cunorm.rms_norm(q, theirs, out=q) is q
    assert_same_bits(numbers(whole), expected)


def numpy_columns(qkv):
    """As torch's view of columns; NumPy's reshape would copy them."""
    part = qkv[..., HEAD_DIM:-HEAD_DIM]
    strides = (*part.strides[:-1], HEAD_DIM * part.itemsize, part.itemsize)
    return np.lib.stride_tricks.as_strided(part, (*TOKENS, HEADS, HEAD_DIM), strides)


# --- groups and gates of strided views ------------------------------------------------------------

WIDTH, GROUPS = 96, 3
REVERSED = ("torch", "reversed")
VIEWS = {
    "every other row": lambda array: array[::2],
    "reversed": lambda array: array[::-1],
    "columns": lambda array: array[:, 1, 5 : 5 + WIDTH],
    "middle of three": lambda array: array[:, 1, WIDTH : 2 * WIDTH],
    "transposed": lambda array: array.swapaxes(0, 1),
}


def operands(kind, view):
    """Draw x, the gate and dy as views of larger arrays, and the parameters."""
    shape = (8, 2, WIDTH if view in ("every other row", "reversed", "transposed") else 3 * WIDTH)
    rows = {n: VIEWS[view](to(kind, draw(n, shape, "float32"))) for n in ("x", "gate", "dy")}
    return rows | {n: to(kind, optional(n, WIDTH, "float32")) for n in ("weight", "bias")}


def gated(given, position):
    norm = {"groups": GROUPS, "gate": given["gate"], "gate_position": position}
    parameters = (given["weight"], given["bias"])
    forward = cunorm.layer_norm_forward(given["x"], *parameters, **norm)
    saved = {"rstd": forward.rstd, "mean": forward.mean}
    grads = cunorm.layer_norm_backward(given["dy"], given["x"], *parameters, **saved, **norm)
    return forward, grads


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize(
    ("kind", "view"),  # torch has no negative strides
    [(kind, view) for kind in ON_HOST for view in VIEWS if (kind, view) != REVERSED],
)
def test_groups_and_gates_of_views_are_not_copied(calls, kind, view, position):
    given = operands(kind, view)
    forward, grads = gated(given, position)
    for call, names in zip(calls, (("x", "gate"), ("x", "gate", "dy")), strict=True):
        for name in names:
            assert getattr(call, name).pointer == pointer(given[name])
    copies = {name: dense(array) for name, array in given.items()}
    for result, expected in zip((forward, grads), gated(copies, position), strict=True):
        assert_equal(result, expected)


@pytest.mark.parametrize("position", ["pre", "post"])
def test_what_groups_of_a_view_cannot_be_walked_is_copied_once(position):
    """Groups are a stride of their own: beside three others, and not where columns have steps."""
    full = {name: draw(name, (2, 3, 2, 5, WIDTH), "float32") for name in ("x", "gate", "dy")}
    steps = {name: draw(name, (5, 2 * WIDTH), "float32") for name in full}
    parameters = {name: optional(name, WIDTH, "float32") for name in ("weight", "bias")}
    for rows in (
        {name: array[:, :, :, :4].transpose(2, 0, 1, 3, 4) for name, array in full.items()},
        {name: array[:, ::2] for name, array in steps.items()},
    ):
        given = rows | parameters
        copies = {name: np.array(array, order="C") for name, array in given.items()}
        for result, expected in zip(gated(given, position), gated(copies, position), strict=True):
            assert_equal(result, expected)


# --- expanded gates -------------------------------------------------------------------------------

EXPANDED = {
    "one row for all": (1, 1, WIDTH),
    "one for each sequence": (4, 1, WIDTH),
    "one for each position": (1, 5, WIDTH),
}


def expanded(kind, gate, shape):
    array = to(kind, gate)
    return np.broadcast_to(array, shape) if kind == "numpy" else array.expand(shape)


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("kind", ON_HOST)
@pytest.mark.parametrize("rows", EXPANDED)
def test_an_expanded_gate_is_not_copied_and_has_a_full_gradient(calls, rows, kind, position):
    shape = (4, 5, WIDTH)
    given = {name: draw(name, shape, "float32") for name in ("x", "dy")}
    given |= {name: optional(name, WIDTH, "float32") for name in ("weight", "bias")}
    gate = draw("gate", EXPANDED[rows], "float16")
    view = expanded(kind, gate, shape)
    theirs = {name: to(kind, array) for name, array in given.items()} | {"gate": view}
    forward, grads = gated(theirs, position)
    assert [call.gate.pointer for call in calls] == 2 * [pointer(view)]
    assert grads.dgate.shape == shape
    assert numbers(grads.dgate).flags.c_contiguous
    assert is_of(kind, grads.dgate, "float16")
    copies = given | {"gate": np.broadcast_to(gate, shape).copy()}
    for result, expected in zip((forward, grads), gated(copies, position), strict=True):
        assert_equal(result, expected)


@pytest.mark.parametrize("kind", ON_HOST)
def test_a_gate_of_one_number_for_each_row_is_copied_once(kind):
    shape = (7, WIDTH)
    given = {name: draw(name, shape, "float32") for name in ("x", "dy")}
    given |= {name: optional(name, WIDTH, "float32") for name in ("weight", "bias")}
    gate = draw("gate", (7, 1), "float32")
    theirs = {name: to(kind, array) for name, array in given.items()}
    results = gated(theirs | {"gate": expanded(kind, gate, shape)}, "post")
    copies = given | {"gate": np.broadcast_to(gate, shape).copy()}
    for result, expected in zip(results, gated(copies, "post"), strict=True):
        assert_equal(result, expected)
    assert results[1].dgate.shape == shape


# --- every framework ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize(("dtype", "gate_dtype"), [("bfloat16", "float32"), ("float32", "float16")])
def test_gated_results_are_of_the_callers_framework_and_right(kind, position, dtype, gate_dtype):
    shape = (12, WIDTH)
    x, dy, gate = draw("x", shape, dtype), draw("dy", shape, dtype), draw("gate", shape, gate_dtype)
    residual = draw("residual", shape, "float32")
    weight, bias = (optional(name, WIDTH, "float32") for name in ("weight", "bias"))
    norm = {"groups": GROUPS, "weight_offset": 1.0, "center": True, "gate_position": position}
    theirs = [to(kind, array) for array in (weight, bias)]
    told = norm | {"gate": to(kind, gate)}
    forward = cunorm.normalize_forward(to(kind, x), *theirs, residual=to(kind, residual), **told)
    given = (to(kind, dy), forward.residual, *theirs)
    saved = {"rstd": forward.rstd, "mean": forward.mean, "x_dtype": dtype}
    grads = cunorm.normalize_backward(*given, **saved, **told)
    dtypes = NormForward(dtype, "float32", "float32", "float32")
    dtypes = (*dtypes, *NormGrads(dtype, "float32", "float32", gate_dtype, "float32"))
    for result, expected in zip((*forward, *grads), dtypes, strict=True):
        assert is_of(kind, result, expected)

    check = norm | {"gate": gate, "eps": 1e-6}
    check_forward(NormForward(*map(numbers, forward)), x, weight, bias, residual, **check)
    stream, grads = numbers(forward.residual), NormGrads(*map(numbers, grads))
    check_backward(grads, dy, stream, weight, bias, x_dtype=DTYPES[dtype], **check)


# --- names and dtypes -----------------------------------------------------------------------------


def test_swish_is_silu():
    x, gate = draw("x", (5, 40), "float32"), draw("gate", (5, 40), "float32")
    y = cunorm.rms_norm(x, gate=gate, gate_activation="swish")
    assert_same_bits(y, cunorm.rms_norm(x, gate=gate, gate_activation="silu"))
    assert_same_bits(y, cunorm.rms_norm(x, gate=gate))


PROMOTED = {
    frozenset(("float16", "bfloat16")): "float32",
    **{frozenset((dtype, "float32")): "float32" for dtype in ("float16", "bfloat16", "float32")},
    **{frozenset((dtype, "float64")): "float64" for dtype in DTYPES},
}


@pytest.mark.parametrize("weight", DTYPES)
@pytest.mark.parametrize("x", DTYPES)
def test_ys_dtype_is_that_of_x_or_with_rounding_what_x_and_weight_promote_to(x, weight):
    given = draw("x", (0, 8), x), draw("weight", 8, weight)
    promoted = PROMOTED.get(frozenset((x, weight)), x)
    rounds = {"round_before_weight": True}
    assert cunorm.rms_norm(*given, **rounds).dtype == DTYPES[promoted]
    assert cunorm.rms_norm(given[0], **rounds).dtype == DTYPES[x]
    assert cunorm.rms_norm(*given).dtype == DTYPES[x]
    assert cunorm.rms_norm(*given, dtype="float16", **rounds).dtype == np.float16
    stream = draw("residual", (0, 8), "float64")
    assert cunorm.add_rms_norm(given[0], stream, given[1], **rounds).y.dtype == DTYPES[promoted]
