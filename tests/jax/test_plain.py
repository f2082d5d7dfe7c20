# SPDX-License-Identifier: MIT
"""The plain functions on JAX arrays: XLA makes the call, in its own memory."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.calls import FUNCTIONS, arrays_of, call_of, fields
from tests.support.operands import draw

jax = pytest.importorskip("jax", reason="JAX is not installed")

jnp = jax.numpy

import cunorm  # noqa: E402
from cunorm import _backend, _cpu, reference  # noqa: E402
from cunorm._arrays._jax import Jax  # noqa: E402
from cunorm.jax import _eager, _handler  # noqa: E402


@pytest.fixture
def frames(monkeypatch):
    """Collect where arguments and results of the calls lay; and take no array through DLPack."""
    seen = []
    pointers = _handler._pointers

    def pointers_and_see(settled, frame, results):
        found = pointers(settled, frame, results)
        seen.append(found)
        return found

    monkeypatch.setattr(_handler, "_pointers", pointers_and_see)
    for name in ("describe", "allocate", "export"):
        monkeypatch.setattr(Jax, name, None)
    return seen


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_a_call_of_xlas_on_the_arrays_own_memory(name, frames):
    arrays = call_of(name).arrays
    if name == "group_norm_backward":  # the others' formulas hold with any statistics
        saved = reference.group_norm_forward(arrays["x"], arrays["num_groups"])
        arrays |= {key: getattr(saved, key).astype(np.float32) for key in ("mean", "rstd")}
    given = {
        key: jnp.asarray(value) if isinstance(value, np.ndarray) else value
        for key, value in arrays.items()
    }
    result = jax.block_until_ready(getattr(cunorm, name)(**given))
    right = fields(getattr(reference, name)(**arrays))
    (pointers,) = frames
    for key, array in arrays_of(given).items():
        assert array.unsafe_buffer_pointer() in pointers, key
    assert fields(result).keys() == right.keys()
    for field, array in fields(result).items():
        assert isinstance(array, jax.Array)
        assert array.unsafe_buffer_pointer() in pointers, field
        # A few roundings of float32, in sums of up to 24 products of about 1.
        np.testing.assert_allclose(array, right[field], rtol=1e-5, atol=1e-5, err_msg=field)


def test_the_stream_that_is_not_written_is_x_itself():
    x = jnp.ones((2, 8))
    assert cunorm.add_rms_norm(x, None).residual is x


def test_a_call_is_made_once_its_arrays_are_there(frames):
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda _, y: jnp.tanh(y @ x), x))
    x = jnp.eye(300) * 1e-3 + 0.5
    expected = reference.rms_norm(np.asarray(slow(x)))
    np.testing.assert_allclose(cunorm.rms_norm(slow(x)), expected, rtol=1e-5)


def test_calls_of_other_frameworks_arrays_with_jaxs_go_the_other_way():
    x, weight = draw("x", (4, 8), "float32"), draw("weight", 8, "float32")
    right = reference.rms_norm(x, weight)
    for arrays in ((jnp.asarray(x), weight), (x, jnp.asarray(weight))):
        np.testing.assert_allclose(cunorm.rms_norm(*arrays), right, rtol=1e-6)
    out = np.empty_like(x)
    assert cunorm.rms_norm(jnp.asarray(x), weight, out=out) is out
    np.testing.assert_allclose(out, right, rtol=1e-6)


def test_a_deleted_array_is_refused():
    weight = jnp.ones(8)
    weight.delete()
    with pytest.raises(ValueError, match=r"^rms_norm: weight is a deleted or donated JAX array"):
        cunorm.rms_norm(jnp.ones((4, 8)), weight)


def test_another_jax_is_served_without_xla(monkeypatch):
    monkeypatch.setattr(_eager, "refused", lambda: "of another version")
    monkeypatch.setattr(_eager, "_compiled", None)
    x = draw("x", (4, 8), "float32")
    np.testing.assert_allclose(cunorm.rms_norm(jnp.asarray(x)), reference.rms_norm(x), rtol=1e-6)


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_forward", "layer_norm"])
def test_a_float64_result_is_refused_where_jax_would_cut_it(name):
    message = f"^{name}: a result of dtype float64: .*'jax_enable_x64', True"
    with pytest.raises(TypeError, match=message):
        getattr(cunorm, name)(jnp.ones((2, 8)), dtype="float64")


def test_a_kernel_that_does_not_compile_is_an_error_with_the_compilers_words(monkeypatch):
    def fail(build):
        raise RuntimeError(f"g++ does not compile {build.kernel}")

    _backend.forget()
    monkeypatch.setattr(_cpu, "library", fail)
    with pytest.raises(
        RuntimeError, match=r"cunorm: RuntimeError: g\+\+ does not compile row_norm"
    ):
        jax.block_until_ready(cunorm.rms_norm(jnp.ones((3, 11)), eps=0.125))
    monkeypatch.undo()
    assert jnp.isfinite(cunorm.rms_norm(jnp.ones((3, 11)), eps=0.125)).all()


def test_a_call_on_arrays_with_values_is_made_at_once_inside_what_jax_traces():
    x = jnp.arange(24.0).reshape(3, 8)
    expected = cunorm.rms_norm(cunorm.rms_norm(x))

    def add(z):
        twice = cunorm.rms_norm(cunorm.rms_norm(x))
        assert np.array_equal(np.asarray(twice), np.asarray(expected))
        return z + twice

    for transformed in (jax.jit(add), jax.vmap(add, None, axis_size=2, out_axes=None)):
        assert np.array_equal(np.asarray(transformed(x)), np.asarray(x + expected))
