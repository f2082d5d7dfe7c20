# SPDX-License-Identifier: MIT
"""The devices of the operators' tests, for which every build compiles with all options."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gpu_arrays import CPU, GPUS
from tests.support.internals import _compiler


@pytest.fixture(autouse=True)
def _compiles_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a text does not compile with all options for this machine; fewer would hide that."""
    probe = _compiler.probe

    def probe_and_compare(*given: Any) -> None:
        before = _compiler.optional(*given)
        probe(*given)
        if _compiler.optional(*given) == before:
            raise AssertionError("the C++ compiler does not compile a build with options it takes")

    monkeypatch.setattr(_compiler, "probe", probe_and_compare)


@pytest.fixture(params=[CPU, GPUS[0]])
def device(request: Any) -> Any:
    """Return the CPU with NumPy arrays, or a GPU with CuPy arrays."""
    return request.param()


@pytest.fixture(params=[CPU, *GPUS])
def anywhere(request: Any) -> Any:
    """Return one of these, or a GPU with PyTorch tensors or JAX arrays."""
    return request.param()
