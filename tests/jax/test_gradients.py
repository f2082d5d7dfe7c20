# SPDX-License-Identifier: MIT
"""cunorm.jax in float64: values and gradients are the oracle's."""

from __future__ import annotations

import inspect
from functools import partial

import numpy as np
import pytest

import cunorm
from tests.support.kinds import OnJax, OnJaxCpu
from tests.support.operands import NORMS, at
from tests.support.reference_cases import group_norm, operands, row_norm

jax = pytest.importorskip("jax", reason="JAX is not installed")

import cunorm.jax  # noqa: E402
from tests.support.jax_frames import calls_of  # noqa: E402

SHAPE = (2, 3, 4)
PRE = {"gate_position": "pre", "center": True}
# The function, its operands besides x, and its options. Tests of cunorm.torch share most builds.
CASES = [
    ("rms_norm", ("weight", "gate"), {"axis": 1}),
    ("rms_norm", ("weight", "bias"), {"weight_offset": 1.0}),
    ("layer_norm", ("weight", "bias"), {"axis": -2}),
    ("normalize", ("weight", "bias", "gate"), {"c": 2.0, "gate_activation": "tanh"} | PRE),
    ("l2_norm", (), {"groups": 2}),
    ("add_rms_norm", ("residual", "weight", "bias"), {"groups": 2}),
    ("add_layer_norm", ("residual", "weight", "bias"), {}),
    ("add_normalize", ("residual", "weight", "bias", "gate"), {"groups": 2} | PRE),
    (
        "add_normalize",
        ("weight", "bias", "gate"),
        {"gate_activation": "sigmoid", "c": 3.0, "eps": 0.5},
    ),
    ("group_norm", ("weight", "bias"), {"num_groups": 2, "activation": "gelu"}),
    ("group_norm", (), {"num_groups": 1, "activation": "tanh", "channel_axis": 1, "eps": 0.1}),
    ("instance_norm", ("weight", "bias"), {"activation": "silu", "channel_axis": 1}),
]
# The bounds allow some roundings of float64 in sums of a few terms, but no wrong formula.
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def drawn(options):
    """Draw all operands; parameters have the shape of a row, or of the channels."""
    channels = SHAPE[options.get("channel_axis", -1)]
    return operands(SHAPE, SHAPE[options["axis"] :] if "axis" in options else channels)


def exact(function, a, given, options):
    """Return the oracle's values and gradients."""
    name, channels = function.removeprefix("add_"), SHAPE[options.get("channel_axis", -1)]
    if name not in NORMS:
        options = {"num_groups": channels} | options
        return group_norm(a, options.pop("num_groups"), given, **options)
    oracle_options = NORMS[name].oracle_options(SHAPE[-1] // options.get("groups", 1))
    if name == "normalize":
        oracle_options = {"eps": NORMS[name].eps}
    if name != function and "residual" not in given:  # a stream begins with x
        a.residual, given = np.zeros(SHAPE), ("residual", *given)
    return row_norm(a, given, **oracle_options | options)


@pytest.mark.parametrize("kind", [OnJaxCpu, pytest.param(OnJax, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("function", "given", "options"), CASES)
def test_values_and_gradients_are_those_of_the_oracle(function, given, options, kind):
    a = drawn(options)
    arrays = {name: getattr(a, name) for name in ("x", *given)}
    stream = {"residual": None} if function.startswith("add_") else {}

    @jax.jit
    def run(arrays, *dys):
        norm = partial(getattr(cunorm.jax, function), **options)
        result, pull = jax.vjp(lambda arrays: norm(**stream | arrays), arrays)
        return result, pull(type(result)(*dys) if stream else dys[0])[0]

    with jax.default_device(kind().device):
        result, gradients = run(arrays, a.dy, a.d_residual)
    values, grads = exact(function, a, given, options)
    y, new = result if stream else (result, None)
    pairs = {"y": (y, values.y)} | ({"new": (new, values.residual)} if stream else {})
    pairs |= {name: (one, getattr(grads, f"d{name}")) for name, one in gradients.items()}
    for name, (got, right) in pairs.items():
        with at(name):
            assert got.dtype == np.float64
            np.testing.assert_allclose(got, right, **CLOSE)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_gradients_that_nobody_wants_are_not_computed(wanted):
    a = drawn({})
    arrays = {name: getattr(a, name) for name in ("x", "weight", "bias")}

    def loss(own):
        return (cunorm.jax.layer_norm(**arrays | {wanted: own}) * a.dy).sum()

    _, backward = calls_of(jax.grad(loss), arrays[wanted])
    assert backward.results == [(arrays[wanted].shape, "float64")]


def test_every_function_accepts_the_arguments_of_its_namesake_except_memory_and_statistics():
    for name in cunorm.jax.__all__:
        own = dict(inspect.signature(getattr(cunorm.jax, name)).parameters)
        plain = dict(inspect.signature(getattr(cunorm, name)).parameters)
        for one in ("out", "workspace", "mean", "rstd", "correction", "count", "x_dtype"):
            plain.pop(one, None)
        is_of_rows = not name.endswith("quantized") and name not in ("group_norm", "instance_norm")
        assert ("axis_name" in own) == is_of_rows
        own.pop("axis_name", None)
        assert ("where" in own) == (name in ("rms_norm", "layer_norm", "normalize"))
        own.pop("where", None)
        assert list(own) == list(plain), name
        for parameter, its in plain.items():
            assert (own[parameter].kind, own[parameter].default) == (its.kind, its.default)
