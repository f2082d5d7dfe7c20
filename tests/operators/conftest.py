# SPDX-License-Identifier: MIT
"""Fixtures for the tests of operators: devices, and a check that no build needs a second try."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gpu_arrays import CPU, GPUS
from tests.support.internals import _compiler


@pytest.fixture(autouse=True)
def _compiles_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a build compiles only without some options that the C++ compiler accepts."""
    probe = _compiler.probe

    def probe_and_compare(*given: Any) -> None:
        before = _compiler.optional(*given)
        probe(*given)
        if _compiler.optional(*given) == before:
            raise AssertionError("the C++ compiler accepts these options, but a build fails")

    monkeypatch.setattr(_compiler, "probe", probe_and_compare)


@pytest.fixture(params=[CPU, GPUS[0]])
def device(request: Any) -> Any:
    """Return the CPU with NumPy arrays, or a GPU with CuPy arrays."""
    return request.param()


@pytest.fixture(params=[CPU, *GPUS])
def anywhere(request: Any) -> Any:
    """Return the CPU, or a GPU with CuPy arrays, PyTorch tensors or JAX arrays."""
    return request.param()
