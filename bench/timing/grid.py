# SPDX-License-Identifier: MIT
"""The points that are timed, and the grids of CPU and GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from bench.timing.cases import DIRECTIONS, DTYPES, TIMED, Operator, Shape, bytes_moved

DEFAULT_DTYPES = ("float32", "bfloat16")
DEFAULT_OPERATORS = (
    *("rms_norm", "layer_norm", "rms_norm+post_gate", "rms_norm+pre_gate", "l2_norm"),
    *("add_rms_norm", "add_layer_norm", "group_norm+silu"),
)
_QUICK_OPERATORS = ("rms_norm", "layer_norm", "rms_norm+post_gate", "group_norm+silu")

# x has 0.5 to 64 MiB.
_CPU_ROWS = (
    *((4096, 4096), (131072, 64), (65536, 256), (16384, 1024), (1024, 16384)),
    *((64, 262144), (3000, 1003), (4, 65536), (1, 262144), (1024, 256)),
)
_CPU_CHANNELS = (
    *((2, 320, 64, 64), (2, 128, 128, 128), (4, 128, 97, 31)),
    *((1, 512, 64, 64), (8, 256, 32, 32)),
)
_CPU_SAMPLES = ((8, 1024, 1152), (2, 4096, 3072))  # of a DiT-XL, and of Flux
_IN_HALF: dict[Shape, Shape] = {(1024, 256): (2048, 256)}  # as many bytes as in float32

_GPU_LEADING = ((16384, 4096), (131072, 256), (65536, 1024), (4096, 16384), (1024, 65536))
_GPU_ROWS = (131072, 16384, 4096, 512, 64, 8, 1)
_GPU_WIDTHS = (64, 256, 1024, 4096, 16384, 65536, 262144)
_GPU_ELEMENTS = (1 << 16, 1 << 28)  # the fewest and the most elements of x
_GPU_CHANNELS = ((20, 128, 256, 256), *_CPU_CHANNELS)
_GPU_SAMPLES = ((64, 1024, 1152), (16, 4096, 3072))

_QUICK = {
    "cpu": ((4096, 4096), (3000, 1003), (2, 320, 64, 64)),
    "cuda": (
        *(*_GPU_LEADING[:2], (16, 320, 64, 64), _GPU_SAMPLES[0]),
        *((1024, 65536), (4, 128, 256, 256)),
    ),
}


@dataclass(frozen=True)
class Point:
    """An operator in one direction, on one shape and dtype."""

    operator: Operator
    direction: str
    dtype: str
    shape: Shape

    @property
    def shape_text(self) -> str:
        """The shape as on the command line."""
        return "x".join(map(str, self.shape))

    @property
    def elements(self) -> int:
        """The number of elements of x."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes that a call must read and write."""
        itemsize = DTYPES[self.dtype].itemsize
        return bytes_moved(self.operator, self.direction, self.shape, itemsize)

    @property
    def columns(self) -> tuple[str, str, str, str, str]:
        """The columns that identify the point in a CSV."""
        operator = self.operator
        return operator.name, operator.memory, self.direction, self.dtype, self.shape_text

    def __str__(self) -> str:
        return " ".join(filter(None, self.columns))


def default_shapes(device: str, *, quick: bool = False) -> list[Shape]:
    """Return a device's shapes of rows, channels and samples, the most important first."""
    if quick:
        return list(_QUICK[device])
    if device == "cpu":
        return [*_CPU_ROWS, *_CPU_CHANNELS, *_CPU_SAMPLES]
    least, most = _GPU_ELEMENTS
    others = [rows for rows in product(_GPU_ROWS, _GPU_WIDTHS) if least <= math.prod(rows) <= most]
    return list(dict.fromkeys([*_GPU_LEADING, *_GPU_CHANNELS, *_GPU_SAMPLES, *others]))


def quick_operators(device: str) -> tuple[str, ...]:
    """Return the names of a device's most important operators."""
    of_gpu = ("add_rms_norm", "rms_norm+fp8", "layer_norm+modulated") if device == "cuda" else ()
    return (*_QUICK_OPERATORS, *of_gpu)


def default_points(
    device: str,
    operators: Iterable[str],
    directions: Sequence[str] = DIRECTIONS,
    dtypes: Sequence[str] = DEFAULT_DTYPES,
    *,
    quick: bool = False,
) -> Iterator[Point]:
    """Yield the points of a device's grid."""
    for point in points(default_shapes(device, quick=quick), operators, directions, dtypes):
        if device == "cpu" and point.dtype != "float32":
            point = replace(point, shape=_IN_HALF.get(point.shape, point.shape))
        yield point


def points(
    shapes: Iterable[Shape],
    operators: Iterable[str],
    directions: Sequence[str] = DIRECTIONS,
    dtypes: Sequence[str] = DEFAULT_DTYPES,
) -> Iterator[Point]:
    """Yield the points by dtype, then by shape; both orders are those of the arguments."""
    names = set(operators)
    chosen = [operator for operator in TIMED if operator.name in names]
    for dtype, shape in product(dtypes, shapes):
        for operator, direction in product(chosen, directions):
            if direction in operator.directions and operator.takes(shape):
                yield Point(operator, direction, dtype, shape)
