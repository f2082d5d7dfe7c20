# SPDX-License-Identifier: MIT
"""Compile and run loops that use the kernels' headers; compute exact roundings to 16 bits."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.internals import _compile, _files, compiler, source_text
from tests.support.operands import DTYPES

INCLUDE = Path(_compile.__file__).parent / "include"
HOST = INCLUDE / "host"
MACHINES = {  # values of -march, and the CPU flags that their code needs
    "native": set(),
    "x86-64-v3": {"avx2", "fma", "f16c", "bmi2"},
    "x86-64": {"sse2"},
}
CUDA_NAN = 0x7FFF
needs_a_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


def runs_here(machine: str) -> bool:
    """Return whether this machine runs code that is compiled with a given -march."""
    flags = Path("/proc/cpuinfo")
    return MACHINES[machine] <= set(flags.read_text().split() if flags.exists() else ())


def for_machine(machine: str) -> tuple[str, ...]:
    """Return the shipped options of CPU builds, with a given -march and with exported functions."""
    if not runs_here(machine):
        pytest.skip(f"this machine does not run code for {machine}")
    return (f"-march={machine}", *_compile._OPTIONS, "-fvisibility=default")


def compiled(folder: Path, text: str, *options: str, device: str | None = None) -> Path:
    """Compile a probe of the kernels' headers, and return the path of the library.

    No other library shares its variables, such as the index of a block.
    By default the headers are those of the CPU build; with `device`, the text of a stand-in for
    CUDA, they are those of a GPU's build.
    """
    host = (folder,) if device else (folder, HOST)
    (folder / "probe.cu").write_text(text)
    own = f"#define LIBRARIES probe_{_files.digest(text, *options)}\n"
    text = own + (device or '#include "device.h"\n') + source_text("probe", host)
    (folder / "probe.cpp").write_text(text)
    command = [*compiler().command, *options, *(f"-I{path}" for path in (*host, INCLUDE))]
    command += [os.fspath(folder / "probe.cpp"), "-o", os.fspath(folder / "probe.so")]
    subprocess.run(command, check=True)
    return folder / "probe.so"


def loaded(library: Path) -> Callable[..., Any]:
    """Return a function that runs a loop of the library over an array of any size.

    It takes the loop's name, the array, and the dtype of each result.
    """
    functions = ctypes.CDLL(os.fspath(library))

    def run(name: str, values: Any, *dtypes: Any) -> Any:
        padded = np.pad(values, (0, -len(values) % 64), mode="edge")  # to whole vectors
        out = [np.zeros(len(padded), dtype) for dtype in dtypes or (values.dtype,)]
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (padded, *out))
        getattr(functions, name)(*pointers, ctypes.c_longlong(len(padded)))
        results = [array[: len(values)] for array in out]
        return results if len(results) > 1 else results[0]

    return run


# --- roundings to 16 bits -------------------------------------------------------------------------


def every_16_bits() -> Any:
    return np.arange(1 << 16, dtype=np.uint16)


def magnitudes(narrow: str) -> Any:
    """Return every finite value from 0 up, then the value that would follow the largest."""
    infinity = np.array(np.inf, DTYPES[narrow]).view(np.uint16)
    finite = every_16_bits()[:infinity].view(DTYPES[narrow]).astype(np.float64)
    return np.append(finite, 2 * finite[-1] - finite[-2])


def nearest_even(narrow: str, values: Any) -> Any:
    """Return the bits of values rounded to nearest even, by search in the table of all results.

    The index of a value in the table is its bits: an even index means an even fraction. All
    midpoints are exact in float64.
    """
    table = magnitudes(narrow)
    midpoints = (table[:-1] + table[1:]) / 2
    magnitude = np.abs(values).astype(np.float64)
    below, above = (np.searchsorted(midpoints, magnitude, side) for side in ("left", "right"))
    bits = np.where(below % 2 == 0, below, above).astype(np.uint16)
    bits |= np.signbit(values).astype(np.uint16) << 15
    return np.where(np.isnan(values), np.uint16(CUDA_NAN), bits)


def around_every_rounding_boundary(narrow: str, dtype: type) -> Any:
    """Return `narrow`'s values and midpoints, and their neighbours in `dtype`, of both signs."""
    table = magnitudes(narrow)
    with np.errstate(over="ignore", under="ignore"):
        centres = np.concatenate([table, (table[:-1] + table[1:]) / 2]).astype(dtype)
        near = [np.nextafter(centres, dtype(0)), centres, np.nextafter(centres, dtype(np.inf))]
    return np.concatenate([*near, *(-values for values in near)])


def special_values(dtype: type) -> Any:
    info = np.finfo(dtype)
    values = [0.0, np.inf, np.nan, info.max, info.tiny, info.smallest_subnormal, info.eps]
    return np.array([*values, *(-v for v in values)], dtype)
