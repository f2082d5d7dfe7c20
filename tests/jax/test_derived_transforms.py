# SPDX-License-Identifier: MIT
"""Derivatives of all orders of cunorm.jax under JAX's transformations, in float64."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.support.processes import in_process
from tests.support.real_gpu import XLA_FLAGS

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

import cunorm.jax  # noqa: E402
from tests.support import jax_formulas  # noqa: E402
from tests.support.jax_checks import drawn, float64, without_compiler  # noqa: E402, F401
from tests.support.jax_derivatives import (  # noqa: E402
    DERIVATIVES,
    assert_close,
    cubed,
    grad,
    pushed,
)

B, S, D = 4, 3, 6
POLICIES = jax.checkpoint_policies


def tripled(norm):
    return lambda x, w: norm(x, w) * 3


def scanned(norm):
    def step(carry, own, w):
        return jnp.tanh(norm(carry + own, w)), carry.sum()

    return lambda x, w: jax.lax.scan(partial(step, w=w), x[0], x)[0]


def batched(norm):
    """Batch x along another axis than the first, and weights."""
    batch = jax.vmap(norm, (1, 0), 2)
    return lambda x, w: batch(jnp.stack([x, -x], 1), jnp.stack([w, 2 * w]))


def nested(norm):
    batch = jax.vmap(jax.vmap(norm, (0, None)), (None, 0))
    return lambda x, w: batch(x, jnp.stack([w, 2 * w]))


def chosen(flag):
    """Return a conditional; under vmap, it is one or, if the condition is batched, a select."""

    def of_norm(norm):
        return lambda x, w: jax.lax.cond(flag(x), norm, lambda x, w: x * w.sum(), x, w)

    return of_norm


def sharded(check_vma):
    rows, mesh = jax.P("d"), jax.sharding.Mesh(np.array(jax.devices()[:2]), "d")
    specs = {"in_specs": (rows, jax.P()), "out_specs": rows, "check_vma": check_vma}
    return partial(jax.shard_map, mesh=mesh, **specs)


# Ways to call a norm of x and a weight.
WAYS = {
    "a call": lambda norm: norm,
    "jit": lambda norm: jax.jit(tripled(norm)),
    "vmap": lambda norm: jax.vmap(norm, (0, None)),
    "vmap along other axes": batched,
    "vmap of vmap": nested,
    "scan": scanned,
    "map": lambda norm: lambda x, w: jax.lax.map(lambda x: norm(x, w), x),
    "while_loop": lambda norm: lambda x, w: jax.lax.fori_loop(0, 2, lambda _, x: norm(x, w), x),
    "cond": chosen(lambda x: x.sum() > -1e9),
    "select": lambda norm: jax.vmap(chosen(lambda x: x.sum() > -1e9)(norm), (0, None)),
    "checkpoint": jax.checkpoint,
    "checkpoint that saves all": partial(jax.checkpoint, policy=POLICIES.everything_saveable),
    "checkpoint that saves products": partial(jax.checkpoint, policy=POLICIES.dots_saveable),
    "scan of checkpoint": lambda norm: scanned(jax.checkpoint(norm)),
    "custom_jvp": lambda norm: derived_by_hand(norm),
}
SHARDED = {"shard_map": sharded(True), "shard_map without check_vma": sharded(False)}


def derived_by_hand(norm):
    """Return a function whose own rule calls jax.jvp."""
    run = jax.custom_jvp(norm)
    run.defjvp(lambda primals, tangents: jax.jvp(norm, primals, tangents))
    return run


def stream(norms):
    norm = partial(norms.add_rms_norm, gate_position="branch")
    return lambda x, w: sum(norm(x, x * x, w, gate=jnp.tanh(w)))


def group(norms):
    norm = partial(norms.group_norm, num_groups=2, activation="silu")
    return lambda x, w: norm(x.reshape(-1, 1, D), weight=w).reshape(x.shape)


NORMS = {
    "rows": lambda norms: lambda x, w: norms.layer_norm(x, w, w * w),
    "stream": stream,
    "group": group,
}
REVERSE = ("vjp", "grad of grad", "grad of jvp", "grad of jvp of grad")  # not of while loops
HOW = ("jvp", "linearize", "jvp of jvp", "jvp of grad", "hessian", *REVERSE)


def check(ways, name, how):
    """Compare derivatives by x and weight, and by each alone, with those of the formula."""
    x, w = drawn((B, S, D), (D,))
    norms = [ways(NORMS[name](norms)) for norms in (cunorm.jax, jax_formulas)]
    derive = DERIVATIVES[how]

    def derived(norm, *arrays):
        of_x = derive(lambda x: norm(x, arrays[1]))(arrays[0])
        of_w = derive(lambda w: norm(arrays[0], w))(arrays[1])
        return derive(norm)(*arrays), of_x, of_w

    right = jax.jit(partial(derived, norms[1]))(x, w)
    with without_compiler():
        assert_close(jax.jit(partial(derived, norms[0]))(x, w), right)
        if ways in (WAYS["a call"], WAYS["vmap"], *SHARDED.values()):
            assert_close(derived(norms[0], x, w), right)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("way", WAYS)
def test_transformed_norms_have_the_derivatives_of_the_transformed_formula(way, name, how):
    if way == "while_loop" and how in (*REVERSE, "linearize", "jvp of grad", "hessian"):
        pytest.skip("with a constant number of steps it is a scan, else JAX derives it forward")
    check(WAYS[way], name, how)


@pytest.mark.exhaustive
def test_norms_in_shard_map_have_the_derivatives_of_the_formula():
    script = """import sys
