# SPDX-License-Identifier: MIT
"""JAX arrays that cannot be read where they are: refused, with the fix named."""

from __future__ import annotations

import pytest

import cunorm

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy


def deleted(*shape):
    array = jnp.ones(shape)
    array.delete()
    return array


def donated():
    array = jnp.ones((3, 4))
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    return array


def inside(transform):
    return lambda f: transform(lambda x: f(x).sum())(jnp.ones((3, 4)))


TRACER = r"x is a JAX tracer.*: use cunorm\.jax there"
# Of each: a call of a function, the error, and what it says.
REFUSED = {
    "deleted": (lambda f: f(deleted(3, 4)), ValueError, r"x is a deleted or donated.*copy\(x\)$"),
    "donated": (lambda f: f(donated()), ValueError, "x is a deleted or donated"),
    "as weight": (lambda f: f(jnp.ones((3, 4)), deleted(4)), ValueError, "weight is a deleted"),
    "in jit": (inside(jax.jit), TypeError, TRACER),
    "in grad": (inside(jax.grad), TypeError, TRACER),
    "in vmap": (inside(jax.vmap), TypeError, TRACER),
    "int32": (lambda f: f(jnp.arange(3)), TypeError, "x has dtype int32, expected float16, bfl"),
    "complex": (lambda f: f(jnp.ones(3, "complex64")), TypeError, "x has dtype complex64, expect"),
    "float8": (lambda f: f(jnp.ones(3, "float8_e4m3fn")), TypeError, "x has dtype float8_e4m3fn"),
    "a key": (lambda f: f(jax.random.key(0)), TypeError, "x has dtype key<fry>"),
    "no values": (
        lambda f: f(jax.ShapeDtypeStruct((3,), "float32")),
        TypeError,
        "x is of type ShapeDtypeStruct, expected a NumPy",
    ),
    "float64": (
        lambda f: f(jnp.ones((2, 8)), dtype="float64"),
        TypeError,
        "a result of dtype float64: .*'jax_enable_x64', True",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_array_without_memory_of_a_known_dtype_is_refused(name):
    call, error, message = REFUSED[name]
    for _ in range(2):
        with pytest.raises(error, match=f"^rms_norm: .*{message}"):
            call(cunorm.rms_norm)
