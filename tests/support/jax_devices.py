# SPDX-License-Identifier: MIT
"""A script that checks cunorm.jax on four devices of the host; other tests share its arrays."""

from __future__ import annotations

import pickle
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.experimental.serialize_executable import deserialize_and_load

import cunorm.jax
from cunorm.jax import add_rms_norm, group_norm, rms_norm, rms_norm_quantized
from tests.support import jax_formulas, jax_split

DRAWN = np.random.default_rng(0)
X, RESIDUAL, WEIGHT = (
    jnp.asarray(DRAWN.standard_normal(shape), jnp.float32) for shape in ((8, 16), (8, 16), (16,))
)
ARGNUMS = (0, 1, 2)


def loss(norm, *arrays):
    y, stream = norm(*arrays)
    return (y**2 * jnp.arange(16.0)).sum() + (stream**3).sum()


def assert_close(actual, expected):
    for got, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        # The bounds allow a few roundings of float32 in sums of 8 terms of up to about 100.
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=2e-4)


@jax.jit
def exact(x, residual, weight):
    """Return the gradients of `loss` of the formula in plain JAX."""
    return jax.grad(partial(loss, jax_formulas.add_rms_norm), ARGNUMS)(x, residual, weight)


def check_shard_map(mesh):
    """Check gradients outside and inside of shard_map, and the gradient of weight for each row."""
    specs, right = (P("d"), P("d"), P()), exact(X, RESIDUAL, WEIGHT)
    mapped = partial(jax.shard_map, mesh=mesh, in_specs=specs)

    def total(*arrays):
        return jax.lax.psum(loss(add_rms_norm, *arrays), "d")

    def row_gradient(x, residual, weight):
        own = jax.grad(lambda weight, *rows: loss(add_rms_norm, *rows, weight))
        return jax.vmap(own, (None, 0, 0))(weight, x, residual)

    @jax.jit
    def derived(*arrays):
        outside = jax.grad(mapped(total, out_specs=P()), ARGNUMS)
        inside = mapped(jax.grad(total, ARGNUMS), out_specs=specs)
        row_gradients = mapped(row_gradient, out_specs=P("d"), check_vma=False)
        return outside(*arrays), inside(*arrays), row_gradients(*arrays).sum(0)

    assert_close(derived(X, RESIDUAL, WEIGHT), (right, right, right[2]))


def check_a_weight_of_each_row_in_shard_map(mesh):
    """Check a weight that is spread over the devices with x, and a bias that they share."""
    specs, arrays = (P("d"), P("d"), P()), (X[:, None], RESIDUAL[:, None], WEIGHT)

    def total(norm, *arrays):
        return jax.lax.psum((norm(*arrays) ** 3).sum(), "d")

    mapped = partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P())
    own, formula = (mapped(partial(total, one.layer_norm)) for one in (cunorm.jax, jax_formulas))
    right = jax.jit(jax.grad(formula, ARGNUMS))(*arrays)
    assert_close(jax.grad(own, ARGNUMS)(*arrays), right)
    assert_close(jax.jit(jax.grad(own, ARGNUMS))(*arrays), right)


def check_frozen_operands_in_shard_map(mesh):
    """Check a norm of a norm: each operand's gradient, while the other operands are frozen."""
    arrays, specs = (X, WEIGHT, jnp.flip(WEIGHT)), (P("d"), P(), P())

    def total(norm, x, weight, other):
        y = jax.checkpoint(norm)(jnp.tanh(norm(x, weight)), other)
        return jax.lax.psum((y**3).sum(), "d")

    for checks in (False, True):
        mapped = partial(jax.shard_map, mesh=mesh, in_specs=specs, check_vma=checks, out_specs=P())
        own, formula = (mapped(partial(total, one.rms_norm)) for one in (cunorm.jax, jax_formulas))
        right = jax.jit(jax.grad(formula, ARGNUMS))(*arrays)
        for argnum in (0, 1, 2, 0):
            assert_close(jax.jit(jax.grad(own, argnum))(*arrays), right[argnum])
        assert_close(jax.grad(own, 2)(*arrays), right[2])  # without jit
    y = jax.shard_map(rms_norm, mesh=mesh, in_specs=specs[:2], out_specs=P("d"))(X, WEIGHT)
    assert_close(y, jax_formulas.rms_norm(X, WEIGHT))


