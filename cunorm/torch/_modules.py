# SPDX-License-Identifier: MIT
"""RMSNorm as a module: alone, with the residual stream, and with a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cunorm.results import AddNorm
from cunorm.torch._centered_modules import autocast_dtype, changed, check_row_shape, row_axis
from cunorm.torch._row_norm import add_rms_norm, rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, run by `cunorm.torch.rms_norm`.

    Over the last axes of x, those of normalized_shape::

        y = x / sqrt(mean(x * x) + eps) * (weight + weight_offset)

    Rounding is that of `cunorm.normalize`. Under ``torch.autocast`` on CUDA y is float32 where x is
    of half precision, as from PyTorch's module.

    Parameters
    ----------
    normalized_shape, eps, elementwise_affine, device, dtype : optional but the first
        As for `torch.nn.RMSNorm`, whose parameters and state_dict this subclass has. If eps is
        None, it is the machine epsilon of the dtype in which the installed PyTorch computes:
        float32 for half precision, in earlier versions x's.
    weight_offset, round_before_weight : float and bool, optional
        As for `rms_norm`. A new weight is ``1 - weight_offset``.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `rms_norm`; ValueError also if normalized_shape is empty, x's last axes are not
        normalized_shape, or there is a weight_offset without elementwise_affine.

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

    _cunorm_options: tuple[str, ...] = ("weight_offset", "round_before_weight")
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
        if weight_offset and not elementwise_affine:
            raise ValueError(
                f"{type(self).__name__}: weight_offset is {weight_offset}, expected 0.0 as "
                "elementwise_affine is False"
            )
        self.weight_offset, self.round_before_weight = weight_offset, round_before_weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the factor of every element 1."""
        check_row_shape(self)
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """Return y."""
        return rms_norm(x, self.weight, **_options(self, x), dtype=autocast_dtype(x))

    def extra_repr(self) -> str:
        """Return the options of `torch.nn.RMSNorm`, and the further ones that are set."""
        return f"{super().extra_repr()}{changed(self)}"


class AddRMSNorm(RMSNorm):
    """Add x to the residual stream and normalise the stream, by `cunorm.torch.add_rms_norm`.

    The new stream s is rounded to residual's dtype::

        s = x + residual
        y = s / sqrt(mean(s * s) + eps) * (weight + weight_offset)

    A stack of pre-norm layers ``x = f(norm(x)) + x`` becomes ``y, stream = norm(x, stream)`` and
    ``x = f(y)``, layer by layer. It begins with ``stream = None`` and ends with ``x + stream``.
    Rounding is that of `add_rms_norm`. ``torch.autocast`` does not change the dtype of y.

    Parameters
    ----------
    normalized_shape, eps, elementwise_affine, device, dtype, weight_offset, round_before_weight
        As for `RMSNorm`. The rounding before weight is to x's dtype, not to the stream's.
    residual_dtype : dtype, optional
        The stream's, by default that of the first x. A stream of another dtype is an error.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `RMSNorm` and `add_rms_norm`.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> norm = cunorm.torch.AddRMSNorm(2, eps=1e-6, residual_dtype=torch.float32)
    >>> x = torch.tensor([[1, 7]], dtype=torch.bfloat16)
    >>> y, stream = norm(x, None)
    >>> y, stream = norm(y, stream)
    >>> y.dtype, stream
    (torch.bfloat16, tensor([[1.2002, 8.3984]], grad_fn=<...>))
    """

    _cunorm_options = (*RMSNorm._cunorm_options, "residual_dtype")
    residual_dtype: Any = None

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
        residual_dtype: Any = None,
    ) -> None:
        options: Any = {"weight_offset": weight_offset, "round_before_weight": round_before_weight}
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, **options)
        self.residual_dtype = residual_dtype

    def forward(self, x: Tensor, residual: Tensor | None = None) -> AddNorm:
        """Return y and the new stream, which is x itself where residual is None."""
        return add_rms_norm(x, residual, self.weight, **_options(self, x, residual))


