# SPDX-License-Identifier: MIT
"""cunorm.jax under JAX's transformations, in float32, compared with formulas in JAX."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from tests.support.kinds import OnJax, OnJaxCpu
from tests.support.operands import draw

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

import cunorm.jax  # noqa: E402
from tests.support import jax_formulas  # noqa: E402
from tests.support.jax_formulas import add_rms_norm, rms_norm  # noqa: E402
from tests.support.jax_frames import lowered  # noqa: E402

# The bounds allow a few roundings of float32, 6e-8 each, in sums of up to 40 terms of about 1.
CLOSE = {"rtol": 2e-6, "atol": 1e-5}


def drawn(*shapes):
    return [jnp.asarray(draw(f"{i}", shape, "float32")) for i, shape in enumerate(shapes)]


def assert_close(actual, expected):
    for got, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert got.shape == right.shape
        np.testing.assert_allclose(got, right, **CLOSE)


def compare(transform, name, arrays):
    """Compare a transformed norm with its transformed formula."""
    norms = getattr(cunorm.jax, name), getattr(jax_formulas, name)
    got, right = jax.jit(lambda *arrays: [transform(norm)(*arrays) for norm in norms])(*arrays)
    assert_close(got, right)


def square(norm):
    return lambda *arrays: (norm(*arrays) ** 2 * jnp.arange(8.0)).sum()


def gated(in_axes):
    return lambda norm: jax.vmap(lambda x, g, w: norm(x, w, axis=1, gate=g), (*in_axes, None))


def on_images(axis):
    options = {"activation": "silu", "channel_axis": axis}
    return lambda norm: jax.vmap(lambda x, w: norm(x, 2, w, **options), (0, None))


def gradient_of_each(norm, **options):
    """Return gradients by each example's x and by a weight that the examples share."""
    return jax.vmap(jax.grad(square(lambda x, w: norm(x, weight=w, **options)), (0, 1)), (0, None))


of_each_image = partial(gradient_of_each, num_groups=2)


def gradient_of_x(norm):
    return jax.vmap(jax.grad(square(norm)), (0, None))


def three_times(norm):
    return jax.vmap(jax.vmap(jax.vmap(norm, (0, None)), (0, None)), (None, 0))


ROWS, IMAGES = ((4, 3, 8), 8), ((3, 2, 8, 8), 8)
# For each case: the transformation, the norm, its arrays, and whether kernels are called once.
BATCHES = {
    "rows": (lambda f: jax.vmap(f, (0, None)), "rms_norm", ROWS, True),
    "rows and weights": (lambda f: jax.vmap(f, (2, 1)), "rms_norm", ((3, 8, 4), (8, 4)), True),
    "no leading axes": (jax.vmap, "rms_norm", ((4, 8),), True),
    "gates": (gated((0, 0)), "rms_norm", ((5, 2, 3, 8),) * 2 + ((3, 8),), True),
    "gates of one x": (gated((None, 0)), "rms_norm", ((2, 3, 8), (5, 2, 3, 8), (3, 8)), True),
    "images": (on_images(1), "group_norm", IMAGES, True),
    "images, channels last": (on_images(-1), "group_norm", IMAGES, True),
    "three times": (three_times, "rms_norm", ((4, 5, 3, 8), (6, 8)), True),
    "gradients of each": (gradient_of_each, "rms_norm", ((4, 2, 3, 8), 8), True),
    "gradients of each image": (of_each_image, "group_norm", ((4, 2, 3, 8), 8), False),
    "the gradient of x": (gradient_of_x, "rms_norm", ROWS, True),
    "a Jacobian": (lambda f: jax.jacrev(f, (0, 1)), "rms_norm", (8, 8), True),
}
ON_GPU = pytest.param("gradients of each", OnJax, marks=pytest.mark.gpu)


@pytest.mark.parametrize(("name", "kind"), [*((name, OnJaxCpu) for name in BATCHES), ON_GPU])
def test_a_batch_equals_its_examples_and_is_one_call_if_they_share_parameters(name, kind):
    transform, norm, shapes, is_one_call = BATCHES[name]
    arrays = drawn(*shapes)
    with jax.default_device(kind().device):
        compare(transform, norm, arrays)
    text = lowered(transform(getattr(cunorm.jax, norm)), *arrays, platform=kind.platform)
    assert ("stablehlo.while" not in text) == is_one_call  # a while loops over examples


@pytest.mark.parametrize("kind", [OnJaxCpu, pytest.param(OnJax, marks=pytest.mark.gpu)])
def test_a_scan_over_layers_with_checkpoint_has_right_gradients(kind):
    x, weights = drawn((3, 8), (4, 8))

    def stack(add, x, weights):
        @jax.checkpoint
        def layer(carry, weight):
            y, stream = add(*carry, weight)
            return (jnp.sin(y), stream), y.sum()

        (x, stream), sums = jax.lax.scan(layer, (x, x), weights)
        return (x * stream).sum() + sums.sum()

    def derive(add):
        return jax.value_and_grad(partial(stack, add), (0, 1))

    with jax.default_device(kind().device):
        compare(derive, "add_rms_norm", (x, weights))


def test_inputs_may_be_donated_and_are_not_written_over_while_they_are_needed():
    x = draw("x", (3, 8), "float32")
    y = jax.jit(cunorm.jax.rms_norm, donate_argnums=0)(jnp.asarray(x))
    assert_close(y, rms_norm(x))
    y, kept = jax.jit(lambda x: (cunorm.jax.rms_norm(x + 1.0), x + 1.0))(x)
    assert_close((y, kept), (rms_norm(x + 1.0), x + 1.0))


