# SPDX-License-Identifier: MIT
"""The memory for a backward's partial sums, where the caller gives it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cunorm import _checks, _cuda
from cunorm._arrays import Device, Operand, describe_memory
from cunorm._calls import BackwardForm
from cunorm._checks import Geometry
from cunorm._cpu_plan import cpu_parts
from cunorm._cuda_plan import cuda_parts
from cunorm._dtypes import DType
from cunorm._plan import Walk, sums_pitch


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
    return parameters * workspace_size(compute, where.walk, sm_count)


def workspace_size(compute: DType, where: Walk, sm_count: int | None) -> int:
    """Return the bytes that partial sums for one parameter take at most; None: on a CPU."""
    rows = where.not_empty().rows
    parts = cpu_parts(rows) if sm_count is None else min(rows, cuda_parts(where, sm_count))
    return parts * sums_pitch(where, twice=True) * compute.itemsize
