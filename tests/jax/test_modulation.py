# SPDX-License-Identifier: MIT
"""cunorm.jax with weights and biases that differ between rows."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.kinds import OnJax, OnJaxCpu
from tests.support.operands import at, draw

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

from jax.test_util import check_grads  # noqa: E402

import cunorm.jax  # noqa: E402
from tests.support import jax_formulas  # noqa: E402
from tests.support.jax_checks import assert_close, drawn, float64, pulled  # noqa: E402, F401
from tests.support.jax_frames import calls_of, lowered  # noqa: E402

B, F, S, D = 2, 3, 4, 5
# The shapes of a parameter, and of x.
SHAPES = [
    *[((D,), (B, S, D)), ((1, D), (B, S, D)), ((1, 1, D), (B, S, D)), ((B, 1, D), (B, S, D))],
    *[((1, S, D), (B, S, D)), ((S, D), (B, S, D)), ((B, S, D), (B, S, D))],
    *[((1, D), (B, D)), ((B, D), (B, D)), ((B, F, 1, D), (B, F, S, D))],
]


@pytest.mark.parametrize(
    ("shape", "x_shape", "kind"),
    [
        *((*shapes, OnJaxCpu) for shapes in SHAPES),
        pytest.param((B, 1, D), (B, S, D), OnJax, marks=pytest.mark.gpu),
    ],
)
def test_values_and_gradients_are_those_of_the_formula(shape, x_shape, kind):
    """Also with one parameter that all rows share, by `vjp` with and without `jit`."""
    row = shape[-1:]
    for weight, bias in ((shape, shape), (shape, row), (row, shape)):
        arrays, dy = drawn(x_shape, weight, bias), draw("dy", x_shape, "float64")
        own, formula = (
            partial(module.layer_norm, weight_offset=1.0) for module in (cunorm.jax, jax_formulas)
        )
        right = jax.jit(partial(pulled, formula))(arrays, dy)
        with jax.default_device(kind().device), at(f"weight {weight}, bias {bias}"):
            assert_close(pulled(own, arrays, dy), right)
            assert_close(jax.jit(partial(pulled, own))(arrays, dy), right)


@pytest.mark.parametrize(("shape", "x_shape"), SHAPES)
def test_gradients_are_those_of_numerical_differentiation(shape, x_shape):
    norm = jax.jit(cunorm.jax.layer_norm)
    check_grads(norm, drawn(x_shape, shape, shape), order=1, modes=["rev"])


@pytest.mark.parametrize("kind", [OnJaxCpu, pytest.param(OnJax, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("shape", "axis"), [((1, 6), -1), ((3, 6), -1), ((3, 6), 1), ((6,), 1)])
def test_a_group_norm_has_parameters_of_each_sample(shape, axis, kind):
    x_shape = (3, 4, 6) if axis == -1 else (3, 6, 4)
    dy, options = draw("dy", x_shape, "float64"), {"channel_axis": axis, "activation": "silu"}
    for weight, bias in ((shape, shape), (shape, (6,)), ((6,), shape)):
        arrays = drawn(x_shape, weight, bias)

        def norm(x, *parameters, module=cunorm.jax):
            return module.group_norm(x, 2, *parameters, **options)

        right = jax.jit(partial(pulled, partial(norm, module=jax_formulas)))(arrays, dy)
        with jax.default_device(kind().device), at(f"weight {weight}, bias {bias}"):
            assert_close(jax.jit(partial(pulled, norm))(arrays, dy), right)


def over_weights(norm):
    return jax.vmap(norm, (None, 0, None))


def of_each(norm):
    """Return gradients of each example by a weight that the examples share and a bias of each."""

    def loss(*arrays):
        return (norm(*arrays) ** 3).sum()

    return jax.vmap(jax.grad(loss, (0, 1, 2)), (0, None, 0))


def nested(norm):
    return jax.vmap(jax.vmap(norm, (0, 1, None), 1), (0, None, 0))


BATCHES = {
    "weights of one x": (over_weights, ((S, D), (3, D), (D,))),
    "modulated weights of one x": (over_weights, ((B, S, D), (3, B, 1, D), (S, D))),
    "each example's scale and shift": (jax.vmap, ((B, S, D), (B, D), (B, D))),
    "the batch axis is the last": (
        lambda norm: jax.vmap(norm, (2, 1, 2), -1),
        ((S, D, B), (D, B), (1, D, B)),
    ),
    "gradients of each example": (of_each, ((B, S, D), (D,), (B, D))),
    "gradients of modulated examples": (of_each, ((B, F, S, D), (F, 1, D), (B, 1, S, D))),
    "nested": (nested, ((B, F, S, D), (D, F), (B, D))),
    "gradients of nested": (
        lambda norm: of_each(nested(norm)),
        ((3, B, F, S, D), (D, F), (3, B, D)),
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_of_modulated_rows_equals_its_examples_and_is_one_call(name):
    transform, shapes = BATCHES[name]
    arrays = drawn(*shapes)
    own, formula = (transform(module.layer_norm) for module in (cunorm.jax, jax_formulas))
    assert_close(own(*arrays), jax.jit(formula)(*arrays))
    assert "stablehlo.while" not in lowered(own, *arrays)
    assert len(calls_of(own, *arrays)) == (2 if "gradients" in name else 1)


@pytest.mark.parametrize(("shape", "is_one_call"), [((3, 6), True), ((1, 6), False), ((6,), False)])
def test_a_batch_of_group_norms_is_one_call_if_each_sample_has_parameters(shape, is_one_call):
    for axes, batch in (((0, 0, 0), [2]), ((0, None, None), [])):  # of each example, and shared
        arrays = drawn((2, 3, 4, 6), (*batch, *shape), (*batch, *shape))

        def of_each(module, axes=axes):
            def loss(x, *parameters):
                return (module.group_norm(x, 2, *parameters) ** 3).sum()

            return jax.vmap(jax.grad(loss, (0, 1, 2)), axes)

        own, formula = (of_each(module) for module in (cunorm.jax, jax_formulas))
        assert_close(own(*arrays), jax.jit(formula)(*arrays))
        assert ("stablehlo.while" not in lowered(own, *arrays)) == is_one_call


def test_a_batch_with_more_axes_of_parameters_than_kernels_walk_is_a_loop():
    x, weight, bias = drawn((2, B, F, S, 2, D), (F, 1, 1, D), (2, 2, D))

    def of_each(norm):
        grad = jax.grad(lambda x, b, w: (norm(x, w, b) ** 3).sum(), (0, 1))
        return jax.vmap(grad, (0, 0, None))

    own, formula = (of_each(module.layer_norm) for module in (cunorm.jax, jax_formulas))
    assert_close(own(x, bias, weight), jax.jit(formula)(x, bias, weight))
    assert "stablehlo.while" in lowered(own, x, bias, weight)
