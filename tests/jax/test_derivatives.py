# SPDX-License-Identifier: MIT
"""Derivatives of cunorm.jax in forward mode and of higher orders, in float64."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.support.kinds import OnJax, OnJaxCpu

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

from jax.test_util import check_grads  # noqa: E402

import cunorm.jax  # noqa: E402
from tests.support.jax_checks import drawn, float64, without_compiler  # noqa: E402, F401
from tests.support.jax_derivatives import (  # noqa: E402
    DERIVATIVES,
    assert_close,
    cubed,
    grad,
    pushed,
)
from tests.support.jax_formulas import FORMULAS  # noqa: E402
from tests.support.jax_frames import calls_of  # noqa: E402

B, S, D = SHAPE = 2, 3, 6
PRE, BRANCH = ({"gate_position": one} for one in ("pre", "branch"))
TANH, GELU = ({"gate_activation": one} for one in ("tanh", "gelu"))
OFFSET = {"weight_offset": 1.0}
# The function, its operands besides x, its options, and the shapes of operands that are not usual.
CASES = [
    ("rms_norm", "weight", {}, {}),
    ("rms_norm", "weight bias", OFFSET, {"weight": (B, 1, D), "bias": (S, D)}),
    ("layer_norm", "weight bias gate", {}, {}),
    ("layer_norm", "weight bias gate", PRE | TANH, {}),
    ("layer_norm", "weight bias", {"axis": -2}, {"weight": (S, D), "bias": (S, D)}),
    ("l2_norm", "", {"groups": 2}, {}),
    ("l2_norm", "", {"axis": 1, "eps": 0.3}, {}),
    ("normalize", "weight gate", {"c": 2.0, "center": True, "groups": 3, "eps": 0.1} | GELU, {}),
    ("normalize", "gate", {"groups": 2} | PRE, {}),
    ("add_rms_norm", "residual weight", {}, {}),
    ("add_rms_norm", "", {}, {}),
    ("add_rms_norm", "residual weight gate", OFFSET, {}),
    ("add_rms_norm", "gate", BRANCH, {"gate": (B, S, 1)}),
    ("add_layer_norm", "residual weight gate", BRANCH, {"gate": (B, 1, D)}),
    ("add_layer_norm", "residual bias", {"axis": 1}, {"bias": (S, D)}),
    ("add_normalize", "residual gate bias", {"c": 3.0} | BRANCH | TANH, {}),
    ("add_normalize", "residual weight bias gate", {"center": True, "c": 1.5} | PRE, {}),
    ("group_norm", "weight bias", {"num_groups": 2, "activation": "gelu"}, {}),
    ("group_norm", "weight", {"num_groups": 2, "activation": "silu"}, {"weight": (B, D)}),
    ("group_norm", "", {"num_groups": 1, "activation": "tanh", "channel_axis": 1, "eps": 0.1}, {}),
    ("group_norm", "weight bias", {"num_groups": 3}, {}),
    ("instance_norm", "weight bias", {"activation": "gelu_tanh", "channel_axis": 1}, {}),
    ("instance_norm", "bias", {"activation": "sigmoid"}, {}),
]
IDS = [f"{number} {case[0]}" for number, case in enumerate(CASES)]


def operands(given, options, shapes):
    channels = (SHAPE[options.get("channel_axis", -1)],)
    usual = {"residual": SHAPE, "gate": SHAPE, "weight": channels, "bias": channels}
    return drawn(SHAPE, *((usual | shapes)[name] for name in given.split()))


def norm_of(module, function, given, options):
    """Return a norm of x and its operands; the new stream follows y."""
    norm = getattr(module, function)

    def run(x, *others):
        named = dict(zip(given.split(), others, strict=True))
        if not function.startswith("add_"):
            return norm(x, **named, **options)
        return jnp.stack([*norm(x, named.pop("residual", None), **named, **options)])

    return run


def of_one(norm, how, number, arrays):
    """Return the derivative by one operand."""

    def of_own(own):
        return norm(*arrays[:number], own, *arrays[number + 1 :])

    return DERIVATIVES[how](of_own)(arrays[number])


@pytest.mark.parametrize("how", DERIVATIVES)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_derivatives_are_those_of_the_formula(case, how):
    """By all operands, and by each alone."""
    function, given, options, shapes = case
    arrays = operands(given, options, shapes)
    count = range(len(arrays))
    norms = [norm_of(module, function, given, options) for module in (cunorm.jax, FORMULAS)]

    @jax.jit
    def derived(*arrays):
        return [
            [DERIVATIVES[how](norm)(*arrays), *(of_one(norm, how, n, arrays) for n in count)]
            for norm in norms
        ]

    with without_compiler():
        assert_close(*derived(*arrays))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [OnJaxCpu, pytest.param(OnJax, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_second_derivatives_are_those_of_numerical_differentiation(case, kind):
    function, given, options, shapes = case
    arrays = operands(given, options, shapes)
    norm = jax.jit(norm_of(cunorm.jax, function, given, options))
    with jax.default_device(kind().device):
        check_grads(norm, arrays, order=2, modes=("fwd", "rev"))


# --- calls and roundings --------------------------------------------------------------------------


def operators(derived, *arrays):
    return [one.text.split('"')[1] for one in calls_of(derived, *arrays)]


def of_x(derivative):
    """Return a derivative by x of a function of x and a weight."""
    return lambda f: lambda x, weight: derivative(lambda x: f(x, weight))(x)


# A derivative of a linear loss of a norm of x and weight, and its kernels.
KERNELS = {
    "jvp": (pushed, "forward jvp"),
    "grad": (grad, "forward backward"),
    "jvp of grad, by x": (of_x(lambda f: pushed(jax.grad(f))), "forward second"),
    "jvp of grad": (lambda f: pushed(grad(f)), "forward backward backward second"),
    "grad of grad, by x": (
        of_x(lambda f: jax.grad(lambda x: (jax.grad(f)(x) * jnp.arange(9.0)).sum())),
        "forward second",
    ),
}


@pytest.mark.parametrize("how", KERNELS)
def test_a_derivative_calls_few_kernels(how):
    """A batch makes as many calls."""
    x, weight = drawn((3, 9), 9)
    derivative, kernels = KERNELS[how]
    derived = derivative(lambda x, w: (cunorm.jax.layer_norm(x, w) * jnp.arange(9.0)).sum())
    expected = [f"row_{name}" for name in kernels.split()]
    assert operators(derived, x, weight) == expected
    assert operators(jax.vmap(derived, (0, None)), jnp.stack([x, x]), weight) == expected


def test_tangents_of_bfloat16_are_rounded_once_to_the_dtypes_of_the_results():
    x, residual, weight = (one.astype("float32") for one in drawn((3, 9), (3, 9), 9))
    x = x.astype(jnp.bfloat16)
    norm = cunorm.jax.add_rms_norm
    with without_compiler():
        y, stream = pushed(norm)(x, residual, weight)
        wide, exact = pushed(partial(norm, dtype="float32"))(x, residual, weight)
    assert (y.dtype, stream.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(y, wide.astype(jnp.bfloat16))
    np.testing.assert_array_equal(stream, exact)


@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_of_bfloat16_are_rounded_once(power):
    """With a power of 1, dy is constant."""
    x, weight, dy = (one.astype("float32") for one in drawn((3, 9), 9, (3, 9)))
    x = x.astype(jnp.bfloat16)

    def second(x, tangent):
        norm = partial(cunorm.jax.rms_norm, dtype="float32")
        return jax.jvp(jax.grad(lambda x: (norm(x, weight) ** power * dy).sum()), (x,), (tangent,))

    with without_compiler():
        found, right = (second(x.astype(t), jnp.cos(x).astype(t)) for t in (x.dtype, "float32"))
    for got, its in zip(found, right, strict=True):
        assert got.dtype == jnp.bfloat16
        # Before it is rounded, the result may differ by some roundings of float32.
        assert (got == its.astype(jnp.bfloat16)).mean() > 0.9
        np.testing.assert_allclose(got.astype("float32"), its, rtol=2**-8 * 1.01, atol=1e-5)


def test_the_rounding_before_weight_has_a_derivative_of_one():
    x, weight = (one.astype("float32") for one in drawn((3, 9), 9))
    x = x.astype(jnp.bfloat16)
    wide = x.astype("float32")

    def second(x, rounded):
        norm = partial(cunorm.jax.rms_norm, dtype="float32", round_before_weight=rounded)
        push = partial(jax.jvp, jax.grad(lambda x: cubed(norm)(x, weight)))
        return push((x,), (jnp.ones_like(x),))[1]

    with without_compiler():
        found, right = second(x, True), second(wide, False)
    # y is rounded to bfloat16, by at most 2**-9 of itself; it occurs in all terms.
    assert np.abs(found.astype("float32") - right).max() < 2**-6 * np.abs(right).max()
    assert (found != 0).all()
