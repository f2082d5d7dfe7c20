# SPDX-License-Identifier: MIT
"""Calls on JAX and other arrays together, which XLA cannot run; and refused JAX arrays.

NumPy allocates the memory of results, so tracemalloc sees it.
"""

from __future__ import annotations

import gc
import threading
import tracemalloc

import numpy as np
import pytest

import cunorm
from cunorm import NormForward, reference
from tests.support.bounds import check_forward
from tests.support.operands import draw
from tests.support.processes import in_process

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

SHAPE = (64, 1024)
WEIGHT = draw("weight", SHAPE[1], "float32")


def normalised():
    """Return the JAX array that a call with a NumPy weight returns."""
    return cunorm.rms_norm(jnp.asarray(draw("x", SHAPE, "float32")), WEIGHT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_result_is_a_jax_array_that_outlives_the_call(dtype):
    x = draw("x", SHAPE, dtype)
    y = cunorm.rms_norm(jnp.asarray(x), WEIGHT)
    gc.collect()
    assert isinstance(y, jax.Array)
    for one in (y, jax.jit(lambda y: y * 1)(y)):
        check_forward(NormForward(np.asarray(one)), x, WEIGHT, None, eps=1e-6)


def die_on_another_thread(holder):
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()


@pytest.mark.parametrize("end", [list.clear, die_on_another_thread])
def test_the_memory_of_a_result_is_freed_with_it(end):
    normalised()
    tracemalloc.start()
    try:
        holder = [normalised()]
        size = holder[0].nbytes
        gc.collect()
        with_it, _ = tracemalloc.get_traced_memory()
        assert with_it > size  # tracemalloc sees the result's memory
        end(holder)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < with_it - 0.9 * size
    finally:
        tracemalloc.stop()


def test_an_array_is_read_after_its_values_are_computed():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: jnp.tanh(y @ x), x))
    x, weight = jnp.eye(300) * 1e-3 + 0.5, np.ones(300, np.float32)
    expected = reference.rms_norm(np.asarray(slow(x)))
    for arrays in ((slow(x), weight), (slow(x),)):  # XLA makes the second call
        np.testing.assert_allclose(cunorm.rms_norm(*arrays), expected, rtol=1e-5)


def test_several_devices_are_refused_and_results_that_are_alive_at_exit_do_no_harm():
    in_process(
        """
import builtins, jax
jnp = jax.numpy
first, second = jax.devices()
x, weight = jnp.ones((4, 4)), np.ones(4, np.float32)
for arrays in ((jax.device_put(x, second),), (jax.device_put(x, second), weight)):
    assert (abs(cunorm.rms_norm(*arrays) - 1) < 1e-5).all()
mesh = jax.sharding.Mesh([first, second], "d")
for spec in (jax.P("d"), jax.P()):
    try:
        cunorm.rms_norm(jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)))
    except ValueError as error:
        assert "rms_norm: x is spread over 2 devices" in str(error), error
        assert "jax.device_put(x, one_device)" in str(error), error
    else:
        raise AssertionError("not refused")
large = jnp.ones((1 << 10, 1 << 12), "bfloat16")
builtins.kept = cunorm.rms_norm(large, np.ones(1 << 12, np.float32))
kept_too = cunorm.rms_norm(large, np.ones(1 << 12, np.float32))
pending = jax.jit(lambda x: jnp.sin(x).sum())(kept_too)
""",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        JAX_PLATFORMS="cpu",
    )


# --- refused arrays -------------------------------------------------------------------------------


def deleted(*shape):
    array = jnp.ones(shape)
    array.delete()
    return array


ONES = np.ones((3, 4), np.float32)
# For each case: how to call a function, the error, and its message.
REFUSED = {
    "deleted": (lambda f: f(deleted(3, 4)), ValueError, r"x is a deleted or donated.*copy\(x\)$"),
    "as weight": (lambda f: f(jnp.ones((3, 4)), deleted(4)), ValueError, "weight is a deleted"),
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
