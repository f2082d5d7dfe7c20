# SPDX-License-Identifier: MIT
"""The norms as modules: those of torch.nn, and RMSNorm with the residual stream and with a gate."""

from __future__ import annotations  # a PyTorch without distributed has no ProcessGroup

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.types import Device

from cunorm._core import validate
from cunorm._core.types import Activation, GatePosition
from cunorm.results import AddNorm
from cunorm.torch import _module_options as _options
from cunorm.torch._functions import add_rms_norm, group_norm, layer_norm, rms_norm
from cunorm.torch._module_options import autocast_dtype, changed_options, check_sizes, options_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _refuse_script(module: torch.nn.Module) -> NoReturn:
    """Refuse `torch.jit.script`; torch's own error would name a line of cunorm."""
    raise TypeError(
        f"{type(module).__name__}: torch.jit.script cannot compile it: use torch.compile, "
        "torch.export or torch.jit.trace"
    )


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, run by `cunorm.torch.rms_norm`.

    A row is the last axes of x, which have the shape normalized_shape::

        y = x / sqrt(mean(x * x) + eps) * (weight + weight_offset) + bias

    The first five arguments, the parameters and state_dict are PyTorch's, but bias=True adds the
    parameter ``bias``, as in `LayerNorm`. The default eps is the machine epsilon of the dtype in
    which the installed PyTorch computes: float32 for half precision, but x's dtype in earlier
    versions. weight_offset and round_before_weight are options of `rms_norm`; a new weight is
    ``1 - weight_offset``. process_group and parameter_group are those of `cunorm.torch`; with the
    first, normalized_shape is the part of a row that this process has. Under ``torch.autocast`` on
    CUDA, y is float32 for an x of half precision, as in PyTorch's module.

    >>> import torch, cunorm.torch
    >>> norm = cunorm.torch.RMSNorm(2, eps=1e-6)
    >>> norm
    RMSNorm((2,), eps=1e-06, elementwise_affine=True)
    >>> norm(torch.tensor([[1.0, 7.0]]))
    tensor([[0.2000, 1.4000]], grad_fn=<...>)
    """

    _cunorm_options: tuple[str, ...] = ("weight_offset", "round_before_weight")
    weight_offset: float = 0.0
    round_before_weight: bool = False
    bias: torch.nn.Parameter | None
    _groups: _options.Groups = _options.NO_GROUPS
    __prepare_scriptable__ = _refuse_script

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = False,
        weight_offset: float = 0.0,
        round_before_weight: bool = False,
        process_group: ProcessGroup | None = None,
        parameter_group: ProcessGroup | None = None,
    ) -> None:
        shape = _options.row_shape(self, normalized_shape)
        flags = {"elementwise_affine": elementwise_affine, "bias": bias}
        _options.check_dtype_and_flags(self, dtype, **flags)
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        has_bias = bias and self.weight is not None
        new = torch.nn.Parameter(torch.empty_like(self.weight)) if has_bias else None
        self.register_parameter("bias", new)
        self._set_options(weight_offset, round_before_weight)
        _options.set_groups(self, process_group, parameter_group)

    def _set_options(self, *values: object) -> None:
        for name, value in zip(self._cunorm_options, values, strict=False):
            setattr(self, name, value)  # the first options; a subclass sets its own later
        _options.check_rms_norm(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the factor of every element 1, and its bias 0."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        bias = getattr(self, "bias", None)  # PyTorch's __init__ makes none
        if bias is not None:
            torch.nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> Tensor:
        options = options_of(self, x) | self._groups.options
        return rms_norm(x, self.weight, bias=self.bias, **options, dtype=autocast_dtype(x))

    def extra_repr(self) -> str:
        bias = "" if self.bias is None else ", bias=True"
        return f"{super().extra_repr()}{bias}{changed_options(self)}"


class AddRMSNorm(RMSNorm):
    """Add x to the residual stream and normalise the stream, by `cunorm.torch.add_rms_norm`.

    The new stream s is rounded to residual_dtype, by default the dtype of residual::

        s = x + residual
        y = s / sqrt(mean(s * s) + eps) * (weight + weight_offset) + bias

    A pre-norm layer ``x = f(norm(x)) + x`` becomes ``y, stream = norm(x, stream)``, ``x = f(y)``.
    A stack of layers begins with ``stream = None`` and ends with ``x + stream``.

    Without a stream, residual_dtype is by default the dtype of x. The other arguments are those of
    `RMSNorm`, but the default eps is that of the new stream's dtype. round_before_weight rounds to
    x's dtype. ``torch.autocast`` keeps y's dtype.

    >>> import torch, cunorm.torch
    >>> norm = cunorm.torch.AddRMSNorm(2, eps=1e-6, residual_dtype=torch.float32)
    >>> x = torch.tensor([[1, 7]], dtype=torch.bfloat16)
    >>> y, stream = norm(x, None)
    >>> y, stream = norm(y, stream)
    >>> y.dtype, stream
    (torch.bfloat16, tensor([[1.2002, 8.3984]], grad_fn=<...>))
    """

    _cunorm_options = (*RMSNorm._cunorm_options, "residual_dtype")
    residual_dtype: torch.dtype | str | None = None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = False,
        weight_offset: float = 0.0,
        round_before_weight: bool = False,
        residual_dtype: torch.dtype | str | None = None,
        process_group: ProcessGroup | None = None,
        parameter_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, bias=bias)
        self._set_options(weight_offset, round_before_weight, residual_dtype)
        _options.set_groups(self, process_group, parameter_group)

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> AddNorm[Tensor]:
        """Return y and the new stream, which is x itself if residual is None."""
        options = options_of(self, x, residual) | self._groups.options
        return add_rms_norm(x, residual, self.weight, bias=self.bias, **options)


class GatedRMSNorm(RMSNorm):
    """RMSNorm with a gate, by `cunorm.torch.rms_norm`.

    The norm is that of `RMSNorm`, and g is gate_activation, an activation of `cunorm.normalize`::

        y = norm(x * g(gate))       with gate_position "pre", as in Mamba-2
        y = norm(x) * g(gate)       with "post", as in Qwen3-Next and the linear attentions of fla

    In other libraries, "post" is called ``norm_before_gate=True``. groups is Mamba-2's
    ``hidden_size // group_size``; more than one group needs a normalized_shape of one axis. y is
    rounded once, or twice with round_before_weight. Mamba-2 of ``transformers`` is
    ``gate_position="pre", round_before_weight=True``; Mamba-2 of its authors does not round before
    weight. Qwen3-Next also rounds before the gate, so results differ by up to two units in the
    last place of bfloat16. ``torch.autocast`` does not change the dtype of y.

    >>> import torch, cunorm.torch
    >>> norm = cunorm.torch.GatedRMSNorm(4, groups=2, gate_position="pre")
    >>> norm
    GatedRMSNorm((4,), eps=1e-05, elementwise_affine=True, groups=2, gate_position='pre')
    >>> x, gate = torch.tensor([[1.0, 7.0, 3.0, 4.0]]), torch.tensor([[0.0, 7.0, -1.0, -1.0]])
    >>> norm(x, gate)
    tensor([[ 0.0000,  1.4142, -0.8485, -1.1314]], grad_fn=<...>)
    """

    _cunorm_options = (*RMSNorm._cunorm_options, "groups", "gate_activation", "gate_position")
    groups: int = 1
    gate_activation: Activation = "silu"
    gate_position: GatePosition = "post"

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        groups: int = 1,
        gate_activation: Activation = "silu",
        gate_position: GatePosition = "post",
        bias: bool = False,
        weight_offset: float = 0.0,
        round_before_weight: bool = False,
        process_group: ProcessGroup | None = None,
        parameter_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, bias=bias)
        gate = (gate_activation, gate_position)
        self._set_options(weight_offset, round_before_weight, groups, *gate)
        _options.set_groups(self, process_group, parameter_group)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return y, which without a gate is ``norm(x)``."""
        options = options_of(self, x) | self._groups.options
        if gate is None:
            del options["gate_activation"], options["gate_position"]
        return rms_norm(x, self.weight, bias=self.bias, gate=gate, **options)


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, run by `cunorm.torch.layer_norm`.

    A row is the last axes of x, which have the shape normalized_shape::

        y = (x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps) * weight + bias

    Arguments, parameters and state_dict are PyTorch's. ``torch.autocast``, process_group and
    parameter_group act as on `RMSNorm`.

    >>> import torch, cunorm.torch
    >>> norm = cunorm.torch.LayerNorm(2)
    >>> norm(torch.tensor([[1.0, 3.0]]))
    tensor([[-1.0000,  1.0000]], grad_fn=<...>)
    """

    _groups: _options.Groups = _options.NO_GROUPS
    __prepare_scriptable__ = _refuse_script

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        process_group: ProcessGroup | None = None,
        parameter_group: ProcessGroup | None = None,
    ) -> None:
        shape = _options.row_shape(self, normalized_shape)
        flags = {"elementwise_affine": elementwise_affine, "bias": bias}
        _options.check_dtype_and_flags(self, dtype, **flags)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        validate.epsilon(type(self).__name__, eps)
        _options.set_groups(self, process_group, parameter_group)

    def forward(self, x: Tensor) -> Tensor:
        axis, dtype = -len(self.normalized_shape), autocast_dtype(x)
        check_sizes(self, x, slice(axis, None), self.normalized_shape)
        options: Any = {"eps": self.eps, "axis": axis, "dtype": dtype}
        return layer_norm(x, self.weight, self.bias, **options, **self._groups.options)


class GroupNorm(torch.nn.GroupNorm):
    """`torch.nn.GroupNorm` with an activation, run by `cunorm.torch.group_norm`.

    g is the activation; means are over all positions and channels of a group of a sample::

        y = g((x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps) * weight + bias)

    x has shape (N, num_channels, ...). y has x's memory format; an x that is contiguous or
    channels_last is not copied. activation is an activation of `cunorm.normalize`, or None. The
    other arguments, parameters and state_dict are PyTorch's. ``**options`` are arguments of a newer
    PyTorch, such as ``bias=False``. ``torch.autocast`` acts as on `RMSNorm`.

    >>> import torch, cunorm.torch
    >>> norm = cunorm.torch.GroupNorm(2, 4, activation="silu")
    >>> norm
    GroupNorm(2, 4, eps=1e-05, affine=True, ...activation='silu')
    >>> norm(torch.ones(1, 4, 3, 3).to(memory_format=torch.channels_last)).sum()
    tensor(0., grad_fn=<...>)
    """

    _cunorm_options: tuple[str, ...] = ("activation",)
    activation: Activation | None = None
    __prepare_scriptable__ = _refuse_script

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        activation: Activation | None = None,
        **options: Any,
    ) -> None:
        _options.check_groups(self, num_groups, num_channels)
        flags = {"affine": affine, "bias": options.get("bias", True)}
        _options.check_dtype_and_flags(self, dtype, eps=eps, **flags)
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **options)
        validate.epsilon(type(self).__name__, eps)
        if activation is not None:
            validate.activation(type(self).__name__, "activation", activation)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return GroupNorm._activated(self, x, self.activation)

    def _activated(self, x: Tensor, activation: Activation | None) -> Tensor:
        expected = "(N, {0[0]}, ...), as num_channels is {0[0]}"
        check_sizes(self, x, slice(1, 2), (self.num_channels,), expected)
        options: Any = {"eps": self.eps, "activation": activation, "dtype": autocast_dtype(x)}
        return group_norm(x, self.num_groups, self.weight, self.bias, **options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{changed_options(self)}"
