# SPDX-License-Identifier: MIT
"""What a module is made with, checked: an error names the class, the argument and its value."""

from collections.abc import Iterable
from typing import Any

from cunorm._core import validate


def row_shape(module: Any, shape: Any) -> tuple[int, ...]:
    """Return normalized_shape as torch keeps it."""
    kind, is_one = type(module).__name__, isinstance(shape, str) or not isinstance(shape, Iterable)
    sizes = [shape] if is_one else shape
    found = tuple([validate.integer(kind, "normalized_shape", size) for size in sizes])
    if not found or min(found) < 1:
        raise ValueError(
            f"{kind}: normalized_shape is {found}, expected one axis or more, of at least one "
            "element each"
        )
    return found


def epsilon(module: Any) -> None:
    validate.epsilon(type(module).__name__, module.eps)


def group_sizes(module: Any, num_groups: Any, num_channels: Any) -> None:
    """Check what torch takes as it is, and that the one divides the other."""
    kind = type(module).__name__
    for name, value in (("num_groups", num_groups), ("num_channels", num_channels)):
        if validate.integer(kind, name, value) < 1:
            raise ValueError(f"{kind}: {name} is {value!r}, expected at least 1")
    if num_channels % num_groups:
        raise ValueError(
            f"{kind}: num_groups is {num_groups}, expected a divisor of num_channels, "
            f"{num_channels}"
        )


def no_names(module: Any, **arguments: Any) -> None:
    """Check that no name, as of an activation, is given in the place of another argument."""
    kind = type(module)
    for name, value in arguments.items():
        if isinstance(value, str):
            what = "a number" if name == "eps" else "True or False"
            keyword = f": an activation is a keyword, activation={value!r}"
            raise TypeError(
                f"{kind.__name__}: {name} is {value!r}, expected {what}"
                f"{keyword if hasattr(kind, 'activation') else ''}"
            )


def offset(module: Any, offset: Any, rounds: Any) -> None:
    """Check the options of an RMSNorm's weight."""
    kind = type(module).__name__
    validate.flag(kind, "round_before_weight", rounds)
    if validate.finite(kind, "weight_offset", offset) and not module.elementwise_affine:
        raise ValueError(
            f"{kind}: weight_offset is {offset}, expected 0.0 as elementwise_affine is False"
        )


def gate(module: Any, groups: Any, activation: Any, position: Any) -> None:
    """Check the options of a GatedRMSNorm."""
    kind, shape = type(module).__name__, module.normalized_shape
    validate.activation(kind, "gate_activation", activation)
    validate.choice(kind, "gate_position", position, ("pre", "post"))
    count = validate.integer(kind, "groups", groups)
    if count < 1 or shape[-1] % count or (count > 1 and len(shape) > 1):
        expected = f"a divisor of {shape[-1]}" if len(shape) == 1 else "1"
        raise ValueError(
            f"{kind}: groups is {groups!r}, expected {expected} as normalized_shape is {shape}"
        )
