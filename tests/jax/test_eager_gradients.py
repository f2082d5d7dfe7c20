# SPDX-License-Identifier: MIT
"""Gradients outside of jit: in many threads at once, and hundreds of times."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from tests.support.operands import draw

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

import cunorm.jax  # noqa: E402
from tests.support.jax_formulas import rms_norm  # noqa: E402
from tests.support.jax_frames import _ffi  # noqa: E402

THREADS = 8


def drawn(*shapes):
    return [jnp.asarray(draw(f"eager {i}", shape, "float32")) for i, shape in enumerate(shapes)]


def loss(x, w, norm=cunorm.jax.rms_norm):
    return (norm(jnp.tanh(norm(x, w)), w) ** 3).sum()


@pytest.mark.parametrize("width", [5, 6])
def test_threads_that_differentiate_at_once_have_the_right_gradients(width, monkeypatch):
    """Each thread makes its own calls while others differentiate; threads share no trace."""
    x, w = drawn((3, width), width)
    exact = jax.jit(jax.grad(lambda *arrays: loss(*arrays, norm=rms_norm), (0, 1)))(x, w)
    run, together, ran = _ffi.run, Barrier(THREADS), []

    def run_slowly(*args):
        ran.append(args)
        time.sleep(0.03)
        return run(*args)

    def derive(thread):
        together.wait()
        return jax.grad(loss, thread % 2)(x, w)

    monkeypatch.setattr(_ffi, "run", run_slowly)
    with ThreadPoolExecutor(THREADS) as pool:
        for thread, got in enumerate(pool.map(derive, range(THREADS))):
            # The bounds allow a few roundings of float32 in sums of up to 18 terms of about 10.
            np.testing.assert_allclose(got, exact[thread % 2], rtol=1e-5, atol=1e-5)
    assert len(ran) == 4 * THREADS  # each thread: two forwards and two backwards


def square(x, w):
    return (cunorm.jax.rms_norm(x, w) ** 2).sum()


DERIVED = (
    jax.grad(square, (0, 1)),
    jax.grad(square),  # the weight is frozen
    jax.vmap(jax.grad(square, (0, 1)), (0, None)),
    jax.grad(jax.checkpoint(square), 1),
)


def test_hundreds_of_gradients_at_one_shape_compile_nothing_and_keep_nothing():
    (x, w), compiles = drawn((3, 7), 7), []

    def count(event, *_, **__):
        compiles.extend([event] if "compile" in event else [])

    def derive_all(times):
        """Derive, and return the number of objects that are alive."""
        for derive in DERIVED * times:
            jax.block_until_ready(derive(x, w))
        gc.collect()
        return len(gc.get_objects()) + 400 * len(jax.live_arrays())

    before = derive_all(3)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        after = derive_all(100)
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert not compiles
    assert after - before < 400  # less than one object for each gradient
