# SPDX-License-Identifier: MIT
"""The four storage types, and their conversion from and to the dtypes of array libraries."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One of the four storage types. Each of them is a single object, compared by identity."""

    name: str
    cuda: str  # the type's name in the CUDA sources
    itemsize: int

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name.upper()  # copy and pickle return the type itself


FLOAT16 = DType("float16", "fp16", 2)
BFLOAT16 = DType("bfloat16", "bf16", 2)
FLOAT32 = DType("float32", "fp32", 4)
FLOAT64 = DType("float64", "fp64", 8)
DTYPES = {dtype.name: dtype for dtype in (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)}
ALLOWED = "float16, bfloat16, float32 or float64"

_NUMPY: dict[DType, np.dtype[Any]] = {
    dtype: np.dtype(dtype.name) for dtype in (FLOAT16, FLOAT32, FLOAT64)
}
# The keys are the dtypes of NumPy, CuPy and JAX arrays. bfloat16 is added when it first occurs,
# because it needs ml_dtypes.
_FROM_NUMPY: dict[Any, DType] = {numpy: dtype for dtype, numpy in _NUMPY.items()}


def promoted(a: DType, b: DType) -> DType:
    """Return the type of a sum of two types; for float16 and bfloat16 it is float32."""
    if a is b:
        return a
    return FLOAT64 if FLOAT64 in (a, b) else FLOAT32


def compute_type(*dtypes: DType | None) -> DType:
    return FLOAT64 if FLOAT64 in dtypes else FLOAT32


def pass_hint(argument: str, instead: str) -> str:
    """Return the end of an error: what to pass. It is empty for outputs and the workspace."""
    return "" if argument.startswith("out") or argument == "workspace" else f": pass {instead}"


def dtype_of(function: str, argument: str, numpy: Any) -> DType:
    """Return the storage type of an array's NumPy dtype."""
    dtype = _FROM_NUMPY.get(numpy)
    if dtype is not None:
        return dtype
    name = str(getattr(numpy, "name", numpy))
    if name in DTYPES and not numpy.isnative:
        raise TypeError(
            f"{function}: {argument} has dtype {numpy.str} in foreign byte order, expected the "
            f"machine's own: pass {argument}.astype('{name}')"
        )
    if name not in DTYPES:
        is_integer = getattr(numpy, "kind", "") in ("i", "u", "b")
        hint = pass_hint(argument, f"{argument}.astype('float32')") if is_integer else ""
        raise TypeError(f"{function}: {argument} has dtype {name}, expected {ALLOWED}{hint}")
    _FROM_NUMPY[numpy] = DTYPES[name]
    return DTYPES[name]


def parse_dtype(function: str, argument: str, spec: object) -> DType:
    """Return the storage type for a name, or for a dtype or scalar type of any library.

    Refuse Python's ``float``, which is float64 in NumPy and float32 in other libraries.
    """
    name = _name(spec)
    if name not in DTYPES:
        got = repr(spec) if isinstance(spec, str) or name is None else name
        raise TypeError(f"{function}: {argument} is {got}, expected {ALLOWED}")
    return DTYPES[name]


def parse_optional_dtype(function: str, argument: str, spec: object) -> DType | None:
    return None if spec is None else parse_dtype(function, argument, spec)


def _name(spec: object) -> str | None:
    """Return the name that a dtype has in its library, or None for an object of another kind."""
    if isinstance(spec, str):
        return spec
    if type(spec).__module__.partition(".")[0] == "torch":
        return str(spec).removeprefix("torch.")
    if isinstance(spec, type) and (issubclass(spec, np.generic) or hasattr(spec, "dtype")):
        spec = np.dtype(spec)  # for example np.float32, ml_dtypes.bfloat16, jax.numpy.float32
    if isinstance(spec, np.dtype):
        return str(spec.name if spec.isnative else spec.str)
    return None


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the NumPy dtype of a storage type; bfloat16 needs ml_dtypes."""
    if dtype not in _NUMPY:
        try:
            import ml_dtypes
        except ImportError:
            raise TypeError(
                "a bfloat16 NumPy array needs the package ml_dtypes: pip install ml_dtypes"
            ) from None
        _NUMPY[dtype] = np.dtype(ml_dtypes.bfloat16)
    return _NUMPY[dtype]
