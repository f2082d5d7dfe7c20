# SPDX-License-Identifier: MIT
"""Errors for wrong input: each has the function, the argument, its value and what is expected."""

import math
import numbers
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any, get_args

import numpy as np

from cunorm._core.dtypes import FLOAT32, FLOAT64, DType, pass_hint
from cunorm._core.tensor import WHOLE, OptionalSpec, RowAxes, Shape, TensorSpec
from cunorm._core.types import Activation

# The keys are the public names of activations, the values their names in the sources.
ACTIVATIONS: dict[str, str] = {name: name for name in get_args(Activation)} | {"swish": "silu"}


def describe_type(kind: type) -> str:
    """Describe a wrong type for an error; the name of a NumPy scalar has its module in front."""
    scalar_of = f"{kind.__module__}." if issubclass(kind, np.generic) else ""
    return "None" if kind is type(None) else f"of type {scalar_of}{kind.__qualname__}"


def array_hint(function: str, argument: str, value: object, make: str = "numpy.asarray") -> str:
    """Return the end of an error for an object that is no array: what to pass instead."""
    kind, items = type(value), value if isinstance(value, list | tuple) else [value]
    is_numpy = make == "numpy.asarray"
    if hasattr(kind, "_fields"):  # a tuple of results may have the array that was meant
        return pass_hint(argument, f"{argument}.{argument}") if argument in kind._fields else ""
    has_torchs_name = "layer_norm" in function or "rms_norm" in function
    is_shape = has_torchs_name and argument == "weight" and {*map(type, items)} == {int}
    if kind is float and argument in ("weight", "bias"):
        return ": numbers such as eps are given by keyword"
    no_shape, made = "normalized_shape is not an argument, see axis", f"{make}({argument})"
    if is_shape and kind is not list:
        return f": {no_shape}"
    if hasattr(kind, "to_numpy"):
        table = f"{argument}.to_numpy()"
        return pass_hint(argument, table if is_numpy else f"{make}({table})")
    if hasattr(kind, "__jax_array__") and is_numpy:
        return f": use cunorm.jax, or pass {argument}[...]"
    is_like_array = hasattr(kind, "__array__") and not issubclass(kind, np.generic)
    has_no_text = items is value and not any(isinstance(item, str | bytes) for item in items)
    hint = pass_hint(argument, made) if is_like_array or has_no_text else ""
    return f"{hint}; {no_shape}" if is_shape else hint


def shown(value: object) -> str:
    """Return a wrong scalar as a text for an error; for an array with axes, only its type."""
    try:
        has_axes = bool(getattr(value, "shape", ()))
    except RuntimeError:  # a nested tensor has no single shape
        has_axes = True
    return describe_type(type(value)) if has_axes else repr(value)


def integer(function: str, argument: str, value: object) -> int:
    if type(value) is int:  # isinstance() of an abstract type is slow
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{function}: {argument} is {shown(value)}, expected an int")
    return int(value)


def axes(function: str, argument: str, value: Any) -> int | tuple[int, ...]:
    """Check the first axis of a row, or a tuple of all its axes."""
    if type(value) is int:
        return value
    is_several = isinstance(value, tuple | list)
    given = value if is_several else (value,)
    if any(isinstance(one, bool) or not isinstance(one, numbers.Integral) for one in given):
        expected = "expected an int or a tuple of ints"
        raise TypeError(f"{function}: {argument} is {shown(value)}, {expected}")
    return tuple(map(int, given)) if is_several else int(value)


