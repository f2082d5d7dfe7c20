# SPDX-License-Identifier: MIT
"""The custom calls of cunorm.jax in lowered code, and call frames like XLA's.

Tests import private names of `cunorm.jax` from here.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any, NamedTuple

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

from cunorm.jax import _adapter, _ffi, _handler, _xla_structs  # noqa: E402, F401
from cunorm.jax._call import Call  # noqa: E402, F401

STREAM = 0x5EED
CONTEXT = 0xC0
_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "ui8": "uint8"}
_DTYPES |= {
    "i8": "int8",
    "f8E4M3FN": "float8_e4m3fn",
    "f8E5M2": "float8_e5m2",
    "f8E8M0FNU": "float8_e8m0fnu",
}
_CALL = re.compile(
    r"custom_call @cunorm_on_\w+\(.*?op = \"(.*?)\"}.* : \((.*?)\) -> \(?(.*?)\)?$", re.M
)
_Span = _xla_structs._struct(start=ctypes.c_void_p, length=ctypes.c_size_t)  # an attribute's text


class CustomCall(NamedTuple):
    """A custom call: its text, and its inputs and results as (shape, dtype)."""

    text: str
    inputs: list[Any]
    results: list[Any]


def lowered(function: Any, *arrays: Any, platform: str = "cpu") -> str:
    """Return the lowered text of a function."""
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()


def calls_of(function: Any, *arrays: Any, platform: str = "cpu") -> list[CustomCall]:
    """Return the calls of cunorm's kernels in the lowered text."""
    found = _CALL.findall(lowered(function, *arrays, platform=platform))
    return [CustomCall(t.replace(r"\22", '"'), _specs(i), _specs(r)) for t, i, r in found]


def _specs(text: str) -> list[Any]:
    tensors = [one.split("x") for one in re.findall(r"tensor<([^>]*)>", text)]
    return [(tuple(map(int, shape)), _DTYPES[dtype]) for *shape, dtype in tensors]


class Api:
    """A fake of XLA's FFI API, with one stream; it records errors."""

    def __init__(self, version: tuple[int, int] = _xla_structs.KNOWN, stream: int = STREAM) -> None:
        self.errors: list[str] = []
        self.contexts: list[int] = []
        self.stream = stream
        self._kept = [*map(_xla_structs.Function, (self._error_create, self._stream_get))]
        create, get = (ctypes.cast(one, ctypes.c_void_p).value for one in self._kept)
        self.struct = _xla_structs._Api(error_create=create, stream_get=get)
        self.struct.version.major, self.struct.version.minor = version

    def _error_create(self, address: int) -> int:
        given = _xla_structs._ErrorCreate.from_address(address)
        assert (given.struct_size, given.code) == (28, 13)
        self.errors.append(given.message.decode())
        return 0xE0 + len(self.errors)

    def _stream_get(self, address: int) -> int:
        given = _xla_structs._StreamGet.from_address(address)
        assert given.struct_size == 32
        self.contexts.append(given.context)
        given.stream = self.stream
        return 0


class Frame:
    """A fake call frame: the addresses of arguments and results, and the op's text."""

    def __init__(
        self, api: Api, text: str, arguments: list[int], results: list[int], stage: int = 3
    ) -> None:
        self._kept: list[Any] = [api]
        content = text.encode()
        value = self._keep(ctypes.create_string_buffer(content, len(content)))
        span = self._keep(_Span(ctypes.addressof(value), len(content)))
        spans = self._keep((ctypes.c_void_p * 1)(ctypes.addressof(span)))
        self.frame = _xla_structs._Frame(
            struct_size=ctypes.sizeof(_xla_structs._Frame),
            api=ctypes.addressof(api.struct),
            context=CONTEXT,
            stage=stage,
            arguments=self._arrays(arguments),
            results=self._arrays(results),
            attributes=_xla_structs._Attributes(size=1, values=ctypes.addressof(spans)),
        )

    def handle(self, run: Any) -> int | None:
        """Pass the frame to a handler that does not know its API yet."""
        _handler._known_apis.clear()  # it has the addresses of APIs; a new fake may reuse one
        return _handler.handler(run)(ctypes.addressof(self.frame))

    def _keep(self, thing: Any) -> Any:
        self._kept.append(thing)
        return thing

    def _arrays(self, addresses: list[int]) -> Any:
        buffers = [self._keep(_xla_structs._Buffer(data=address)) for address in addresses]
        pointers = self._keep(
            (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(one) for one in buffers))
        )
        return _xla_structs._Arrays(size=len(buffers), values=ctypes.addressof(pointers))
