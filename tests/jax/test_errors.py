# SPDX-License-Identifier: MIT
"""Wrong input of cunorm.jax is the plain functions' error, when the call is traced."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

import cunorm  # noqa: E402
import cunorm.jax  # noqa: E402

X, WEIGHT = jnp.ones((4, 8)), jnp.ones(8)
WRONG = {
    "shape of weight": ("rms_norm", (X, jnp.ones(9)), {}),
    "shape of gate": ("layer_norm", (X,), {"gate": jnp.ones((8, 4))}),
    "shape of residual": ("add_rms_norm", (X, jnp.ones(8)), {}),
    "integers": ("l2_norm", (jnp.ones((4, 8), int),), {}),
    "integers as weight": ("normalize", (X, jnp.ones(8, int)), {}),
    "no axes": ("rms_norm", (jnp.ones(()),), {}),
    "axis": ("rms_norm", (X,), {"axis": 2}),
    "axis of another type": ("rms_norm", (X,), {"axis": 1.0}),
    "groups": ("rms_norm", (X,), {"groups": 3}),
    "eps": ("layer_norm", (X,), {"eps": -1.0}),
    "c": ("normalize", (X,), {"c": float("nan")}),
    "weight_offset": ("rms_norm", (X,), {"weight_offset": 1.0}),
    "activation": ("rms_norm", (X,), {"gate": X, "gate_activation": "sine"}),
    "position": ("rms_norm", (X,), {"gate": X, "gate_position": "middle"}),
    "dtype": ("rms_norm", (X,), {"dtype": "int8"}),
    "residual_dtype": ("add_rms_norm", (X, X), {"residual_dtype": "float16"}),
    "num_groups": ("group_norm", (X, 3), {}),
    "channel_axis": ("group_norm", (X, 2), {"channel_axis": 2}),
    "shape of channels": ("instance_norm", (X, jnp.ones(4)), {}),
    "group's activation": ("instance_norm", (X,), {"activation": "sine"}),
    "float64": ("rms_norm", (X,), {"dtype": "float64"}),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("traced", [False, True])
def test_wrong_input_is_the_plain_functions_error(what, traced):
    name, arrays, said = WRONG[what]
    with pytest.raises((TypeError, ValueError)) as plain:
        getattr(cunorm, name)(*arrays, **said)
    function = getattr(cunorm.jax, name)
    if traced:
        function = _in_jit(function, arrays)
    with pytest.raises(plain.type) as caught:
        function(*arrays, **said)
    assert str(caught.value) == str(plain.value)
    assert str(caught.value).startswith(f"{name}: ")


def _in_jit(function, arrays):
    static = [place for place, array in enumerate(arrays) if not hasattr(array, "shape")]
    return lambda *arrays, **said: jax.jit(partial(function, **said), static_argnums=static)(
        *arrays
    )


@pytest.mark.parametrize(
    ("arrays", "got"),
    [
        (([1.0, 2.0],), "x is of type list"),
        ((None,), "x is None"),
        ((X, 1.0), "weight is of type float"),
        ((jax.ShapeDtypeStruct((4, 8), "float32"),), "x is of type ShapeDtypeStruct"),
    ],
)
def test_what_is_no_array_is_refused(arrays, got):
    with pytest.raises(TypeError, match=f"^rms_norm: {got}, expected a JAX or NumPy array$"):
        cunorm.jax.rms_norm(*arrays)


def test_tracers_as_numbers_are_refused():
    with pytest.raises(TypeError, match=r"^rms_norm: eps is .*expected a number"):
        jax.jit(lambda eps: cunorm.jax.rms_norm(X, eps=eps))(0.1)


def test_numpy_arrays_are_taken_and_jax_arrays_returned():
    y = cunorm.jax.rms_norm(np.ones((4, 8), np.float32), np.ones(8, np.float16))
    assert isinstance(y, jax.Array)
    assert y.dtype == np.float32


def test_minus_zero_is_another_length_than_zero():
    for c in (0.0, -0.0):
        assert np.signbit(cunorm.jax.normalize(X, c=c)).all() == np.signbit(c)


def test_shapes_that_are_not_known_are_refused():
    shape = jax.export.symbolic_shape("b, 8")
    with pytest.raises(TypeError, match=r"^rms_norm: x has shape \(b, 8\), expected sizes that "):
        jax.export.export(jax.jit(cunorm.jax.rms_norm))(jax.ShapeDtypeStruct(shape, "float32"))
