# SPDX-License-Identifier: MIT
"""Call frames as XLA makes them, for tests of the handlers without XLA or a GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

pytest.importorskip("jax", reason="JAX is not installed")

from cunorm.jax import _frame

STREAM = 0x5EED
CONTEXT = 0xC0


class Api:
    """An api that gives a stream, and keeps the errors that are made."""

    def __init__(self, version: tuple[int, int] = _frame.KNOWN, stream: int = STREAM) -> None:
        self.errors: list[str] = []
        self.contexts: list[int] = []
        self.stream = stream
        self._kept = [_frame._Function(self._error_create), _frame._Function(self._stream_get)]
        create, get = (ctypes.cast(one, ctypes.c_void_p).value for one in self._kept)
        self.struct = _frame._Api(error_create=create, stream_get=get)
        self.struct.version.major, self.struct.version.minor = version

    def _error_create(self, address: int) -> int:
        given = _frame._ErrorCreate.from_address(address)
        assert given.struct_size == 28
        assert given.code == 13
        self.errors.append(given.message.decode())
        return 0xE0 + len(self.errors)

    def _stream_get(self, address: int) -> int:
        given = _frame._StreamGet.from_address(address)
        assert given.struct_size == 32
        self.contexts.append(given.context)
        given.stream = self.stream
        return 0


class Call:
    """A frame with arguments and results that lie at addresses, and with the op's text."""

    def __init__(
        self, api: Api, text: str, arguments: list[int], results: list[int], stage: int = 3
    ) -> None:
        self._kept: list[Any] = [api]
        content = text.encode()
        value = self._keep(ctypes.create_string_buffer(content, len(content)))
        span = self._keep(_frame._Span(ctypes.addressof(value), len(content)))
        spans = self._keep((ctypes.c_void_p * 1)(ctypes.addressof(span)))
        self.frame = _frame.Frame(
            struct_size=ctypes.sizeof(_frame.Frame),
            api=ctypes.addressof(api.struct),
            context=CONTEXT,
            stage=stage,
            arguments=self._arrays(arguments),
            results=self._arrays(results),
            attributes=_frame._Attributes(size=1, values=ctypes.addressof(spans)),
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self.frame)

    def _keep(self, thing: Any) -> Any:
        self._kept.append(thing)
        return thing

    def _arrays(self, addresses: list[int]) -> Any:
        buffers = [self._keep(_frame._Buffer(data=address)) for address in addresses]
        places = self._keep(
            (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(one) for one in buffers))
        )
        return _frame._Arrays(size=len(buffers), values=ctypes.addressof(places))
