# SPDX-License-Identifier: MIT
"""The formulas of all norms, for the arrays of any library that can differentiate them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any


def _itself(y: Any) -> Any:
    return y


class Formulas:
    """Functions with the names and arguments of `cunorm.jax`, except dtypes.

    `rounded` is applied to rows before weight, for `round_before_weight`.
    """

    def __init__(
        self,
        activations: Mapping[str, Callable[[Any], Any]],
        rounded: Callable[[Any], Any] = _itself,
    ) -> None:
        self.activations, self.rounded = activations, rounded

    def normalize(
        self,
        x: Any,
        weight: Any = None,
        bias: Any = None,
        *,
        c: float | None = None,
        center: bool = False,
        eps: float = 1e-6,
        axis: int = -1,
        groups: int = 1,
        weight_offset: float = 0.0,
        round_before_weight: bool = False,
        gate: Any = None,
        gate_activation: str = "silu",
        gate_position: str = "post",
    ) -> Any:
        factor = 1.0 if gate is None else self.activations[gate_activation](gate)
        p = x * factor if gate_position == "pre" else x
        width = prod(x.shape[axis:]) // groups
        q = p.reshape(*x.shape[:axis], groups, width)
        q = q - q.mean(-1, keepdims=True) if center else q
        r = q / ((q * q).mean(-1, keepdims=True) + eps) ** 0.5
        y = (r if c is None else r * (c / width**0.5)).reshape(x.shape)
        y = self.rounded(y) if round_before_weight else y
        y = y if weight is None else y * (weight + weight_offset)
        y = y if bias is None else y + bias
        return y * factor if gate_position == "post" else y

    def rms_norm(self, x: Any, weight: Any = None, **options: Any) -> Any:
        return self.normalize(x, weight, **options)

    def layer_norm(self, x: Any, *parameters: Any, eps: float = 1e-5, **options: Any) -> Any:
        return self.normalize(x, *parameters, center=True, eps=eps, **options)

    def l2_norm(self, x: Any, *, eps: float = 1e-12, **options: Any) -> Any:
        width = prod(x.shape[options.get("axis", -1) :]) // options.get("groups", 1)
        return self.normalize(x, c=1.0, eps=eps / width, **options)

    def gated_branch(self, x: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Apply a gate of the branch to x; return the product, and the options of the norm."""
        if options.get("gate_position") != "branch":
            return x, options
        names = ("gate", "gate_activation", "gate_position")
        factor = self.activations[options.get("gate_activation", "silu")](options["gate"])
        return x * factor, {name: one for name, one in options.items() if name not in names}

    def _add(self, norm: Any, x: Any, residual: Any, *given: Any, **options: Any) -> Any:
        x, options = self.gated_branch(x, options)
        stream = x if residual is None else x + residual
        return norm(stream, *given, **options), stream

    def add_rms_norm(self, x: Any, residual: Any, *parameters: Any, **options: Any) -> Any:
        return self._add(self.rms_norm, x, residual, *parameters, **options)

    def add_layer_norm(self, x: Any, residual: Any, *parameters: Any, **options: Any) -> Any:
        return self._add(self.layer_norm, x, residual, *parameters, **options)

    def add_normalize(self, x: Any, residual: Any, *parameters: Any, **options: Any) -> Any:
        return self._add(self.normalize, x, residual, *parameters, **options)

    def group_norm(
        self,
        x: Any,
        num_groups: int | None,
        weight: Any = None,
        bias: Any = None,
        *,
        eps: float = 1e-5,
        activation: str | None = None,
        channel_axis: int = -1,
    ) -> Any:
        last = x.swapaxes(channel_axis, -1)
        samples, *positions, channels = last.shape
        groups = num_groups or channels
        q = last.reshape(samples, prod(positions), groups, channels // groups)
        q = q - q.mean((1, 3), keepdims=True)
        y = (q / ((q * q).mean((1, 3), keepdims=True) + eps) ** 0.5).reshape(last.shape)
        of_channels = (-1, *[1] * len(positions), channels)  # of each sample, or of all
        y = y if weight is None else y * weight.reshape(of_channels)
        y = y if bias is None else y + bias.reshape(of_channels)
        return self.activations[activation or "identity"](y).swapaxes(channel_axis, -1)

    def instance_norm(self, x: Any, *parameters: Any, **options: Any) -> Any:
        return self.group_norm(x, None, *parameters, **options)