def flag(function: str, argument: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{function}: {argument} is {shown(value)}, expected True or False")
    return value


def finite(function: str, argument: str, value: object, expected: str = "a finite number") -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{function}: {argument} is {shown(value)}, expected a number")
    try:
        number = float(value)
    except OverflowError:  # an int beyond the largest float64 raises this
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{function}: {argument} is {value!r}, expected {expected}")
    return number


def epsilon(function: str, eps: object) -> float:
    expected = "a finite number of at least 0"
    value = finite(function, "eps", eps, expected)
    if value < 0:
        raise ValueError(f"{function}: eps is {eps!r}, expected {expected}")
    return value


def choice(function: str, argument: str, value: Any, allowed: Collection[str]) -> str:
    if isinstance(value, str) and value in allowed:
        return value
    *others, last = map(repr, allowed)
    error = ValueError if isinstance(value, str) else TypeError
    raise error(f"{function}: {argument} is {shown(value)}, expected {', '.join(others)} or {last}")


def activation(function: str, argument: str, value: Any) -> str:
    return ACTIVATIONS[choice(function, argument, value, ACTIVATIONS)]


def names(function: str, argument: str, value: Any, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """Check a collection of names, and return the names in the order of `allowed`."""
    expected = f"expected a tuple of {', '.join(map(repr, allowed))}"
    if not isinstance(value, list | tuple | Set):
        raise TypeError(f"{function}: {argument} is {value!r}, {expected}")
    if not all(isinstance(name, str) and name in allowed for name in value):
        raise ValueError(f"{function}: {argument} is {value!r}, {expected}")
    return tuple(name for name in allowed if name in value)


def same_device(
    function: str,
    x: TensorSpec,
    operands: Iterable[tuple[str, OptionalSpec]],
    of: str = "x",
) -> None:
    for argument, operand in operands:
        if operand is not None and operand.device != x.device:
            raise ValueError(
                f"{function}: {argument} is on {operand.device}, expected {x.device}, "
                f"the device of {of}"
            )


def agreed_dtype(
    function: str, argument: str, dtype: DType | None, other: str, operand: OptionalSpec
) -> None:
    """Check that an array has the dtype that an argument gives, if both are given."""
    if dtype is not None and operand is not None and operand.dtype is not dtype:
        raise ValueError(
            f"{function}: {other} has dtype {operand.dtype}, expected {dtype}, that of {argument}"
        )


def out_type(function: str, out: object, result: type[tuple[Any, ...]]) -> None:
    if out is not None and not isinstance(out, result):
        got, name = describe_type(type(out)), result.__name__
        named = f"{'an' if name.startswith('A') else 'a'} {name}"
        raise TypeError(f"{function}: out is {got}, expected {named} of arrays and Nones")


def absent(function: str, argument: str, spec: OptionalSpec, reason: str) -> None:
    """Check that no array is given for an output that the call does not have."""
    if spec is not None:
        raise ValueError(f"{function}: {argument} is given, expected None: {reason}")


def output(function: str, argument: str, spec: TensorSpec, shape: Shape, rows: RowAxes) -> None:
    """Check that a given output has the expected shape, and strides that kernels can follow."""
    shape_of(function, argument, spec, shape)
    own_memory(function, argument, spec)
    if rows.layout(spec) is None:
        several = "contiguous rows and at most three leading axes that no single stride walks"
        expected = "a contiguous array" if rows is WHOLE else several
        raise ValueError(f"{function}: {argument} has strides {spec.strides}, expected {expected}")


def shape_of(function: str, argument: str, spec: TensorSpec, shape: Shape) -> None:
    if spec.shape != shape:
        raise ValueError(f"{function}: {argument} has shape {spec.shape}, expected {shape}")


def own_memory(function: str, argument: str, spec: TensorSpec) -> None:
    """Check that no two elements of a given output share memory."""
    reach = 1
    for stride, size in sorted(zip(map(abs, spec.strides), spec.shape, strict=True)):
        if size > 1 and stride < reach and 0 not in spec.shape:
            raise ValueError(
                f"{function}: {argument} has strides {spec.strides}, with which elements may share "
                "memory, expected memory of its own for each element"
            )
        reach += stride * max(size - 1, 0)


def accumulators(function: str, wanted: Collection[str], given: Mapping[str, OptionalSpec]) -> None:
    """Check that arrays are given to which the wanted gradients of parameters can be added."""
    for name in ("dweight", "dbias"):
        spec = given[name]
        if name in wanted and (spec is None or spec.dtype not in (FLOAT32, FLOAT64)):
            got = "None" if spec is None else f"of dtype {spec.dtype}"
            raise ValueError(
                f"{function}: out.{name} is {got}, expected an array of float32 or float64 to add "
                "to, as accumulate is True"
            )
