# SPDX-License-Identifier: MIT
"""The devices that tests of operators run on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gpu_arrays import CPU, GPUS


@pytest.fixture(params=[CPU, GPUS[0]])
def device(request: Any) -> Any:
    """Return what moves arrays to the CPU, where they are, or to a GPU as CuPy's."""
    return request.param()


@pytest.fixture(params=[CPU, *GPUS])
def anywhere(request: Any) -> Any:
    """Return the same, or what moves them to a GPU as PyTorch's or JAX's."""
    return request.param()
