# SPDX-License-Identifier: MIT
"""JAX arrays that cannot be read where they are: refused, with the fix named."""

from __future__ import annotations

import numpy as np
import pytest

import cunorm

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy


def deleted(*shape):
    array = jnp.ones(shape)
    array.delete()
    return array


def inside(transform):
    return lambda f: transform(lambda x: f(x).sum())(jnp.ones((3, 4)))


TRACER = r"x is a JAX tracer.*: use cunorm\.jax there"
ONES = np.ones((3, 4), np.float32)
# Of each: a call of a function, the error, and what it says.
REFUSED = {
    "deleted": (lambda f: f(deleted(3, 4)), ValueError, r"x is a deleted or donated.*copy\(x\)$"),
    "as weight": (lambda f: f(jnp.ones((3, 4)), deleted(4)), ValueError, "weight is a deleted"),
    "in jit": (inside(jax.jit), TypeError, TRACER),
    "in grad": (inside(jax.grad), TypeError, TRACER),
    "in vmap": (inside(jax.vmap), TypeError, TRACER),
    "int32": (lambda f: f(jnp.arange(3)), TypeError, "x has dtype int32, expected float16, bfl"),
    "float8": (lambda f: f(jnp.ones(3, "float8_e4m3fn")), TypeError, "x has dtype float8_e4m3fn"),
    "a key": (lambda f: f(jax.random.key(0)), TypeError, "x has dtype key<fry>"),
    "no values": (lambda f: f(jax.eval_shape(lambda: ONES)), TypeError, "type ShapeDtypeStruct, "),
    "float64": (
        lambda f: f(jnp.ones(8), dtype="float64"),
        TypeError,
        "dtype float64: .*x64', True",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_array_without_memory_of_a_known_dtype_is_refused(name):
    call, error, message = REFUSED[name]
    for _ in range(2):
        with pytest.raises(error, match=f"^rms_norm: .*{message}"):
            call(cunorm.rms_norm)
