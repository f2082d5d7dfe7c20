# SPDX-License-Identifier: MIT
"""The plain functions on JAX arrays: XLA makes the call, in its own memory."""

from __future__ import annotations

import numpy as np
import pytest

import cunorm
from cunorm import reference
from tests.support.calls import FUNCTIONS, arrays_of, call_of, fields
from tests.support.kinds import OnJax, OnJaxCpu

jax = pytest.importorskip("jax", reason="JAX is not installed")

jnp = jax.numpy

from tests.support.internals import _backend, _cpu  # noqa: E402
from tests.support.jax_frames import _handler  # noqa: E402


@pytest.mark.parametrize("kind", [OnJaxCpu, pytest.param(OnJax, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_a_call_of_xlas_on_the_arrays_own_memory(name, kind, monkeypatch):
    kind, arrays, calls, find = kind(), call_of(name).arrays, [], _handler._pointers
    see = lambda *told: calls.append(find(*told)) or calls[-1]  # noqa: E731
    monkeypatch.setattr(_handler, "_pointers", see)
    if name == "group_norm_backward":  # the others' formulas hold with any statistics
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
        # A few roundings of float32, in sums of up to 24 products of about 1.
        np.testing.assert_allclose(array, right[field], rtol=1e-5, atol=1e-5, err_msg=field)


def test_the_stream_that_is_not_written_is_x_itself():
    x = jnp.ones((2, 8))
    assert cunorm.add_rms_norm(x, None).residual is x


def test_a_kernel_that_does_not_compile_is_an_error_with_the_compilers_words(monkeypatch):
    def fail(build):
        raise RuntimeError(f"g++ does not compile {build.kernel}")

    _backend.forget()
    with monkeypatch.context() as patch:
        patch.setattr(_cpu, "library", fail)
        with pytest.raises(RuntimeError, match=r"cunorm: RuntimeError: g\+\+ does not compile row"):
            jax.block_until_ready(cunorm.rms_norm(jnp.ones((3, 11)), eps=0.125))
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
