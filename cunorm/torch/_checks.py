# SPDX-License-Identifier: MIT
"""What a module is made with, checked: an error names the class, the argument and its value."""

from collections.abc import Iterable

from torch.nn import Module

from cunorm._core import validate
from cunorm._core.dtypes import parse_optional_dtype


def row_shape(module: Module, shape: object) -> tuple[int, ...]:
    """Return normalized_shape as torch keeps it."""
    kind = type(module).__name__
    sizes = shape if isinstance(shape, Iterable) and not isinstance(shape, str) else [shape]
    found = tuple([validate.integer(kind, "normalized_shape", size) for size in sizes])
    if not found or min(found) < 1:
        raise ValueError(
            f"{kind}: normalized_shape is {found}, expected one axis or more, of at least one "
            "element each"
        )
    return found


def epsilon(module: Module) -> None:
    validate.epsilon(type(module).__name__, module.eps)


def group_sizes(module: Module, num_groups: int, num_channels: int) -> None:
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


def of_torch(module: Module, dtype: object, **values: object) -> None:
    """Check arguments that torch takes as they are: a dtype, an eps, those that are True or False.

    A name in the place of one of these is that of an activation.
    """
    kind = type(module)
    parse_optional_dtype(kind.__name__, "dtype", dtype)
    for name, value in values.items():
        if isinstance(value, str) and hasattr(kind, "activation"):
            what = "a number" if name == "eps" else "True or False"
            raise TypeError(
                f"{kind.__name__}: {name} is {value!r}, expected {what}: an activation is a "
                f"keyword, activation={value!r}"
            )
        if name != "eps":
            validate.flag(kind.__name__, name, value)


def offset(module: Module, offset: float, rounds: bool) -> None:
    """Check the options of an RMSNorm's weight."""
    kind = type(module).__name__
    validate.flag(kind, "round_before_weight", rounds)
    if validate.finite(kind, "weight_offset", offset) and not module.elementwise_affine:
        raise ValueError(
            f"{kind}: weight_offset is {offset}, expected 0.0 as elementwise_affine is False"
        )


def gate(
    module: Module, shape: tuple[int, ...], groups: int, activation: str, position: str
) -> None:
    """Check the options of a GatedRMSNorm."""
    kind = type(module).__name__
    validate.activation(kind, "gate_activation", activation)
    validate.choice(kind, "gate_position", position, ("pre", "post"))
    count = validate.integer(kind, "groups", groups)
    if count < 1 or shape[-1] % count or (count > 1 and len(shape) > 1):
        expected = f"a divisor of {shape[-1]}" if len(shape) == 1 else "1"
        raise ValueError(
            f"{kind}: groups is {groups!r}, expected {expected} as normalized_shape is {shape}"
        )
