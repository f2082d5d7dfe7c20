# SPDX-License-Identifier: MIT
"""Planned: calls of row norms run in float64, as whole calls but for their kernels."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from cunorm._arrays._torch_private import OperatorMode
from cunorm._arrays.torch import TORCH_DTYPES
from cunorm._core.dtypes import parse_dtype
from cunorm._core.plan import OpDef, spec_from_json
from cunorm._core.tensor import CPU, TensorSpec
from cunorm.torch._pair import ROW

_F64 = torch.float64


class Planned(OperatorMode):
    """Check and plan the calls of row norms, and let the float64 oracle run them.

    A call in this mode is what it is without: the same function, options, checks, gradients. No
    kernel is compiled, which would take seconds for each dtype, and on the CPU for a GPU's model.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0
        self._ops: dict[object, OpDef[Any]] = {
            torch.ops.cunorm.row_norm_forward.default: ROW.forward,
            torch.ops.cunorm.row_norm_backward.default: ROW.backward,
        }

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        op = self._ops.get(func)
        if op is None:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        *arrays, text = args
        return _run(op, spec_from_json(op.spec_type, text), arrays)


def _run(op: OpDef[Any], spec: Any, arrays: list[Any]) -> tuple[torch.Tensor, ...]:
    """Return the outputs of an operator: an empty tensor of bools for an absent one."""
    plan = op.plan(spec, (*map(_spec, arrays), *op.no_outputs))
    planned = {slot - op.first_output: output for slot, output in plan.outputs}
    exact = {number: _empty(output.shape, _F64) for number, output in planned.items()}
    given = [None if array is None else array.detach().to(_F64).numpy() for array in arrays]
    found = [exact[n].numpy() if n in exact else None for n in range(len(op.outputs))]
    op.reference(replace(spec, x_dtype=None) if op is ROW.backward else spec, (*given, *found))
    if op is ROW.forward:  # y is rounded before weight, if at all, to x's dtype, not to float64
        operands = dict(zip(op.inputs, arrays, strict=True))
        x, _ = operands.pop("x"), operands.pop("residual")
        exact[0] = ROW.formula(spec, x.dtype, x.to(_F64), **operands)
    return tuple(
        exact[n].to(TORCH_DTYPES[planned[n].dtype]) if n in exact else _empty(0, torch.bool)
        for n in range(len(op.outputs))
    )


def _empty(shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")  # whatever the default device is


def _spec(array: torch.Tensor | None) -> TensorSpec | None:
    if array is None:
        return None
    return TensorSpec(tuple(array.shape), array.stride(), parse_dtype("", "x", array.dtype), CPU)
