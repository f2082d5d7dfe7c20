# SPDX-License-Identifier: MIT
"""The memory for a backward's partial sums, where the caller gives it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cunorm import _checks, _cuda, _plan
from cunorm._arrays import Device, Operand, describe_memory
from cunorm._calls import BackwardForm
from cunorm._checks import Geometry
from cunorm._dtypes import DType


def given_workspace(function: str, workspace: Any, x: Operand, form: BackwardForm) -> Operand:
    """Describe the memory that the caller gives."""
    operand = describe_memory(function, "workspace", workspace, _needed(form, x.device))
    if operand.device is not x.device:
        _checks.same_device(function, x.form, [("workspace", operand.form)])
    return operand


@lru_cache(maxsize=1024)
def _needed(form: BackwardForm, device: Device) -> int:
    return workspace_bytes(form.where, form.types.compute, form.parameters, device)


def workspace_bytes(where: Geometry, compute: DType, parameters: int, device: Device) -> int:
    """Return the bytes that the partial sums for so many parameters take at most."""
    if not parameters:
        return 0
    sm_count = _cuda.device_limits(device).sm_count if device.kind == "cuda" else None
    return parameters * _plan.workspace_size(compute, where.walk, sm_count)
