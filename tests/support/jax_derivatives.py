# SPDX-License-Identifier: MIT
"""Derivatives of functions of JAX arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.jax_checks import CLOSE


def tangents_of(arrays):
    return tuple([jnp.cos(3 * one) for one in arrays])


def cubed(f):
    return lambda *arrays: (f(*arrays) ** 3).sum()


def grad(f):
    return lambda *arrays: jax.grad(f, tuple(range(len(arrays))))(*arrays)


def pushed(f):
    """Return the tangents of a function's results, as a function of its arrays."""
    return lambda *arrays: jax.jvp(f, arrays, tangents_of(arrays))[1]


def dotted(f):
    """Return the sum of a function's results, with factors."""

    def loss(*arrays):
        leaves = jax.tree.leaves(f(*arrays))
        return sum(jnp.vdot(jnp.sin(1.0 + jnp.arange(one.size)), one.reshape(-1)) for one in leaves)

    return loss


DERIVATIVES = {
    "jvp": pushed,
    "jacfwd": lambda f: lambda *arrays: jax.jacfwd(f)(*arrays),
    "vjp": lambda f: grad(cubed(f)),
    "linearize": lambda f: lambda *arrays: jax.linearize(f, *arrays)[1](*tangents_of(arrays)),
    "jvp of jvp": lambda f: pushed(pushed(f)),
    "jvp of grad": lambda f: pushed(grad(cubed(f))),
    "grad of jvp": lambda f: grad(dotted(pushed(f))),
    "grad of grad": lambda f: grad(dotted(grad(cubed(f)))),
    "hessian": lambda f: lambda *a: jax.hessian(cubed(f), tuple(range(len(a))))(*a),
    "of y alone": lambda f: grad(dotted(grad(cubed(lambda *arrays: f(*arrays)[0])))),
    "of the stream alone": lambda f: pushed(grad(cubed(lambda *arrays: f(*arrays)[-1]))),
    "grad of jvp of grad": lambda f: grad(dotted(pushed(grad(cubed(f))))),
    "jvp of jvp of jvp": lambda f: pushed(pushed(pushed(f))),
}


def assert_close(found, right):
    for pair in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert pair[0].shape == pair[1].shape
        scale = max(1.0, float(jnp.abs(pair[1]).max()))
        np.testing.assert_allclose(*pair, rtol=CLOSE["rtol"], atol=CLOSE["atol"] * scale)
