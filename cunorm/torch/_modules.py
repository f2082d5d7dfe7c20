# SPDX-License-Identifier: MIT
"""RMSNorm and LayerNorm: the modules of `torch.nn`, with cunorm's forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cunorm.torch._row_norm import layer_norm, rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, run by `cunorm.torch.rms_norm`.

    Over the last axes of x, those of normalized_shape::

        y = x / sqrt(mean(x * x) + eps) * (weight + weight_offset)

    Parameters, their names, the state_dict and `isinstance` are those of `torch.nn.RMSNorm`.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        The shape of a row: the last axes of x, and weight.
    eps : float, optional
        Added to the mean square. None is what PyTorch takes it to be: the machine epsilon of the
        type that it computes in, float32's for half precision. (Earlier versions of PyTorch took
        that of x's dtype. The installed one is asked.)
    elementwise_affine : bool, optional
        Whether there is a weight.
    device, dtype : optional
        Those of weight.
    weight_offset : float, optional
        Added to weight in the type of the computation. 1.0 is Gemma's ``1 + weight``. A new weight
        is ``1 - weight_offset`` throughout.
    round_before_weight : bool, optional
        Whether x / sqrt(...) is rounded to x's dtype before it is multiplied by weight, as in
        Llama; y then has the dtype that x and weight promote to.

    Raises
    ------
    ValueError
        If normalized_shape is empty, weight_offset has no weight to be added to, or x's last axes
        are not normalized_shape.
    TypeError, ValueError, ImportError, RuntimeError
        As `rms_norm` does.

    Notes
    -----
    Rounding: sums and products are float32 (float64 if x is), whatever the parameters' dtype. y is
    rounded once, to x's dtype; under ``torch.autocast`` on CUDA it is float32 for an x of half
    precision, as from PyTorch's module.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> norm = cunorm.torch.RMSNorm(2, eps=1e-6)
    >>> norm
    RMSNorm((2,), eps=1e-06, elementwise_affine=True)
    >>> norm(torch.tensor([[1.0, 7.0]]))
    tensor([[0.2000, 1.4000]], grad_fn=<...>)
    """

    weight_offset: float = 0.0
    round_before_weight: bool = False

    def __init__(
        self,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        weight_offset: float = 0.0,
        round_before_weight: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        _check_row_shape(self)
        if weight_offset and not elementwise_affine:
            raise ValueError(
                f"{type(self).__name__}: weight_offset is {weight_offset}, expected 0.0 as "
                "elementwise_affine is False"
            )
        self.weight_offset, self.round_before_weight = weight_offset, round_before_weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the factor of every element 1."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        return rms_norm(
            x,
            self.weight,
            eps=eps_of(self, x),
            axis=row_axis(self, x),
            weight_offset=self.weight_offset,
            round_before_weight=self.round_before_weight,
            dtype=autocast_dtype(x),
        )

    def extra_repr(self) -> str:
        """Return what `torch.nn.RMSNorm` does, and what it does not have."""
        own = changed(self, RMSNorm, "weight_offset", "round_before_weight")
        return f"{super().extra_repr()}{own}"


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, run by `cunorm.torch.layer_norm`.

    Over the last axes of x, those of normalized_shape::

        q = x - mean(x)
        y = q / sqrt(mean(q * q) + eps) * weight + bias

    Parameters, their names, the state_dict and `isinstance` are those of `torch.nn.LayerNorm`.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        The shape of a row: the last axes of x, weight and bias.
    eps : float, optional
        Added to the variance.
    elementwise_affine, bias : bool, optional
        Whether there are parameters, and a bias among them.
    device, dtype : optional
        Those of the parameters.

    Raises
    ------
    ValueError
        If normalized_shape is empty, or x's last axes are not normalized_shape.
    TypeError, ValueError, ImportError, RuntimeError
        As `layer_norm` does.

    Notes
    -----
    Rounding is that of `RMSNorm`. The mean is corrected by the mean of what it leaves, so a
    constant row gives y = bias exactly.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> norm = cunorm.torch.LayerNorm(2)
    >>> norm(torch.tensor([[1.0, 3.0]]))
    tensor([[-1.0000,  1.0000]], grad_fn=<...>)
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        _check_row_shape(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        return layer_norm(
            x,
            self.weight,
            self.bias,
            eps=self.eps,
            axis=row_axis(self, x),
            dtype=autocast_dtype(x),
        )


def row_axis(module: Any, x: Tensor) -> int:
    """Return the first axis of x's rows, after checking that they have normalized_shape."""
    shape: tuple[int, ...] = module.normalized_shape
    if x.shape[-len(shape) :] != shape:
        raise ValueError(
            f"{type(module).__name__}: x has shape {tuple(x.shape)}, expected its last axes to be "
            f"normalized_shape, {shape}"
        )
    return -len(shape)


def _check_row_shape(module: Any) -> None:
    if not module.normalized_shape:
        raise ValueError(
            f"{type(module).__name__}: normalized_shape is (), expected one axis or more"
        )


def _default_eps(dtype: torch.dtype) -> float:
    """Return what torch's rms_norm takes for eps=None: the epsilon of dtype or of its arithmetic.

    Half precision computes in float32. With its own epsilon, 2**-7 or 2**-10, 2**-6 would become
    less than 1/2; with that of float32 it becomes about 1.
    """
    small = torch.full((1,), 2.0**-6, dtype=dtype, device="cpu")
    own = torch.nn.functional.rms_norm(small, (1,)).item() < 0.5
    computed = dtype if own else torch.promote_types(dtype, torch.float32)
    return float(torch.finfo(computed).eps)


# Asked once, as torch.compile cannot look into it.
_DEFAULT_EPS = {
    dtype: _default_eps(dtype)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


def eps_of(module: Any, x: Tensor) -> float:
    """Return an RMSNorm's eps, torch's default for x where it has none."""
    eps = module.eps
    return _DEFAULT_EPS.get(x.dtype, 0.0) if eps is None else eps


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return float32 where torch.autocast computes norms in it and x is narrower, else None."""
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
        return torch.float32 if torch.is_autocast_enabled("cuda") else None
    return None


def changed(module: Any, base: type, *names: str) -> str:
    """Return, for an extra_repr, the options that do not have their default."""
    values = ((name, getattr(module, name)) for name in names)
    return "".join(f", {name}={v!r}" for name, v in values if v != getattr(base, name))