class GatedRMSNorm(RMSNorm):
    """RMSNorm with a gate, by `cunorm.torch.rms_norm`.

    The norm is that of `RMSNorm`, g is the gate's activation::

        y = norm(x * g(gate))       with gate_position "pre", as in Mamba-2
        y = norm(x) * g(gate)       with "post", as in Qwen3-Next and the linear attentions of fla

    y is rounded once, with round_before_weight twice. Mamba-2 of ``transformers`` is
    ``gate_position="pre", round_before_weight=True``, that of its authors the same without
    round_before_weight. Qwen3-Next also rounds before the gate: results differ by one or at most
    two units in the last place of bfloat16. ``torch.autocast`` does not change the dtype of y.

    Parameters
    ----------
    normalized_shape, eps, elementwise_affine, device, dtype, weight_offset, round_before_weight
        As for `RMSNorm`.
    groups : int, optional
        As for `rms_norm`; in Mamba-2 ``hidden_size // group_size``. More than one needs a
        normalized_shape of one axis.
    gate_activation : str, optional
        g: one of the activations of `cunorm.normalize`.
    gate_position : str, optional
        "post", as with ``norm_before_gate=True`` elsewhere, or "pre".

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `RMSNorm` and `rms_norm`. An unknown activation or position is an error in forward.

    Examples
    --------
    >>> import torch
    >>> import cunorm.torch
    >>> norm = cunorm.torch.GatedRMSNorm(4, groups=2, gate_position="pre")
    >>> norm
    GatedRMSNorm((4,), eps=1e-05, elementwise_affine=True, groups=2, gate_position='pre')
    >>> x, gate = torch.tensor([[1.0, 7.0, 3.0, 4.0]]), torch.tensor([[0.0, 7.0, -1.0, -1.0]])
    >>> norm(x, gate)
    tensor([[ 0.0000,  1.4142, -0.8485, -1.1314]], grad_fn=<...>)
    """

    _cunorm_options = (*RMSNorm._cunorm_options, "groups", "gate_activation", "gate_position")
    groups: int = 1
    gate_activation: str = "silu"
    gate_position: str = "post"

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        groups: int = 1,
        gate_activation: str = "silu",
        gate_position: str = "post",
        weight_offset: float = 0.0,
        round_before_weight: bool = False,
    ) -> None:
        options: Any = {"weight_offset": weight_offset, "round_before_weight": round_before_weight}
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, **options)
        self.groups = groups
        self.gate_activation, self.gate_position = gate_activation, gate_position

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return y; without a gate, of the norm alone."""
        return rms_norm(x, self.weight, gate=gate, **_options(self, x))


def _options(module: Any, x: Tensor, normalised: Tensor | None = None) -> dict[str, Any]:
    """Return the options of a module's call; `normalised` is the stream, if there is one."""
    eps = module.eps
    if eps is None:
        eps = _DEFAULT_EPS.get((x if normalised is None else normalised).dtype, 0.0)
    options = {name: getattr(module, name) for name in module._cunorm_options}
    return {"eps": eps, "axis": row_axis(module, x), **options}


def _default_eps(dtype: torch.dtype) -> float:
    """Return torch's eps for an x of dtype: the epsilon of its arithmetic, or of x in old versions.

    With the first, 2**-6 of half precision becomes about 1, with the second less than 1/2.
    """
    small = torch.full((1,), 2.0**-6, dtype=dtype, device="cpu")
    wide = torch.nn.functional.rms_norm(small, (1,)).item() > 0.5
    return float(torch.finfo(torch.promote_types(dtype, torch.float32) if wide else dtype).eps)


# Computed once, as torch.compile cannot trace it.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DEFAULT_EPS = {dtype: _default_eps(dtype) for dtype in _DTYPES}
