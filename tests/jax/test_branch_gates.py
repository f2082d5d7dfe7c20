# SPDX-License-Identifier: MIT
"""cunorm.jax with gates of the branch, which is x before it is added to the residual stream."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.support.kinds import OnJax, OnJaxCpu
from tests.support.operands import draw

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

from jax.test_util import check_grads  # noqa: E402

import cunorm.jax  # noqa: E402
from tests.support import jax_formulas  # noqa: E402
from tests.support.jax_checks import assert_close, drawn, float64, pulled  # noqa: E402, F401
from tests.support.jax_frames import calls_of, lowered  # noqa: E402

B, S, D = SHAPE = 2, 3, 4
RMS, LAYER = ("add_rms_norm", {}), ("add_layer_norm", {"gate_activation": "identity"})
TANH = ("add_normalize", {"gate_activation": "tanh", "c": 2.0, "center": True})
# For each case: the shape of the gate, the function, its options, and whether there is a residual.
CASES = [
    *[(SHAPE, *RMS, True), ((D,), *LAYER, False), ((B, 1, D), *TANH, True)],
    *[((S, D), *RMS, False), ((B, 1, 1), *LAYER, True), ((B, S, 1), *TANH, False)],
]
MODULES = cunorm.jax, jax_formulas
BRANCH = {"gate_position": "branch"}
IDENTITY = BRANCH | {"gate_activation": "identity"}


def gated(name, module, *, with_residual=True, **options):
    """Return a norm of x, gate, weight and, if there is one, residual."""
    norm = partial(getattr(module, name), **BRANCH | options)
    if not with_residual:
        return lambda x, gate, weight: tuple(norm(x, None, weight, gate=gate))
    return lambda x, gate, weight, residual: tuple(norm(x, residual, weight, gate=gate))


def gradients_of(norm, result, arrays):
    """Return the gradients of a loss that uses one of the results."""
    return jax.grad(lambda arrays: (norm(*arrays)[result] ** 3).sum())(arrays)


@pytest.mark.parametrize("kind", [OnJaxCpu, pytest.param(OnJax, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("gate", "name", "options", "with_residual"), CASES)
def test_values_and_gradients_are_those_of_the_formula(gate, name, options, with_residual, kind):
    """With and without `jit`, and if only one of the results is used."""
    arrays = drawn(SHAPE, gate, (B, 1, D), *[SHAPE] * with_residual)
    dys = draw("dy", SHAPE, "float64"), draw("d_residual", SHAPE, "float64")
    own, formula = (gated(name, m, with_residual=with_residual, **options) for m in MODULES)
    right = jax.jit(partial(pulled, formula))(arrays, dys)
    with jax.default_device(kind().device):
        assert_close(pulled(own, arrays, dys), right)
        assert_close(jax.jit(partial(pulled, own))(arrays, dys), right)
        for result in (0, 1):
            right = jax.jit(partial(gradients_of, formula, result))(arrays)
            assert_close(gradients_of(own, result, arrays), right)


def test_gradients_of_the_stream_alone_ignore_infinite_numbers_of_the_norm():
    x, gate, residual = drawn(SHAPE, (B, 1, D), SHAPE)
    arrays = x.at[0].set(0.0), gate, residual.at[0].set(0.0)  # with an eps of 0, rstd is infinite
    own = gated("add_layer_norm", cunorm.jax, gate_activation="identity", eps=0.0)

    def found(x, gate, residual):
        return own(x, gate, jnp.full(D, jnp.inf), residual)

    def formula(x, gate, residual):
        return None, residual + x * gate

    assert_close(*(jax.grad(partial(cubed, one), (0, 1, 2))(*arrays) for one in (found, formula)))


def cubed(norm, *arrays):
    return (norm(*arrays)[1] ** 3).sum()


@pytest.mark.parametrize(("gate", "name", "options", "with_residual"), CASES)
def test_gradients_are_those_of_numerical_differentiation(gate, name, options, with_residual):
    norm = jax.jit(gated(name, cunorm.jax, with_residual=with_residual, **options))
    arrays = drawn(SHAPE, gate, (B, 1, D), *[SHAPE] * with_residual)
    check_grads(norm, arrays, order=1, modes=["rev"])


def with_gradients(norm):
    def loss(*arrays):
        y, stream = norm(*arrays)
        return (y**3).sum() + (stream**2).sum()

    return jax.grad(loss, (0, 1, 2, 3))


N = 5
BATCHES = {
    "gates of rows": ((0, 0, None, 0), ((N, *SHAPE), (N, B, 1, D), (D,), (N, *SHAPE))),
    "numbers of rows": ((0, 0, 0, 0), ((N, *SHAPE), (N, S, 1), (N, D), (N, *SHAPE))),
    "one gate": ((0, None, None, 0), ((N, *SHAPE), (B, 1, 1), (D,), (N, *SHAPE))),
    "one gate of x's shape": ((0, None, None, None), ((N, *SHAPE), SHAPE, (D,), SHAPE)),
    "gates of one x": ((None, 1, None, None), (SHAPE, (D, N), (D,), SHAPE)),
    "each row": ((0, 0, None, 0), ((N, D), (N, D), (D,), (N, D))),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_equals_its_examples_and_is_one_call(name):
    axes, shapes = BATCHES[name]
    arrays = drawn(*shapes)
    norms = [gated("add_rms_norm", module) for module in MODULES]
    own, formula = (jax.vmap(norm, axes) for norm in norms)
    assert_close(own(*arrays), jax.jit(formula)(*arrays))
    own, formula = (jax.vmap(with_gradients(norm), axes) for norm in norms)
    assert_close(own(*arrays), jax.jit(formula)(*arrays))
    assert "stablehlo.while" not in lowered(own, *arrays)
    assert len(calls_of(own, *arrays)) == 2


@pytest.mark.parametrize("wanted", [(0,), (0, 2, 3), (1,), (0, 1, 2, 3)])
def test_the_branch_is_saved_only_for_the_gradient_of_the_gate(wanted):
    arrays = drawn(SHAPE, (B, 1, D), (D,), SHAPE)

    def of_wanted(*own):
        given = dict(zip(wanted, own, strict=True))
        return gated("add_rms_norm", cunorm.jax)(
            *[given.get(number, one) for number, one in enumerate(arrays)]
        )

    _, pull = jax.vjp(of_wanted, *[arrays[number] for number in wanted])
    saved = [one for one in jax.tree.leaves(pull) if np.shape(one) == SHAPE]
    is_saved = any(np.array_equal(one, arrays[0]) for one in saved)
    assert is_saved == (1 in wanted)
    assert len(saved) == 1 + is_saved  # the new stream is saved, and residual is not


def test_gradients_have_the_dtypes_of_a_bfloat16_branch_and_a_float32_stream():
    x, gate, weight, stream = drawn(SHAPE, (B, S, 1), (D,), SHAPE)
    x, gate, stream = (
        one.astype(dtype)
        for one, dtype in ((x, "bfloat16"), (gate, "float32"), (stream, "float32"))
    )
    own = with_gradients(gated("add_rms_norm", cunorm.jax, dtype="float32"))
    found = jax.jit(own)(x, gate, weight, stream)
    assert [one.dtype for one in found] == [one.dtype for one in (x, gate, weight, stream)]
    wide = [one.astype("float64") for one in (x, gate, weight, stream)]
    right = jax.jit(with_gradients(gated("add_rms_norm", jax_formulas)))(*wide)
    for got, its, bound in zip(found, right, (2**-8, 1e-5, 1e-5, 1e-5), strict=True):
        # One rounding to the operand's dtype; before it, some of float32 in numbers of up to 100.
        np.testing.assert_allclose(got.astype("float64"), its, rtol=bound, atol=1e-4)


def dit(module, parameters, x, condition):
    """Return the result of blocks of adaLN-Zero, as diffusion transformers have them."""
    norm = partial(module.add_layer_norm, weight_offset=1.0, **IDENTITY)

    @jax.checkpoint
    def block(carry, own):
        branch, stream, gate = carry
        modulation, *matrices = own
        parts = jnp.split((jax.nn.silu(condition) @ modulation)[:, None], 6, axis=-1)
        for matrix, (shift, scale, its) in zip(matrices, (parts[:3], parts[3:]), strict=True):
            y, stream = norm(branch, stream, scale, shift, gate=gate)
            branch, gate = jnp.tanh(y @ matrix), its
        return (branch, stream, gate), None

    carry = x, jnp.zeros_like(x), jnp.ones((x.shape[0], 1, x.shape[-1]))
    (branch, stream, gate), _ = jax.lax.scan(block, carry, parameters)
    return stream + gate * branch


def test_blocks_of_adaln_zero_in_a_scan_have_right_gradients():
    *parameters, x, condition = drawn((2, D, 6 * D), (2, D, D), (2, D, D), SHAPE, (B, D))
    own, formula = (
        jax.value_and_grad(lambda *arrays, m=module: (dit(m, *arrays) ** 2).sum(), (0, 1, 2))
        for module in MODULES
    )
    right = jax.jit(formula)(parameters, x, condition)
    assert_close(own(parameters, x, condition), right)
    assert_close(jax.jit(own)(parameters, x, condition), right)
