# SPDX-License-Identifier: MIT
"""The group norms as the demo calls them, on a device and in the oracle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import cunorm
from cunorm import reference
from cunorm._demo._group_tolerance import Groups, backward_bounds, forward_bounds
from cunorm._demo._operators import bytes_of
from cunorm._demo._ulps import worst_error
from cunorm._core.dtypes import FLOAT16, FLOAT32, DType
from cunorm.results import GroupNormForward, GroupNormGrads

Operands = Mapping[str, Any]

_EPS = 1e-5
_SAMPLES, _GROUPS = 16, 32  # at most, of rows and of channels
_PARAMETERS = ("weight", "bias")


@dataclass(frozen=True)
class GroupOperator:
    """A group norm by the name of the public function, and how the demo calls it."""

    name: str
    form: str = ""
    activation: str | None = "silu"
    channel_axis: int = -1
    mean: float = 0.0  # what is added to x

    def __str__(self) -> str:
        return f"{self.name}, {self.form}" if self.form else self.name

    def taken(self, rows: Operands) -> dict[str, Any]:
        """Return what it takes of rows in host memory: samples, whose positions are the rows.

        The channels are last, or moved to the axis 1 in memory too.
        """
        samples = math.gcd(len(rows["x"]), _SAMPLES)
        arrays = {name: rows[name] for name in _PARAMETERS}
        for name in ("x", "dy"):
            array = rows[name].reshape(samples, -1, rows[name].shape[-1])
            arrays[name] = np.ascontiguousarray(np.moveaxis(array, -1, self.channel_axis))
        if self.mean:
            arrays["x"] = arrays["x"] + arrays["x"].dtype.type(self.mean)
        return arrays

    def options(self) -> dict[str, Any]:
        """Return what forward and backward are told."""
        return {"activation": self.activation, "channel_axis": self.channel_axis}

    def groups(self, operands: Operands) -> int:
        """Return into how many groups the channels fall: as many as there is room for."""
        channels = operands["x"].shape[self.channel_axis]
        return channels if self.name == "instance_norm" else math.gcd(channels, _GROUPS)

    def warm_up(self, operands: Operands, device: str) -> None:
        """Compile what `run` needs, on operands of the host or of the device."""
        x = operands["x"]
        channels, dtype = x.shape[self.channel_axis], str(x.dtype)
        cunorm.warmup(
            [self.name, "group_norm_forward", "group_norm_backward"],
            channels,
            dtype,
            device=device,
            rows=len(x),
            positions=x[0].size // channels,
            num_groups=self.groups(operands),
            layout="channels_first" if self.channel_axis == 1 else "channels_last",
            activation=self.activation,
            workers=1,
            progress=False,
            **{name: str(operands[name].dtype) for name in _PARAMETERS},
        )

    def apply(self, operands: Operands) -> Any:
        """Call the function itself, which returns y."""
        parameters = [operands[name] for name in _PARAMETERS]
        if self.name == "group_norm":
            parameters.insert(0, self.groups(operands))
        function = getattr(cunorm, self.name)
        return function(operands["x"], *parameters, eps=_EPS, **self.options())

    def forward(self, module: ModuleType, operands: Operands) -> GroupNormForward:
        """Call the forward for training of cunorm or of its reference."""
        parameters = (operands[name] for name in _PARAMETERS)
        arguments = (operands["x"], self.groups(operands), *parameters)
        result: GroupNormForward = module.group_norm_forward(*arguments, eps=_EPS, **self.options())
        return result

    def backward(
        self, module: ModuleType, operands: Operands, saved: GroupNormForward
    ) -> GroupNormGrads:
        """Call the backward of cunorm or of its reference on what a forward returned."""
        parameters = (operands[name] for name in _PARAMETERS)
        arguments = (operands["dy"], operands["x"], self.groups(operands), *parameters)
        result: GroupNormGrads = module.group_norm_backward(
            *arguments, mean=saved.mean, rstd=saved.rstd, **self.options()
        )
        return result

    def run(self, operands: Operands) -> tuple[Any, GroupNormForward, GroupNormGrads]:
        """Return what `apply`, `forward` and `backward` do on arrays of a device."""
        saved = self.forward(cunorm, operands)
        return self.apply(operands), saved, self.backward(cunorm, operands, saved)

    def forward_bytes(self, operands: Operands, y: Any) -> int:
        """Return the bytes that `apply` must read and write."""
        return bytes_of([operands[name] for name in ("x", *_PARAMETERS)], [y])

    def backward_bytes(
        self, operands: Operands, saved: GroupNormForward, grads: GroupNormGrads
    ) -> int:
        """Return the bytes that `backward` must read and write; bias only for an activation."""
        read = ("dy", "x", *(_PARAMETERS if self.activation else ("weight",)))
        return bytes_of([*(operands[name] for name in read), saved.mean, saved.rstd], grads)

    def oracle(self, operands: Operands) -> GroupOracle:
        """Return what is exact for operands in host memory."""
        return GroupOracle(self, operands)


GROUP_OPERATORS = (
    GroupOperator("group_norm", "silu"),
    GroupOperator("group_norm", "C first", channel_axis=1),
    GroupOperator("instance_norm", activation=None),
)
_FAR = GroupOperator("group_norm", "mean 1e4", mean=1e4)  # where float32 tells deviations apart


def group_operators_of(dtype: DType) -> tuple[GroupOperator, ...]:
    """Return what is run on a dtype: in float16 one form, as there is much to compile."""
    if dtype is FLOAT16:
        return GROUP_OPERATORS[:1]
    return (*GROUP_OPERATORS, _FAR) if dtype is FLOAT32 else GROUP_OPERATORS


class GroupOracle:
    """What is exact for a group norm and operands in host memory."""

    def __init__(self, operator: GroupOperator, operands: Operands) -> None:
        self.operator, self.operands = operator, operands
        self._exact = operator.forward(reference, operands)
        parameters = (operands[name] for name in _PARAMETERS)
        arguments = (operands["x"], operator.groups(operands), *parameters)
        self.groups = Groups.of(*arguments, eps=_EPS, **operator.options())

    def forward_error(self, y: Any, saved: GroupNormForward) -> float:
        """Return the worst error of `apply` and of the forward, in units of the tolerance."""
        bounds = forward_bounds(self.groups, self._exact, str(saved.y.dtype))
        of_y = worst_error(GroupNormForward(y), bounds, ["y"])
        return max(of_y, worst_error(saved, bounds, bounds))

    def backward_error(self, grads: GroupNormGrads) -> float:
        """Return the worst error of the backward, in units of the tolerance."""
        exact = self.operator.backward(reference, self.operands, self._exact)
        bounds = backward_bounds(self.groups, exact, self.operands["dy"])
        return worst_error(grads, bounds, bounds)
