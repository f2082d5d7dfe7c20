# SPDX-License-Identifier: MIT
"""What cunorm.jax is told: arrays of NumPy, too, and numbers as they are."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import cunorm.jax  # noqa: E402


def test_numpy_arrays_are_taken_and_jax_arrays_returned():
    y = cunorm.jax.rms_norm(np.ones((4, 8), np.float32), np.ones(8, np.float16))
    assert isinstance(y, jax.Array)
    assert y.dtype == np.float32


def test_minus_zero_is_another_length_than_zero():
    for c in (0.0, -0.0):
        y = cunorm.jax.normalize(jax.numpy.ones((4, 8)), c=c)
        assert (np.signbit(y) == np.signbit(c)).all()