def check_arrays_that_are_spread_out_under_jit(mesh):
    """Check sharded arrays, which XLA gathers for a custom call."""

    @jax.jit
    def derived(x, residual, weight):
        images = jax.grad(lambda x: (group_norm(x, 4) ** 3).sum())(x[:, None])
        return jax.grad(partial(loss, add_rms_norm), ARGNUMS)(x, residual, weight), images

    with jax.set_mesh(mesh):
        x, residual = jax.device_put((X, RESIDUAL), jax.NamedSharding(mesh, P("d")))
        found, images = derived(x, residual, WEIGHT)
    assert_close(found, exact(X, RESIDUAL, WEIGHT))
    formula = jax.grad(lambda x: (jax_formulas.group_norm(x, 4) ** 3).sum())
    assert_close(images, formula(X[:, None]))


def check_quantized_norms(mesh):
    """Check given scales: one for each row or for each device, with rows that are spread out."""

    def norm(x, scale):
        found = rms_norm_quantized(x, scale=scale, return_y=True)  # a build of test_quantized.py
        return found.q.astype(jnp.float32)

    def varied(x, scale):
        found = norm(x, scale)
        assert jax.typeof(found).manual_axis_type.varying == {"d"}  # although x is the same
        return found

    of_rows, of_devices = jnp.linspace(0.1, 1, 8)[:, None], jnp.array([0.1, 0.2, 0.5, 1.0])
    right, of_each = norm(X, of_rows), jnp.concatenate([norm(X, one) for one in of_devices])
    with jax.set_mesh(mesh):
        x, of_rows, of_devices = jax.device_put(
            (X, of_rows, of_devices), jax.NamedSharding(mesh, P("d"))
        )
        mapped = jax.shard_map(norm, in_specs=P("d"), out_specs=P("d"))
        for spread in (mapped, jax.jit(mapped), jax.jit(norm)):
            np.testing.assert_array_equal(spread(x, of_rows), right)
        mapped = jax.shard_map(varied, in_specs=(P(), P("d")), out_specs=P("d"))
        np.testing.assert_array_equal(mapped(X, of_devices), of_each)


def check_pmap_with_kernels_of_several_threads_on_all_devices_at_once():
    cunorm.set_num_threads(3)

    def derived(x, weight):
        return jax.lax.psum(jax.grad(lambda w: rms_norm(x, w).sum())(weight), "d")

    large, weight = jnp.ones((4, 256, 512)), jnp.ones(512)
    work = jax.pmap(derived, "d", in_axes=(0, None))
    for dweight in jax.block_until_ready([work(large * i, weight) for i in range(1, 11)]):
        np.testing.assert_allclose(dweight, 4 * 256, rtol=1e-5)


def check_an_executable_of_another_process(path):
    given = pickle.loads(Path(path).read_bytes())
    compiled = deserialize_and_load(*given, execution_devices=jax.devices()[:1])
    assert_close(compiled(WEIGHT, X), jax_formulas.rms_norm(X).sum(0))


def slow(x):
    return jax.lax.fori_loop(0, 200, lambda _, x: rms_norm(jnp.tanh(x @ x)), x)


if __name__ == "__main__":
    devices = jax.devices()
    assert len(devices) == 4
    usual = jax.sharding.Mesh(devices, "d")
    check_shard_map(usual)
    check_a_weight_of_each_row_in_shard_map(usual)
    check_frozen_operands_in_shard_map(usual)
    check_arrays_that_are_spread_out_under_jit(usual)
    explicit = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    check_arrays_that_are_spread_out_under_jit(explicit)
    for mesh in (usual, explicit):
        check_quantized_norms(mesh)
    check_pmap_with_kernels_of_several_threads_on_all_devices_at_once()
    check_an_executable_of_another_process(sys.argv[1])
    jax_split.check_some()
    pending = [jax.jit(slow)(jax.device_put(jnp.ones((256, 256)), one)) for one in devices]
    print("checked")
