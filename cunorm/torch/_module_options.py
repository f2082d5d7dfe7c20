# SPDX-License-Identifier: MIT
"""What the modules pass to the functions beside tensors, and what they check of x."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import LayerNorm, Module, RMSNorm

from cunorm._arrays.torch import TORCH_DTYPES
from cunorm._core.dtypes import parse_dtype
from cunorm.torch._tensors import is_dense


def row_axis(module: RMSNorm | LayerNorm, x: Tensor) -> int:
    """Return the first axis of x's rows, after checking that they have normalized_shape."""
    shape = module.normalized_shape
    try:
        fits = x.shape[-len(shape) :] == shape
    except (AttributeError, RuntimeError):  # no tensor, or one without a shape
        fits = False
    if not fits:
        refuse_shape(module, x, f"its last axes to be normalized_shape, {shape}")
    return -len(shape)


def refuse_shape(module: Module, x: Tensor, expected: str) -> None:
    """Raise an error, unless x has no shape: that, the function refuses."""
    if isinstance(x, Tensor) and is_dense(x):
        shape = tuple(map(int, x.shape))  # torch.jit.trace has tensors there
        raise ValueError(f"{type(module).__name__}: x has shape {shape}, expected {expected}")


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return float32 where torch.autocast computes norms in it and x is narrower, else None."""
    half = getattr(x, "is_cuda", False) and x.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half and torch.is_autocast_enabled("cuda") else None


def changed_options(module: Module, names: Iterable[str]) -> str:
    """Return, for an extra_repr, the options beyond torch's that differ from their defaults."""
    kind, options = type(module), {name: getattr(module, name) for name in names}
    return "".join(f", {name}={v!r}" for name, v in options.items() if v != getattr(kind, name))


def options_of(
    module: RMSNorm, names: Iterable[str], x: Tensor, residual: Tensor | None = None
) -> dict[str, Any]:
    """Return the options of a module's call; without eps, that of the dtype that is normalised."""
    options = {name: getattr(module, name) for name in names}
    options |= {"eps": module.eps, "axis": row_axis(module, x)}
    if module.eps is None:
        dtype: Any = getattr(x if residual is None else residual, "dtype", None)
        stream = options.get("residual_dtype")
        if residual is None and stream is not None:
            dtype = TORCH_DTYPES[parse_dtype("add_rms_norm", "residual_dtype", stream)]
        options["eps"] = _DEFAULT_EPS.get(dtype, 0.0)
    return options


def _default_eps(dtype: torch.dtype) -> float:
    """Return torch's eps for an x of dtype: the epsilon of its arithmetic, or of x in old versions.

    With the first, 2**-6 of half precision becomes about 1, with the second less than 1/2.
    """
    small = torch.full((1,), 2.0**-6, dtype=dtype, device="cpu")
    in_float32 = torch.nn.functional.rms_norm(small, (1,)).item() > 0.5
    return float(
        torch.finfo(torch.promote_types(dtype, torch.float32) if in_float32 else dtype).eps
    )


# Computed once, as torch.compile cannot trace it.
_DEFAULT_EPS = {dtype: _default_eps(dtype) for dtype in TORCH_DTYPES.values()}
