# SPDX-License-Identifier: MIT
"""Draws and comparisons of JAX arrays in float64."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.internals import _compiler
from tests.support.operands import at, draw

# The bounds allow some roundings of float64 in sums of a few dozen terms.
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def drawn(*shapes):
    return [jnp.asarray(draw(f"{i} of rows", shape, "float64")) for i, shape in enumerate(shapes)]


def assert_close(found, right):
    for number, pair in enumerate(zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)):
        with at(f"result {number}"):
            assert pair[0].shape == pair[1].shape
            np.testing.assert_allclose(*pair, **CLOSE)


def pulled(norm, arrays, dy):
    """Return the result of a norm, and the gradients of its arrays."""
    y, pull = jax.vjp(norm, *arrays)
    return y, pull(dy)


@contextmanager
def without_compiler():
    """Let the reference do the work of kernels that are not loaded yet."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        patch.setenv("PATH", "")
        patch.setenv("CXX", "no-such-compiler")
        _compiler.forget()
        yield
    _compiler.forget()
