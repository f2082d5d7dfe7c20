# SPDX-License-Identifier: MIT
"""Row norms of axes that are not the last, against a formula in jax.numpy."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
import jax.numpy as jnp  # noqa: E402

import cunorm.jax as cj  # noqa: E402
from tests.support.operands import at  # noqa: E402


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def operands():
    rng = np.random.default_rng(0)
    shapes = (2, 6, 4, 5), (6,), (6,), (2, 6, 4, 5)
    return [jnp.asarray(rng.standard_normal(shape)) for shape in shapes]


def norm(x, weight, bias):
    return cj.layer_norm(x, weight, bias, axis=(1,))


def formula(x, weight, bias):
    q = x - x.mean(1, keepdims=True)
    r = q / jnp.sqrt((q * q).mean(1, keepdims=True) + 1e-5)
    return r * weight.reshape(6, 1, 1) + bias.reshape(6, 1, 1)


def gated(x, weight, gate):
    y, stream = cj.add_rms_norm(x, jnp.cos(x), weight, axis=(-3,), gate=gate)
    return jnp.stack([y, stream])


def gated_formula(x, weight, gate):
    s = x + jnp.cos(x)
    y = s / jnp.sqrt((s * s).mean(1, keepdims=True) + 1e-6) * weight.reshape(6, 1, 1)
    return jnp.stack([y * jax.nn.silu(gate), s])


def assert_close(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-11)


def gradients(function):
    return jax.grad(lambda *arrays: jnp.sin(function(*arrays)).sum(), (0, 1, 2))


PAIRS = {"plain": (norm, formula), "gated": (gated, gated_formula)}


@pytest.mark.parametrize("name", PAIRS)
def test_results_and_derivatives_are_those_of_the_formula(name):
    x, weight, bias, other = operands()
    given = (x, weight, bias if name == "plain" else other)
    tangents, every = (other, weight * 2, given[2] + 1), (0, 1, 2)

    def of(function):
        def total(*arrays):
            return jnp.sin(function(*arrays)).sum()

        grad = jax.grad(total, every)
        return [
            function(*given),
            jax.jit(grad)(*given),
            jax.jvp(function, given, tangents),
            jax.jvp(grad, given, tangents),
            jax.grad(lambda *arrays: (grad(*arrays)[0] * other).sum(), every)(*given),
        ]

    assert_close(*map(of, PAIRS[name]))


def test_vmap_over_any_operand_is_that_of_the_formula():
    given = operands()[:3]
    batches = [jnp.stack([one, 2 * one + 1]) for one in given]
    for axes in ((0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (0, 0, None)):
        pairs = zip(axes, batches, given, strict=True)
        own = [one if axis is None else batch for axis, batch, one in pairs]
        with at(axes):
            for change in (
                lambda f: f,
                lambda f: jax.grad(lambda *a: jnp.sin(f(*a)).sum(), (0, 1, 2)),
            ):
                assert_close(*(jax.vmap(change(f), axes)(*own) for f in (norm, formula)))


@pytest.mark.parametrize("axis", [(-1,), (2, 3)])
def test_a_tuple_of_the_last_axes_is_an_int(axis):
    x, _, _, other = operands()

    def of(axis):
        grad = jax.grad(lambda x: jnp.sin(cj.layer_norm(x, axis=axis)).sum())
        return cj.layer_norm(x, axis=axis), jax.jvp(grad, (x,), (other,))

    assert_close(of(axis), of(-len(axis)))


def test_parameters_of_samples_and_gates_are_those_of_the_formula():
    import cunorm

    x, _, _, other = operands()
    weight = other[:, :, :1, :1]
    assert_close(
        cj.rms_norm(x, weight, axis=(1,)),
        cunorm.reference.rms_norm(*map(np.asarray, (x, weight)), axis=(1,)),
    )
    with pytest.raises(ValueError, match=r"rms_norm: weight has shape \(1, 6, 4, 1\), expected"):
        cj.rms_norm(x, other[:1, :, :, :1], axis=(1,))


def test_plain_functions_read_jax_arrays_where_they_are():
    import cunorm

    x, weight, bias, _ = operands()
    y = cunorm.layer_norm(x, weight, bias, axis=(1,))
    assert isinstance(y, jax.Array)
    assert_close(y, formula(x, weight, bias))
