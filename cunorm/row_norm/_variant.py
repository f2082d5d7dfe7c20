# SPDX-License-Identifier: MIT
"""What the caller of a row norm said by itself, apart from arrays: checked, and put into terms."""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

from cunorm import _checks
from cunorm._activations import checked_activation
from cunorm._arrays import Form
from cunorm._builds import Formula
from cunorm._dtypes import DType

_POSITIONS = ("pre", "post")
_BITS = struct.Struct("<3d?")


class Variant(NamedTuple):
    """Which norm is computed, but for its numbers."""

    center: bool = False
    axis: int = -1
    groups: int = 1
    round_before_weight: bool = False
    gate_activation: str = "silu"
    gate_position: str = "post"

    def formula(
        self, *, gate: Form | None, offset: bool, x_dtype: DType, compute: DType
    ) -> Formula:
        """Return what is compiled, for an x of that dtype."""
        return Formula(
            center=self.center,
            activation="identity" if gate is None else self.gate_activation,
            pre_gate=gate is not None and self.gate_position == "pre",
            weight_offset=offset,
            rounded=x_dtype if self.round_before_weight and x_dtype is not compute else None,
        )


class Numbers(NamedTuple):
    """The numbers of a norm, checked."""

    c: float | None
    weight_offset: float
    eps: float = 0.0
    eps_of_sum: bool = False  # eps is added to the sum of squares, not to their mean

    def bits(self) -> bytes:
        """Return them as bits: 0.0 is not -0.0. None is NaN, which no number here may be."""
        c = math.nan if self.c is None else self.c
        return _BITS.pack(c, self.weight_offset, self.eps, self.eps_of_sum)

    @staticmethod
    def of_bits(bits: bytes) -> Numbers:
        """Return the numbers whose bits these are."""
        c, *others = _BITS.unpack(bits)
        return Numbers(None if math.isnan(c) else c, *others)


def checked_variant(function: str, variant: Variant) -> Variant:
    """Return a variant in the types that it is meant to have; unknown names are an error."""
    return Variant(
        _checks.flag(function, "center", variant.center),
        _checks.integer(function, "axis", variant.axis),
        _checks.integer(function, "groups", variant.groups),
        _checks.flag(function, "round_before_weight", variant.round_before_weight),
        checked_activation(function, "gate_activation", variant.gate_activation),
        _checks.choice(function, "gate_position", variant.gate_position, _POSITIONS),
    )


def checked_offset(function: str, weight_offset: object, weight: Any) -> float:
    """Return weight_offset as a float; without weight there is nothing that it could offset."""
    value = _checks.finite(function, "weight_offset", weight_offset)
    if value != 0.0 and weight is None:
        raise ValueError(
            f"{function}: weight_offset is {weight_offset!r}, expected 0 without a weight"
        )
    return value
