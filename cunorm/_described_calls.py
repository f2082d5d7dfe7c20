# SPDX-License-Identifier: MIT
"""The calls that a user describes in words to `warmup`, every combination of what is said."""

from __future__ import annotations

from collections.abc import Iterator, Set, ValuesView
from functools import cache
from inspect import signature
from itertools import product
from numbers import Number
from typing import Any

from cunorm import _checks, group_norm, row_norm
from cunorm._dtypes import DType, parse_dtype, parse_optional_dtype
from cunorm._planned_builds import Layer
from cunorm.group_norm._backward_plan import NEEDS as GROUP_NEEDS
from cunorm.group_norm._planned_builds import LAYOUTS, GroupLayer
from cunorm.row_norm._backward_plan import NEEDS
from cunorm.row_norm._variant import Variant

FUNCTION = "warmup"
AUTO = "auto"
FUNCTIONS = (*row_norm.__all__, *group_norm.__all__)

# What holds for a function without the option.
_UNTAKEN = {
    "weight": None,
    "bias": None,
    "residual": None,
    "gate": None,
    "d_residual": None,
    "dtype": None,
    "residual_dtype": None,
    "center": False,
    "groups": 1,
    "weight_offset": 0.0,
    "round_before_weight": False,
    "gate_activation": "silu",
    "gate_position": "post",
    "num_groups": None,
    "positions": None,
    "layout": "channels_last",
    "activation": None,
    "needs": NEEDS,
    "accumulate": False,
}

AnyLayer = Layer | GroupLayer


def described_calls(
    ops: Any, dtypes: Any, options: dict[str, Any]
) -> Iterator[tuple[str, AnyLayer]]:
    """Yield the name of a function and what it is called for; `options` are those of _UNTAKEN."""
    names = [_checks.choice(FUNCTION, "ops", name, FUNCTIONS) for name in several("ops", ops)]
    xs = [parse_dtype(FUNCTION, "dtypes", spec) for spec in several("dtypes", dtypes)]
    choices = {option: several(option, value) for option, value in options.items()}
    for option, values in choices.items():
        if not any(option in _taken(name) for name in names):
            _check_not_given(names, option, values)
    for name in names:
        of_name = [
            values if option in _taken(name) else (_UNTAKEN[option],)
            for option, values in choices.items()
        ]
        for x, chosen in product(xs, product(*of_name)):
            layer = _group_layer if name in group_norm.__all__ else _layer
            yield name, layer(name, x, dict(zip(choices, chosen, strict=True)))


def several(argument: str, value: Any) -> tuple[Any, ...]:
    """Return the items of a list, tuple, set, range or view of a dict; all else is the one item."""
    if not isinstance(value, list | tuple | range | Set | ValuesView):
        return (value,)
    if len(value) == 0:
        raise ValueError(f"{FUNCTION}: {argument} is {value!r}, expected at least one")
    return tuple(value)


def positive(argument: str, given: Any) -> int:
    """Return a size that was given as one."""
    number = _checks.integer(FUNCTION, argument, given)
    if number < 1:
        raise ValueError(f"{FUNCTION}: {argument} is {given!r}, expected at least 1")
    return number


@cache
def _taken(name: str) -> frozenset[str]:
    """Return which options say something of a function's calls."""
    family = group_norm if name in group_norm.__all__ else row_norm
    parameters = set(signature(getattr(family, name)).parameters)
    if family is group_norm:
        parameters |= {"positions", "layout"}
    if name.endswith("_backward"):
        parameters.add("dtype")  # of the forward, and so on
        if "d_residual" in parameters:
            parameters |= {"residual", "residual_dtype"}
    return frozenset(parameters)


def _check_not_given(names: list[str], option: str, values: tuple[Any, ...]) -> None:
    for value in values:
        if not _says_nothing(option, value):
            who = f"{names[0]} does not take" if len(names) == 1 else f"none of {names} takes"
            raise ValueError(f"{FUNCTION}: {option} is {value!r}, which {who}")


def _says_nothing(option: str, value: Any) -> bool:
    """Whether that is what holds for a function without the option."""
    if value is None or value is False or _is_auto(value):
        return True
    absent = _UNTAKEN[option]
    if isinstance(absent, tuple):
        return _is_names(value) and value == absent
    # Of others, == may be an array, or True of what is not the same: to NumPy float64 equals None.
    return isinstance(value, str | Number) and value == absent


def _is_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) for name in value)


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == AUTO


def _layer(name: str, x: DType, chosen: dict[str, Any]) -> Layer:
    return Layer(
        FUNCTION,
        Variant(
            "layer_norm" in name or chosen["center"],
            groups=chosen["groups"],
            round_before_weight=chosen["round_before_weight"],
            gate_activation=chosen["gate_activation"],
            gate_position=chosen["gate_position"],
        ),
        x,
        weight=_operand("weight", chosen["weight"], x, auto=True),
        bias=_operand("bias", chosen["bias"], x),
        residual=_operand("residual", chosen["residual"], x, auto=name.startswith("add_")),
        gate=_operand("gate", chosen["gate"], x),
        y=parse_optional_dtype(FUNCTION, "dtype", chosen["dtype"]),
        residual_dtype=parse_optional_dtype(FUNCTION, "residual_dtype", chosen["residual_dtype"]),
        weight_offset=chosen["weight_offset"],
        d_residual=_d_residual(chosen["d_residual"]),
        needs=_checks.names(FUNCTION, "needs", chosen["needs"], NEEDS),
        accumulate=chosen["accumulate"],
    )


def _group_layer(name: str, x: DType, chosen: dict[str, Any]) -> GroupLayer:
    num_groups = chosen["num_groups"]
    if name != "instance_norm":
        num_groups = _checks.integer(FUNCTION, "num_groups", num_groups)
    needs = _checks.names(FUNCTION, "needs", chosen["needs"], NEEDS)
    return GroupLayer(
        FUNCTION,
        x,
        num_groups,
        positive("positions", chosen["positions"]),
        _checks.choice(FUNCTION, "layout", chosen["layout"], LAYOUTS),
        chosen["activation"],
        weight=_operand("weight", chosen["weight"], x, auto=True),
        bias=_operand("bias", chosen["bias"], x),
        y=parse_optional_dtype(FUNCTION, "dtype", chosen["dtype"]),
        needs=needs.intersection(GROUP_NEEDS),
        accumulate=chosen["accumulate"],
    )


def _operand(argument: str, value: Any, x: DType, *, auto: bool = False) -> DType | None:
    """Return the dtype that an operand has, None where there is none."""
    if value is None or isinstance(value, bool):
        return x if value else None
    if _is_auto(value):
        return x if auto else None
    return _dtype(argument, value)


def _d_residual(value: Any) -> DType | bool | None:
    if value is None or isinstance(value, bool):
        return bool(value)
    return None if _is_auto(value) else _dtype("d_residual", value)


def _dtype(argument: str, value: Any) -> DType:
    try:
        return parse_dtype(FUNCTION, argument, value)
    except TypeError as error:
        raise TypeError(f"{error}, or True, False or None") from None
