# SPDX-License-Identifier: MIT
"""The norms as modules: those of torch.nn, and RMSNorm with the residual stream and with a gate."""

from typing import Any

import torch
from torch import Tensor

from cunorm._arrays.torch import TORCH_DTYPES
from cunorm._core.dtypes import parse_dtype
from cunorm.results import AddNorm
from cunorm.torch._functions import add_rms_norm, group_norm, layer_norm, rms_norm


def _refuse_script(module: Any) -> Any:
    """Refuse `torch.jit.script`, which would name a line of ours in its own error."""
    raise TypeError(
        f"{type(module).__name__}: torch.jit.script cannot compile it: use torch.compile, "
        "torch.export or torch.jit.trace"
    )


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, run by `cunorm.torch.rms_norm`.

    Over the last axes of x, which are those of normalized_shape::

        y = x / sqrt(mean(x * x) + eps) * (weight + weight_offset)

    The first five arguments, parameters and state_dict are PyTorch's. Without eps, it is the
    machine epsilon of the dtype in which the installed PyTorch computes: float32 for half
    precision, in earlier versions x's. weight_offset, which needs a weight, and round_before_weight
    are those of `rms_norm`; a new weight is ``1 - weight_offset``. Under ``torch.autocast`` on CUDA
    y is float32 where x is of half precision, as from PyTorch's module.

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
    __prepare_scriptable__ = _refuse_script

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
        _check_row_shape(self)
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, **_options(self, x), dtype=_autocast_dtype(x))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{_changed(self)}"


class AddRMSNorm(RMSNorm):
    """Add x to the residual stream and normalise the stream, by `cunorm.torch.add_rms_norm`.

    The new stream s is rounded to residual's dtype::

        s = x + residual
        y = s / sqrt(mean(s * s) + eps) * (weight + weight_offset)

    A stack of pre-norm layers ``x = f(norm(x)) + x`` becomes ``y, stream = norm(x, stream)`` and
    ``x = f(y)``, layer by layer. It begins with ``stream = None`` and ends with ``x + stream``.

    residual_dtype is the stream's dtype, by default that of the first x; a stream of another is an
    error. Other arguments are those of `RMSNorm`: without eps, it is that of the stream's dtype,
    and the rounding before weight is to x's. ``torch.autocast`` does not change the dtype of y.

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

    The norm is that of `RMSNorm`, g is gate_activation, one of those of `cunorm.normalize`::

        y = norm(x * g(gate))       with gate_position "pre", as in Mamba-2
        y = norm(x) * g(gate)       with "post", as in Qwen3-Next and the linear attentions of fla

    "post" is ``norm_before_gate=True`` elsewhere. groups is Mamba-2's
    ``hidden_size // group_size``; more than 1 needs a normalized_shape of one axis. y is rounded
    once, with round_before_weight twice. Mamba-2 of ``transformers`` is ``gate_position="pre",
    round_before_weight=True``, that of its authors the same without round_before_weight.
    Qwen3-Next also rounds before the gate: results differ by one or at most two units in the last
    place of bfloat16. ``torch.autocast`` does not change the dtype of y.

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


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, run by `cunorm.torch.layer_norm`.

    Over the last axes of x, which are those of normalized_shape::

        y = (x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps) * weight + bias

    Arguments, parameters and state_dict are PyTorch's; ``torch.autocast`` acts as on `RMSNorm`.

    >>> import torch
    >>> import cunorm.torch
    >>> norm = cunorm.torch.LayerNorm(2)
    >>> norm(torch.tensor([[1.0, 3.0]]))
    tensor([[-1.0000,  1.0000]], grad_fn=<...>)
    """

    __prepare_scriptable__ = _refuse_script

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
        axis, dtype = _row_axis(self, x), _autocast_dtype(x)
        return layer_norm(x, self.weight, self.bias, eps=self.eps, axis=axis, dtype=dtype)


class GroupNorm(torch.nn.GroupNorm):
    """`torch.nn.GroupNorm` with an activation, run by `cunorm.torch.group_norm`.

    For g, the activation, and means over all positions and channels of a group of a sample::

        y = g((x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps) * weight + bias)

    x has shape (N, num_channels, ...). y has its memory format, and neither is copied. activation
    is one of those of `cunorm.normalize`, or None. All other arguments are PyTorch's, with further
    ``**options`` of the installed version, as ``bias=False``; so are parameters and state_dict.
    ``torch.autocast`` acts as on `RMSNorm`.

    >>> import torch
    >>> import cunorm.torch
    >>> norm = cunorm.torch.GroupNorm(2, 4, activation="silu")
    >>> norm
    GroupNorm(2, 4, eps=1e-05, affine=True, ...activation='silu')
    >>> norm(torch.ones(1, 4, 3, 3).to(memory_format=torch.channels_last)).sum()
    tensor(0., grad_fn=<...>)
    """

    _cunorm_options: tuple[str, ...] = ("activation",)
    activation: str | None = None
    __prepare_scriptable__ = _refuse_script

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **options)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[1] != self.num_channels:
            raise ValueError(
                f"{type(self).__name__}: x has shape {tuple(x.shape)}, expected (N, "
                f"{self.num_channels}, ...), as num_channels is {self.num_channels}"
            )
        options = {"eps": self.eps, "activation": self.activation, "dtype": _autocast_dtype(x)}
        return group_norm(x, self.num_groups, self.weight, self.bias, **options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{_changed(self)}"


def _check_row_shape(module: Any) -> None:
    if not module.normalized_shape:
        kind = type(module).__name__
        raise ValueError(f"{kind}: normalized_shape is (), expected one axis or more")


def _row_axis(module: Any, x: Tensor) -> int:
    """Return the first axis of x's rows, after checking that they have normalized_shape."""
    shape: tuple[int, ...] = module.normalized_shape
    if x.shape[-len(shape) :] != shape:
        raise ValueError(
            f"{type(module).__name__}: x has shape {tuple(x.shape)}, expected its last axes to be "
            f"normalized_shape, {shape}"
        )
    return -len(shape)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return float32 where torch.autocast computes norms in it and x is narrower, else None."""
    half = x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half and torch.is_autocast_enabled("cuda") else None


def _changed(module: Any) -> str:
    """Return, for an extra_repr, the options beyond torch's that differ from their defaults."""
    kind, options = type(module), {name: getattr(module, name) for name in module._cunorm_options}
    return "".join(f", {name}={v!r}" for name, v in options.items() if v != getattr(kind, name))


def _options(module: Any, x: Tensor, residual: Any = None) -> dict[str, Any]:
    """Return the options of a module's call; without eps, that of the dtype that is normalised."""
    options = {name: getattr(module, name) for name in module._cunorm_options}
    options |= {"eps": module.eps, "axis": _row_axis(module, x)}
    if module.eps is None:
        dtype = getattr(x if residual is None else residual, "dtype", None)
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
    wide = torch.nn.functional.rms_norm(small, (1,)).item() > 0.5
    return float(torch.finfo(torch.promote_types(dtype, torch.float32) if wide else dtype).eps)


# Computed once, as torch.compile cannot trace it.
_DEFAULT_EPS = {dtype: _default_eps(dtype) for dtype in TORCH_DTYPES.values()}
