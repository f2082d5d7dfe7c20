# SPDX-License-Identifier: MIT
"""The devices of the operators' tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gpu_arrays import CPU, GPUS


@pytest.fixture(params=[CPU, GPUS[0]])
def device(request: Any) -> Any:
    """Return the CPU with NumPy arrays, or a GPU with CuPy arrays."""
    return request.param()


@pytest.fixture(params=[CPU, *GPUS])
def anywhere(request: Any) -> Any:
    """Return one of these, or a GPU with PyTorch tensors or JAX arrays."""
    return request.param()
