# SPDX-License-Identifier: MIT
"""What one call of the kernels does, as JAX's transformations carry it and executables keep it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from cunorm._arrays import CPU, Device, Form, contiguous_form
from cunorm._core.dtypes import DTYPES

_VERSION = 1  # of the text


class Array(NamedTuple):
    """An array as XLA has them: in C order."""

    shape: tuple[int, ...]
    dtype: str

    def form(self, device: Device) -> Form:
        """Return the form of such an array on a device."""
        return contiguous_form(self.shape, DTYPES[self.dtype], device)


class Op(NamedTuple):
    """A call, but for where its arrays lie; equal for all that do the same.

    Attributes
    ----------
    kind : str
        A key of `cunorm.jax._kinds.KINDS`, which says what the rest means.
    said : tuple
        What the caller said by itself, but for numbers.
    numbers : bytes
        The numbers, as bits: 0.0 is not -0.0.
    inputs : tuple of Array or None
        In the kind's order; None is absent.
    """

    kind: str
    said: tuple[Any, ...]
    numbers: bytes
    inputs: tuple[Array | None, ...]

    def forms(self, device: Device = CPU) -> tuple[Form | None, ...]:
        """Return the forms of the inputs."""
        return tuple(None if array is None else array.form(device) for array in self.inputs)

    def text(self) -> str:
        """Return this as text, which means the same to any process of any time."""
        return json.dumps([_VERSION, self.kind, self.said, self.numbers.hex(), self.inputs])

    @staticmethod
    def parse(text: str | bytes) -> Op:
        """Return what a text says."""
        version, kind, *rest = json.loads(text)
        if version != _VERSION:
            raise ValueError(
                f"cunorm.jax: an executable of text version {version}, expected {_VERSION}: "
                "compile it again with this version of cunorm"
            )
        said, numbers, inputs = rest
        arrays = (None if it is None else Array(tuple(it[0]), it[1]) for it in inputs)
        return Op(kind, _frozen(said), bytes.fromhex(numbers), tuple(arrays))


def _frozen(value: Any) -> Any:
    """Return tuples for JSON's lists."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
