# SPDX-License-Identifier: MIT
"""A script: cunorm.jax over four devices of the host; and what other processes draw from it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

import cunorm.jax
from cunorm.jax import add_rms_norm, group_norm, rms_norm

MESH = jax.sharding.Mesh(jax.devices(), "d")
ROWS = {"mesh": MESH, "in_specs": (P("d"), P()), "out_specs": P("d")}
SPECS = (P("d"), P("d"), P())
DRAWN = np.random.default_rng(0)
X, RESIDUAL, WEIGHT = (
    jnp.asarray(DRAWN.standard_normal(shape), jnp.float32) for shape in ((8, 16), (8, 16), (16,))
)


def formula(x, residual, weight):
    s = x + residual
    return s * jax.lax.rsqrt((s * s).mean(-1, keepdims=True) + 1e-6) * weight, s


def loss(norm, *arrays):
    y, stream = norm(*arrays)
    return (y**2 * jnp.arange(16.0)).sum() + (stream**3).sum()


def total(*arrays):
    return jax.lax.psum(loss(add_rms_norm, *arrays), "d")


def assert_alike(actual, expected):
    for got, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        # A few roundings of float32, in sums of 8 terms of up to about 100.
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=2e-4)


def check_gradients_of_a_shard_map():
    right = jax.grad(lambda *arrays: loss(formula, *arrays), (0, 1, 2))(X, RESIDUAL, WEIGHT)
    for check in (True, False):
        sharded = jax.shard_map(total, mesh=MESH, in_specs=SPECS, out_specs=P(), check_vma=check)
        assert_alike(jax.jit(jax.grad(sharded, (0, 1, 2)))(X, RESIDUAL, WEIGHT), right)
    inside = jax.shard_map(jax.grad(total, (0, 1, 2)), mesh=MESH, in_specs=SPECS, out_specs=SPECS)
    assert_alike(inside(X, RESIDUAL, WEIGHT), right)


def check_a_batch_in_a_shard_map():
    def each(norm, x, weight):
        own = jax.grad(lambda weight, x: loss(norm, x, x, weight))
        return jax.vmap(own, (None, 0))(weight, x)

    got = jax.shard_map(partial(each, add_rms_norm), check_vma=False, **ROWS)(X, WEIGHT)
    assert_alike(got, each(formula, X, WEIGHT))
    of_x = jax.grad(lambda x, weight: loss(add_rms_norm, x, x, weight))
    got = jax.shard_map(jax.vmap(of_x, (0, None)), **ROWS)(X, WEIGHT)
    assert_alike(got, jax.grad(lambda x: loss(formula, x, x, WEIGHT))(X))


def check_zero_rows_and_group_norms():
    assert jax.shard_map(lambda x, w: rms_norm(x[:0], w), **ROWS)(X, WEIGHT).shape == (0, 16)
    samples = X[:, None]
    sharded = jax.shard_map(lambda x, w: group_norm(x, 4, w), **ROWS)
    both = [
        jax.grad(lambda w, f=f: (f(samples, w) ** 3).sum())(WEIGHT)
        for f in (sharded, lambda x, w: group_norm(x, 4, w))
    ]
    assert_alike(*both)


def check_pmap():
    def each(x, residual, weight):
        dweight = jax.grad(lambda weight: loss(add_rms_norm, x, residual, weight))(weight)
        return jax.lax.psum(dweight, "d")

    right = jax.grad(lambda weight: loss(formula, X, RESIDUAL, weight))(WEIGHT)
    x, residual = (array.reshape(4, 2, 16) for array in (X, RESIDUAL))
    got = jax.pmap(each, "d", in_axes=(0, 0, None))(x, residual, WEIGHT)
    assert_alike(got, jnp.stack([right] * 4))


def check_sharded_arrays_under_jit():
    """XLA gathers them, as it knows nothing of what is called; the results are right."""
    explicit = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    for mesh in (MESH, explicit):
        with jax.set_mesh(mesh):
            spread = jax.device_put(X, jax.NamedSharding(mesh, P("d")))
            assert_alike(jax.jit(rms_norm)(spread, WEIGHT), formula(X, 0, WEIGHT)[0])
            for place in range(3) if mesh is explicit else (2,):
                arrays = (spread, spread, WEIGHT)
                got = jax.jit(jax.grad(partial(loss, add_rms_norm), place))(*arrays)
                assert_alike(got, jax.grad(partial(loss, formula), place)(X, X, WEIGHT))
            got = jax.jit(jax.grad(lambda x: (group_norm(x, 4) ** 3).sum()))(spread[:, None])
            assert_alike(got, jax.grad(lambda x: (group_norm(x, 4) ** 3).sum())(X[:, None]))


def check_plain_functions_refuse_arrays_over_several_devices():
    spread = jax.device_put(WEIGHT, jax.NamedSharding(MESH, P()))
    for arrays, name in (((X, spread), "weight"), ((jax.device_put(X, spread.sharding),), "x")):
        try:
            cunorm.rms_norm(*arrays)
        except ValueError as error:
            assert str(error).startswith(f"rms_norm: {name} is spread over 4 devices")
        else:
            raise AssertionError(f"{name} is not refused")


def check_kernels_of_several_threads_on_all_devices_at_once():
    cunorm.set_num_threads(3)
    large, weight = jnp.ones((4, 256, 512)), jnp.ones(512)
    work = jax.pmap(jax.grad(lambda x, w: rms_norm(x, w).sum(), (0, 1)), in_axes=(0, None))
    for _, dweight in jax.block_until_ready([work(large * i, weight) for i in range(1, 11)]):
        np.testing.assert_allclose(dweight, 256, rtol=1e-5)


def slow(x):
    again = lambda _, x: rms_norm(jnp.tanh(x @ x))  # noqa: E731
    return jax.lax.fori_loop(0, 400, again, x)


if __name__ == "__main__":
    assert len(jax.devices()) == 4
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            print(name, flush=True)
            check()
    pending = [jax.jit(slow)(jax.device_put(jnp.ones((256, 256)), one)) for one in jax.devices()]
