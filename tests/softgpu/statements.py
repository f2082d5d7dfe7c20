# SPDX-License-Identifier: MIT
"""Runs C++ statements and PTX instructions on the elements of arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.softgpu.launching import cupy, launch

# For each type of PTX: the type in C++, the letter in inline PTX, and the dtype.
TYPES = {
    "f64": ("double", "d", np.dtype("f8")),
    "f32": ("float", "f", np.dtype("f4")),
    "f16": ("unsigned short", "h", np.dtype("f2")),
    "bf16": ("unsigned short", "h", np.dtype(ml_dtypes.bfloat16)),
    "s64": ("long long", "l", np.dtype("i8")),
    "u64": ("unsigned long long", "l", np.dtype("u8")),
    "s32": ("int", "r", np.dtype("i4")),
    "u32": ("unsigned", "r", np.dtype("u4")),
    "s16": ("short", "h", np.dtype("i2")),
    "s8": ("signed char", "", np.dtype("i1")),
}


def computed(bodies: list[tuple[str, str]], *arrays: np.ndarray) -> list[np.ndarray]:
    """Return an array of r for each body, (type of r, C++ statements).

    The statements set r from a, b and c, the elements of the arrays at one index.
    """
    names = {dtype: name for name, _, dtype in TYPES.values()} | {np.dtype("u2"): "unsigned short"}
    size = arrays[0].size
    text = "".join(f", const {names[v.dtype]}* p{k}" for k, v in enumerate(arrays)) + ") {"
    text += "int i = threadIdx.x;"
    text += "".join(f"{names[v.dtype]} {'abc'[k]} = p{k}[i];" for k, v in enumerate(arrays))
    for k, (to, body) in enumerate(bodies):
        kind = TYPES[to][0]
        text += f"{{ {kind} r; {body} *({kind}*)(y + {k * size} + i) = r; }}"
    out = cupy.zeros((len(bodies), size), "u8")
    launch(f"unsigned long long* y{text} }}", out, *map(cupy.asarray, arrays), block=size)
    return [
        row.view(TYPES[to][2])[:: 8 // TYPES[to][2].itemsize]
        for row, (to, _) in zip(out.get(), bodies, strict=True)
    ]


def run(to: str, source: str, instructions: list[str], *arrays: np.ndarray) -> list[np.ndarray]:
    """Return the results, of type `to`, of PTX instructions on elements of type `source`."""
    raw = [v.view("u2") if v.dtype.itemsize == 2 else v for v in arrays]
    inputs = ", ".join(f'"{TYPES[source][1]}"({"abc"[k]})' for k in range(len(arrays)))
    operands = ", ".join(f"%{k + 1}" for k in range(len(arrays)))
    result = f'"={TYPES[to][1]}"(r)'
    asm = [
        f'asm volatile("{name} %0, {operands};" : {result} : {inputs});' for name in instructions
    ]
    return computed([(to, body) for body in asm], *raw)
