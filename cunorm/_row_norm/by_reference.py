# SPDX-License-Identifier: MIT
"""Row norms by `cunorm.reference`, which does the kernels' work where there is no C++ compiler."""

from collections.abc import Sequence
from math import prod
from typing import Any

from cunorm._core.dtypes import numpy_dtype
from cunorm._core.operands import Kind, arguments, operand_of
from cunorm._row_norm.kernels import TABLE
from cunorm._row_norm.spec import RowBackwardSpec, RowForwardSpec
from cunorm.reference import normalize_backward, normalize_forward
from cunorm.reference.rows import store


def forward_by_reference(spec: RowForwardSpec, arrays: Sequence[Any]) -> None:
    inputs, results = arguments(TABLE.forward_inputs, TABLE.forward_results, arrays)
    stream = results["residual"]
    exact = normalize_forward(
        **inputs,
        residual_dtype=None if stream is None else stream.dtype,
        eps=spec.mean_eps(prod(inputs["x"].shape[spec.axis :]) // spec.groups),
        **spec.options(),
    )
    store(stream, exact.residual)  # first, as y may be exactly x or residual
    for name in ("y", "mean", "rstd"):
        store(results[name], getattr(exact, name))


def backward_by_reference(spec: RowBackwardSpec, arrays: Sequence[Any]) -> None:
    inputs, results = arguments(TABLE.backward_inputs, TABLE.backward_results, arrays)
    wanted = [slot for slot in TABLE.backward_results if results[slot.argument] is not None]
    exact = normalize_backward(
        **inputs,
        x_dtype=None if spec.x_dtype is None else numpy_dtype(spec.x_dtype),
        needs={operand_of(slot) for slot in wanted},
        **spec.options(),
    )
    for slot in wanted:
        is_added = spec.accumulate and slot.kind is Kind.PARAMETER
        store(results[slot.argument], getattr(exact, slot.argument), added=is_added)
