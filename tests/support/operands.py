# SPDX-License-Identifier: MIT
"""Operands for tests: the same numbers in each run, in any storage dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from zlib import crc32

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
WIDTHS = (1, 2, 31, 33, 127, 128, 1000, 4096, 5003, 16384, 65536)


class Norm(NamedTuple):
    """A named norm: its parameters, and its options as a case of `normalize`."""

    parameters: tuple[str, ...]
    eps: float  # its default
    center: bool = False
    c: float | None = None
    options: tuple[str, ...] = ()  # the fields above that its functions take as keywords
    has_residual: bool = True

    def oracle_options(self, width: int) -> dict[str, Any]:
        """Return the oracle's options; l2_norm adds its eps to the sum of squares, not the mean."""
        eps = self.eps if self.has_residual else self.eps / width
        return {"c": self.c, "center": self.center, "eps": eps}

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments of the function; its name implies the other options."""
        return {name: getattr(self, name) for name in self.options}


NORMS = {
    "normalize": Norm(("weight", "bias"), 1e-6, True, 3.0, ("c", "center")),
    "rms_norm": Norm(("weight", "bias"), 1e-6),
    "layer_norm": Norm(("weight", "bias"), 1e-5, True),
    "l2_norm": Norm((), 1e-12, c=1.0, has_residual=False),
}


def row_count(width: int) -> int:
    """Return a number of rows: enough for sums over rows, few enough to be quick."""
    return max(3, min(41, 80_000 // width))


def draw(
    name: str,
    shape: tuple[int, ...] | int,
    dtype: str,
    *,
    mean: float = 0.0,
    deviation: float = 1.0,
) -> Array:
    """Draw normal numbers, seeded by the name, shape and dtype of an operand."""
    rng = np.random.default_rng(crc32(f"{name} {shape} {dtype}".encode()))
    return (mean + deviation * rng.standard_normal(shape)).astype(DTYPES[dtype])


def optional(name: str, shape: tuple[int, ...] | int, dtype: str | None) -> Array | None:
    """Draw an operand, or return None if its dtype is None; a weight is about 1."""
    if dtype is None:
        return None
    return draw(name, shape, dtype, mean=float(name == "weight"), deviation=0.5)


def parameters(norm: Norm, shape: tuple[int, ...] | int, dtype: str) -> dict[str, Array]:
    """Draw weight and bias, as far as the norm has them."""
    drawn = {name: optional(name, shape, dtype) for name in norm.parameters}
    return {name: array for name, array in drawn.items() if array is not None}


def weight_and_bias(given: dict[str, Array]) -> tuple[Array | None, Array | None]:
    """Return weight and bias, as the checks of bounds.py take them."""
    return given.get("weight"), given.get("bias")


def saved(norm: Norm, forward: Any) -> dict[str, Any]:
    """Return the arguments of the backward that are in a forward's result."""
    return {"rstd": forward.rstd} | ({"mean": forward.mean} if norm.center else {})


def bits(array: Any) -> Array:
    """Return an array's memory as integers, to compare bits."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def assert_same_bits(actual: Any, expected: Any, what: str = "result") -> None:
    assert actual.dtype == expected.dtype, f"{what} is {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what} is {actual.shape}, expected {expected.shape}"
    different = np.count_nonzero(bits(actual) != bits(expected))
    assert not different, f"{what}: {different} of {math.prod(actual.shape)} elements differ"


def assert_same_fields(actual: Any, expected: Any) -> None:
    """Compare results of a norm: in each field both are None, or equal bit for bit."""
    for field in expected._fields:
        array, right = getattr(actual, field), getattr(expected, field)
        assert (array is None) == (right is None), field
        if right is not None:
            assert_same_bits(array, right, field)


@contextmanager
def at(*context: Any) -> Iterator[None]:
    """Add context to an assertion's message, for loops over many cases in one test."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{', '.join(map(str, context))}: {error}") from error
