# SPDX-License-Identifier: MIT
"""The plain functions on JAX arrays: XLA makes the call, on the arrays' own memory."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import Mock

import numpy as np
import pytest

import cunorm
from cunorm import reference
from tests.support.calls import FUNCTIONS, arrays_of, call_of, fields
from tests.support.kinds import OnJax, OnJaxCpu

jax = pytest.importorskip("jax", reason="JAX is not installed")

jnp = jax.numpy

import cunorm.jax  # noqa: E402
from tests.support.internals import _cpu, _memo  # noqa: E402
from tests.support.jax_frames import _ffi, _handler  # noqa: E402


@pytest.mark.parametrize("kind", [OnJaxCpu, pytest.param(OnJax, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_xla_calls_every_function_on_the_arrays_own_memory(name, kind, monkeypatch):
    kind, arrays, calls = kind(), call_of(name).arrays, []
    find = _handler._Executable.pointers

    def see(*args):
        calls.append(find(*args))
        return calls[-1]

    monkeypatch.setattr(_handler._Executable, "pointers", see)
    if name == "group_norm_backward":  # it needs the statistics of x
        saved = reference.group_norm_forward(arrays["x"], arrays["num_groups"])
        arrays |= {key: getattr(saved, key).astype(np.float32) for key in ("mean", "rstd")}
    given = arrays | {key: kind.put(array) for key, array in arrays_of(arrays).items()}
    result = jax.block_until_ready(getattr(cunorm, name)(**given))
    right = fields(getattr(reference, name)(**arrays))
    (pointers,) = calls
    for key, array in arrays_of(given).items():
        assert array.unsafe_buffer_pointer() in pointers, key
    assert fields(result).keys() == right.keys()
    for field, array in fields(result).items():
        assert kind.is_own(array, "float32")
        assert array.unsafe_buffer_pointer() in pointers, field
        # The bounds allow a few roundings of float32 in sums of up to 24 products of about 1.
        np.testing.assert_allclose(array, right[field], rtol=1e-5, atol=1e-5, err_msg=field)


def test_the_stream_that_is_not_written_is_x_itself():
    x = jnp.ones((2, 8))
    assert cunorm.add_rms_norm(x, None).residual is x


def test_a_kernel_that_does_not_compile_is_an_error_with_the_compilers_words(monkeypatch):
    def fail(builds):
        raise RuntimeError(f"g++ does not compile {next(iter(builds)).kernel}")

    _memo.clear_all()
    with monkeypatch.context() as patch:
        patch.setattr(_cpu, "libraries", fail)
        with pytest.raises(RuntimeError, match=r"cunorm: RuntimeError: g\+\+ does not compile row"):
            jax.block_until_ready(cunorm.rms_norm(jnp.ones((3, 11)), eps=0.125))
    assert jnp.isfinite(cunorm.rms_norm(jnp.ones((3, 11)), eps=0.125)).all()


def test_a_call_on_arrays_with_values_is_made_at_once_inside_a_trace():
    x = jnp.arange(24.0).reshape(3, 8)
    expected = cunorm.rms_norm(cunorm.rms_norm(x))

    def add(z):
        twice = cunorm.rms_norm(cunorm.rms_norm(x))
        assert np.array_equal(np.asarray(twice), np.asarray(expected))
        return z + twice

    for transformed in (jax.jit(add), jax.vmap(add, None, axis_size=2, out_axes=None)):
        assert np.array_equal(np.asarray(transformed(x)), np.asarray(x + expected))


@pytest.mark.parametrize(("kind", "eps"), [(TypeError, 0.5), (ValueError, 0.25)])
def test_an_error_while_jax_traces_a_call_is_not_swallowed(kind, eps, monkeypatch):
    monkeypatch.setattr(_ffi, "_ffi_call", Mock(side_effect=kind("of ours")))
    for _ in range(2):
        with pytest.raises(kind, match="of ours"):
            cunorm.rms_norm(jnp.ones((3, 13)), eps=eps)
    monkeypatch.undo()
    assert jnp.isfinite(cunorm.rms_norm(jnp.ones((3, 13)), eps=eps)).all()


def test_a_float64_result_is_refused_where_x64_is_off_even_if_it_was_on_before():
    x = jnp.ones((3, 8))
    for norm in (cunorm.rms_norm, cunorm.jax.rms_norm):
        with jax.enable_x64(True):
            assert norm(x, dtype="float64").dtype == np.float64
        with pytest.raises(TypeError, match=r"^rms_norm: a result of dtype float64: .*x64', True"):
            norm(x, dtype="float64")


def test_no_array_is_kept_alive_and_what_is_compiled_survives_an_emptied_cache():
    x, compiled = jnp.ones((3, 17)), jax.jit(cunorm.jax.rms_norm)
    results = [f(x) for f in (compiled, cunorm.jax.rms_norm, cunorm.rms_norm)]
    jax.block_until_ready(results)
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is None
    _memo.clear_all()
    fresh = jnp.ones((3, 17))
    for f in (compiled, cunorm.jax.rms_norm, cunorm.rms_norm):
        assert np.array_equal(f(fresh), results[0])
