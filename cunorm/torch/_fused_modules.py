# SPDX-License-Identifier: MIT
"""RMSNorm with the residual stream and RMSNorm with a gate, as modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cunorm.results import AddNorm
from cunorm.torch._modules import RMSNorm, changed, eps_of, row_axis
from cunorm.torch._row_norm import add_rms_norm, rms_norm


class AddRMSNorm(RMSNorm):
    """Add x to the residual stream and normalise the stream, by `cunorm.torch.add_rms_norm`.

    ::

        s = x + residual            rounded to residual's dtype: the new stream
        y = s / sqrt(mean(s * s) + eps) * (weight + weight_offset)

    A stack of pre-norm layers ``x = f(norm(x)) + x`` becomes ``y, stream = norm(x, stream)`` and
    ``x = f(y)``, layer by layer. It begins with ``stream = None`` and ends with ``x + stream``.

    Parameters
    ----------
    normalized_shape, eps, elementwise_affine, device, dtype : optional but the first
        As for `RMSNorm`, whose parameters and state_dict it has.
    weight_offset, round_before_weight : float and bool, optional
        As for `RMSNorm`; what is rounded before weight is rounded to x's dtype, not the stream's.
    residual_dtype : dtype, optional
        The stream's, where it begins; by default x's there. A stream of another one is an error.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `RMSNorm` and `add_rms_norm` do.

    Notes
    -----
    Rounding is that of `add_rms_norm`: the stream once, y once, from the rounded stream.
    ``torch.autocast`` does not change it.

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
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            device,
            dtype,
            weight_offset=weight_offset,
            round_before_weight=round_before_weight,
        )
        self.residual_dtype = residual_dtype

    def forward(self, x: Tensor, residual: Tensor | None = None) -> AddNorm:
        """Return y and the new stream, which is x itself where residual is None."""
        return add_rms_norm(
            x,
            residual,
            self.weight,
            eps=eps_of(self, x if residual is None else residual),
            axis=row_axis(self, x),
            weight_offset=self.weight_offset,
            round_before_weight=self.round_before_weight,
            residual_dtype=self.residual_dtype,
        )

    def extra_repr(self) -> str:
        """Return the options of `RMSNorm`, and the stream's dtype."""
        return super().extra_repr() + changed(self, AddRMSNorm, "residual_dtype")


class GatedRMSNorm(RMSNorm):
    """RMSNorm with a gate, by `cunorm.torch.rms_norm`.

    g is the gate's activation; with a gate before the norm, as in Mamba-2::

        p = x * g(gate)
        y = p / sqrt(mean(p * p) + eps) * (weight + weight_offset)

    and after it, as in Qwen3-Next and the linear attentions of ``fla``::

        y = x / sqrt(mean(x * x) + eps) * (weight + weight_offset) * g(gate)

    Parameters
    ----------
    normalized_shape : int or sequence of int
        As for `RMSNorm`, whose parameters and state_dict it has.
    eps : float, optional
        Added to the mean square.
    elementwise_affine, device, dtype : optional
        As for `RMSNorm`.
    groups : int, optional
        The equal slices of the last axis that are normalised each by itself, as in Mamba-2:
        ``hidden_size // group_size``. With one axis in normalized_shape alone.
    gate_activation : str, optional
        g: "identity", "sigmoid", "silu" (which is "swish"), "tanh", "relu", "gelu", "gelu_tanh".
    gate_position : str, optional
        "post", as with ``norm_before_gate=True`` elsewhere, or "pre".
    weight_offset, round_before_weight : float and bool, optional
        As for `RMSNorm`.

    Raises
    ------
    TypeError, ValueError, ImportError, RuntimeError
        As `RMSNorm` and `rms_norm` do; for an unknown activation or position when it is run.

    Notes
    -----
    Rounding: one, on the store, and with round_before_weight the one it asks for. So the Mamba-2 of
    ``transformers`` is ``gate_position="pre", round_before_weight=True``, and that of its authors
    the same without round_before_weight. Qwen3-Next's module there also rounds its product with
    weight before the gate: the results differ by one unit in the last place of bfloat16, or two
    where both roundings are at their worst. ``torch.autocast`` does not change it.

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
        super().__init__(
            normalized_shape,
            eps,
            elementwise_affine,
            device,
            dtype,
            weight_offset=weight_offset,
            round_before_weight=round_before_weight,
        )
        self.groups, self.gate_activation = groups, gate_activation
        self.gate_position = gate_position

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return y; without a gate, of the norm alone."""
        return rms_norm(
            x,
            self.weight,
            eps=eps_of(self, x),
            axis=row_axis(self, x),
            groups=self.groups,
            weight_offset=self.weight_offset,
            round_before_weight=self.round_before_weight,
            gate=gate,
            gate_activation=self.gate_activation,
            gate_position=self.gate_position,
        )

    def extra_repr(self) -> str:
        """Return the options of `RMSNorm`, and those of the gate."""
        own = changed(self, GatedRMSNorm, "groups", "gate_activation", "gate_position")
        return super().extra_repr() + own