import jax
from tests.jax.test_derived_transforms import NORMS, SHARDED, check

with jax.enable_x64(True):
    for ways in SHARDED.values():
        for name in NORMS:
            for how in ("jvp", "jvp of grad", "grad of jvp of grad"):
                check(ways, name, how)
print("checked")
"""
    flags = f"--xla_force_host_platform_device_count=2 {XLA_FLAGS}"
    found = in_process(script, setup="", timeout=600, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    assert found.endswith("checked\n")


# --- programs that need such derivatives ----------------------------------------------------------


def test_a_net_is_trained_on_the_residual_of_a_differential_equation():
    """As in physics-informed networks: the loss has second derivatives by the inputs."""

    def loss(norm, parameters, points):
        matrix, out, weight = parameters

        def u(x):
            h = jnp.tanh(norm(jnp.outer(x, out) @ matrix, weight))
            return (h @ out).sum()

        def residual(x):
            push = partial(jax.jvp, tangents=(jnp.ones_like(x),))
            slope = partial(push, u)
            return push(lambda x: slope((x,))[1], (x,))[1] + u(x)

        return (jax.vmap(residual)(points[:, None]) ** 2).mean()

    parameters, points = drawn((D, D), (D,), (D,)), drawn((7,))[0]
    derived = [
        jax.jit(jax.value_and_grad(partial(loss, norm.layer_norm)))
        for norm in (cunorm.jax, jax_formulas)
    ]
    with without_compiler():
        assert_close(*(one(parameters, points) for one in derived))


def test_a_loss_with_a_tangent_of_the_net_inside_has_the_right_gradient():
    """As in MeanFlow: the target of the net is made of its own tangent."""

    def loss(norm, parameters, x, v):
        def net(x, t):
            return jnp.tanh(norm(x @ parameters[0] + t, parameters[1])) @ parameters[2]

        u, tangent = jax.jvp(net, (x, 0.5), (v, 1.0))
        return ((u + 0.5 * tangent - jax.lax.stop_gradient(v - tangent)) ** 2).mean()

    parameters, (x, v) = drawn((D, D), (D,), (D, D)), drawn((B, D), (B, D))
    derived = [
        jax.jit(jax.value_and_grad(partial(loss, norm.rms_norm)))
        for norm in (cunorm.jax, jax_formulas)
    ]
    with without_compiler():
        assert_close(*(one(parameters, x, v) for one in derived))


def test_hundreds_of_second_derivatives_at_one_shape_compile_nothing():
    x, w = drawn((S, D), (D,))
    compiles = []

    def count(event, *_, **__):
        compiles.extend([event] if "compile" in event else [])

    derived = pushed(grad(cubed(cunorm.jax.rms_norm)))
    with without_compiler():
        for number in range(30):
            if number == 3:
                jax.monitoring.register_event_duration_secs_listener(count)
            jax.block_until_ready(derived(x, w))
    jax.monitoring.unregister_event_duration_listener(count)
    assert not compiles
