# SPDX-License-Identifier: MIT
"""The modes in which trials run: the oracle in place of kernels, and CUDA's autocast on a CPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cunorm._arrays._torch_private import OperatorMode
from cunorm._core.plan import OpDef, spec_from_json
from cunorm.torch._formulas import row_formula
from cunorm.torch._pair import GROUP, ROW

NORM_FUNCTIONS = ("layer_norm", "rms_norm", "group_norm")
_HALF = (torch.bfloat16, torch.float16)
_OPERATORS: dict[object, OpDef[Any]] = {
    torch.ops.cunorm.row_norm_forward.default: ROW.forward,
    torch.ops.cunorm.row_norm_backward.default: ROW.backward,
    torch.ops.cunorm.group_norm_forward.default: GROUP.forward,
    torch.ops.cunorm.group_norm_backward.default: GROUP.backward,
}


class Planned(OperatorMode):
    """A mode in which the float64 oracle computes norms in place of the kernels.

    The rest of a call is as usual. Kernels would take seconds to compile for each dtype.
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        op = _OPERATORS.get(func)
        if op is None:
            return func(*args, **(kwargs or {}))
        *arrays, text = args
        spec: Any = spec_from_json(op.spec_type, text)
        # With meta tensors, the operator checks the call and returns outputs without memory.
        metas = func(*(None if array is None else array.to("meta") for array in arrays), text)
        outputs = [torch.empty_like(meta, dtype=torch.float64, device="cpu") for meta in metas]
        given = [None if array is None else array.detach().double().numpy() for array in arrays]
        is_absent = [meta.dtype == torch.bool for meta in metas]
        found = [None if no else y.numpy() for y, no in zip(outputs, is_absent, strict=True)]
        op.reference(replace(spec, x_dtype=None) if op is ROW.backward else spec, (*given, *found))
        if op is ROW.forward:  # unlike the oracle, the formula rounds to x's dtype before weight
            operands = dict(zip(op.inputs, arrays, strict=True))
            x, _ = operands.pop("x"), operands.pop("residual")
            outputs[0] = row_formula(spec, x.dtype, x.double(), **operands)
        return tuple(y.to(meta.dtype) for y, meta in zip(outputs, metas, strict=True))


class AutocastOfCuda(TorchFunctionMode):
    """A mode in which a CPU's autocast treats norms of torch's as CUDA's: in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = [*args], {**(kwargs or {})}
        is_norm = getattr(func, "__name__", "") in NORM_FUNCTIONS
        if is_norm and torch.is_autocast_enabled("cpu"):
            args = [_float32(value) for value in args]
            kwargs = {name: _float32(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _float32(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value
