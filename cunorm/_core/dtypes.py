# SPDX-License-Identifier: MIT
"""The storage types, and their conversion from and to the dtypes of array libraries.

Operands have one of four types. Quantised results and their scales have others.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """A storage type. Each type is a single object, compared by identity."""

    name: str
    cuda: str  # the type's name in the CUDA sources
    itemsize: int

    @property
    def host(self) -> str:
        """Return NumPy's name of a type with as many bits, which needs no other package."""
        return "=u1" if self.itemsize == 1 else f"=f{self.itemsize}"

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name.upper()  # copy and pickle return the type itself


FLOAT16 = DType("float16", "fp16", 2)
BFLOAT16 = DType("bfloat16", "bf16", 2)
FLOAT32 = DType("float32", "fp32", 4)
FLOAT64 = DType("float64", "fp64", 8)
DTYPES = {dtype.name: dtype for dtype in (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)}
FLOAT8_E4M3FN = DType("float8_e4m3fn", "e4m3", 1)
FLOAT8_E5M2 = DType("float8_e5m2", "e5m2", 1)
INT8 = DType("int8", "s8", 1)
FLOAT8_E8M0FNU = DType("float8_e8m0fnu", "e8m0", 1)  # of scales
QUANTIZED = {dtype.name: dtype for dtype in (FLOAT8_E4M3FN, FLOAT8_E5M2, INT8)}
SCALES = {dtype.name: dtype for dtype in (FLOAT32, FLOAT8_E8M0FNU)}
ALL_DTYPES = DTYPES | QUANTIZED | SCALES
# The types of operands that have others than `DTYPES`; plans check which of them an output has.
_OWN = {"scale": {"float32": FLOAT32}, "out.q": QUANTIZED, "out.scale": SCALES}

_NUMPY: dict[DType, np.dtype[Any]] = {
    dtype: np.dtype(dtype.name) for dtype in (FLOAT16, FLOAT32, FLOAT64, INT8)
}
# The keys are the dtypes of NumPy, CuPy and JAX arrays. Those of ml_dtypes are added when they
# first occur.
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
    if dtype is not None and dtype.name in allowed(argument):
        return dtype
    name = str(getattr(numpy, "name", numpy))
    if name in DTYPES and not numpy.isnative:
        raise TypeError(
            f"{function}: {argument} has dtype {numpy.str} in foreign byte order, expected the "
            f"machine's own: pass {argument}.astype('{name}')"
        )
    if name not in allowed(argument):
        wide = f"{argument}.astype('float32')"
        expected = expected_dtypes(argument, name, getattr(numpy, "kind", ""), wide)
        raise TypeError(f"{function}: {argument} has dtype {name}, {expected}")
    _FROM_NUMPY[numpy] = ALL_DTYPES[name]
    return ALL_DTYPES[name]


def allowed(argument: str) -> dict[str, DType]:
    """Return the types that an array may have, by name."""
    return _OWN.get(argument, DTYPES)


def expected_dtypes(argument: str, name: str, kind: str = "", wide: str = "") -> str:
    """Return the end of the error for a dtype: what is expected and, if it is simple, what to pass.

    `wide` is the argument as float32.
    """
    expected = f"expected {_listed(allowed(argument))}"
    if name.startswith("float8") and argument != "scale":
        return expected + pass_hint(argument, f"a dequantised array, {wide} * scale")
    is_simple = kind in ("i", "u", "b") or argument == "scale"
    return expected + (pass_hint(argument, wide) if is_simple and wide else "")


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def parse_dtype(function: str, argument: str, spec: object) -> DType:
    """Return the storage type of an operand for a name, or for a dtype or type of any library.

    Refuse Python's ``float``, which is float64 in NumPy and float32 in other libraries.
    """
    return parse_one_of(function, argument, spec, allowed=DTYPES)


def parse_one_of(
    function: str, argument: str, spec: object, *, allowed: Mapping[str, DType]
) -> DType:
    name = _name(spec)
    if name is None or name not in allowed:
        got = repr(spec) if isinstance(spec, str) or name is None else name
        raise TypeError(f"{function}: {argument} is {got}, expected {_listed(allowed)}")
    return allowed[name]


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
    """Return the NumPy dtype of a storage type; bfloat16 and the types of 8 bits need ml_dtypes."""
    if dtype not in _NUMPY:
        try:
            import ml_dtypes
        except ImportError:
            raise TypeError(
                f"a {dtype} NumPy array needs the package ml_dtypes: pip install ml_dtypes"
            ) from None
        _NUMPY[dtype] = np.dtype(getattr(ml_dtypes, dtype.name))
    return _NUMPY[dtype]