def test_gradients_are_right_with_jit_disabled():
    x, weight = drawn((3, 8), (8,))
    with jax.disable_jit():
        got = jax.grad(square(cunorm.jax.rms_norm), (0, 1))(x, weight)
    assert_close(got, jax.jit(jax.grad(square(rms_norm), (0, 1)))(x, weight))


@pytest.mark.parametrize("rows", [(0, 8), (0, 3, 8)])
def test_zero_rows_give_empty_results_and_zero_gradients_of_parameters(rows):
    x, weight = jnp.zeros(rows), jnp.ones(8)
    y, pull = jax.vjp(cunorm.jax.layer_norm, x, weight, weight)
    dx, *sums = pull(y)
    assert y.shape == dx.shape == rows
    assert not np.any(sums)
    of_batch = jax.vmap(cunorm.jax.rms_norm, (0, None))(jnp.zeros((2, *rows)), weight)
    assert of_batch.shape == (2, *rows)
    _, pull = jax.vjp(lambda w: cunorm.jax.group_norm(jnp.zeros((0, 2, 8)), 2, w), weight)
    assert not pull(jnp.zeros((0, 2, 8)))[0].any()


def test_a_bfloat16_branch_of_a_float32_stream_has_gradients_of_each_dtype():
    x, stream = drawn((3, 8), (3, 8))
    x = x.astype(jnp.bfloat16)

    def loss(add, x, stream):
        y, new = add(x, stream)
        return (y.astype(jnp.float32) * jnp.arange(8.0)).sum() + (new**2).sum()

    def of_stream(x, stream):
        return cunorm.jax.add_rms_norm(x, stream).residual.sum()

    alone = jax.jit(jax.grad(of_stream, (0, 1)))(x, stream)
    assert [one.dtype for one in alone] == [x.dtype, stream.dtype]
    dx, dstream = jax.jit(jax.grad(partial(loss, cunorm.jax.add_rms_norm), (0, 1)))(x, stream)
    assert (dx.dtype, dstream.dtype) == (ml_dtypes.bfloat16, np.float32)
    exact = jax.jit(jax.grad(partial(loss, add_rms_norm), 1))(x.astype(jnp.float32), stream)
    # Only y is rounded to bfloat16 before the loss. dx is the float32 gradient, rounded once.
    np.testing.assert_allclose(dstream, exact, rtol=2e-6, atol=2**-8)
    np.testing.assert_array_equal(np.asarray(dx), np.asarray(dstream).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("uses_y", [False, True])
def test_a_stream_that_goes_on_wider_gives_residual_a_gradient_of_its_own_dtype(uses_y):
    x, residual = (one.astype(jnp.bfloat16) for one in drawn((3, 8), (3, 8)))

    def loss(residual):
        y, stream = cunorm.jax.add_rms_norm(x, residual, residual_dtype="float32")
        assert (y.dtype, stream.dtype) == (jnp.bfloat16, jnp.float32)
        return (stream * jnp.arange(8.0)).sum() + (y.astype(jnp.float32).sum() if uses_y else 0)

    found, exact = (jax.grad(loss)(one) for one in (residual, residual.astype(jnp.float32)))
    assert (found.dtype, exact.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))


def test_round_before_weight_rounds_as_the_published_models_do():
    x, weight = drawn((3, 8), (8,))
    x = x.astype(jnp.bfloat16)
    y = cunorm.jax.rms_norm(x, weight, round_before_weight=True)
    n = rms_norm(x.astype(jnp.float32)).astype(jnp.bfloat16).astype(jnp.float32)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, n * weight)
    dweight = jax.grad(lambda w: cunorm.jax.rms_norm(x, w, round_before_weight=True).sum())(weight)
    np.testing.assert_allclose(dweight, n.sum(0), rtol=1e-6)


def test_an_object_with_a_jax_array_is_accepted_as_in_jax_numpy():
    class Parameter:  # like Flax's nnx.Param
        def __init__(self, array):
            self.array = array

        def __jax_array__(self):
            return self.array

    x, weight, bias = drawn((3, 8), 8, 8)

    def f(weight, bias, kind=Parameter):
        return (cunorm.jax.layer_norm(kind(x), kind(weight), kind(bias)) ** 3).sum()

    plain = partial(f, kind=lambda array: array)
    for derive in (lambda f: f, lambda f: jax.grad(f, (0, 1)), lambda f: jax.jit(jax.grad(f, 1))):
        assert jax.tree.all(
            jax.tree.map(np.array_equal, *(derive(g)(weight, bias) for g in (f, plain)))
        )
    with pytest.raises(TypeError, match="rms_norm: weight is of type list, expected a JAX"):
        cunorm.jax.rms_norm(x, Parameter([1.0] * 8))
    with pytest.raises(TypeError, match=r": use cunorm\.jax, or pass weight\[\.\.\.\]$"):
        cunorm.rms_norm(x, Parameter(weight))


def test_numpy_arrays_are_accepted_and_a_c_of_minus_zero_differs_from_zero():
    x = np.ones((4, 8), np.float32)
    y = cunorm.jax.rms_norm(x, np.ones(8, np.float16))
    assert isinstance(y, jax.Array)
    assert y.dtype == np.float32
    for c in (0.0, -0.0):
        assert (np.signbit(cunorm.jax.normalize(x, c=c)) == np.signbit(c)).all()
