# SPDX-License-Identifier: MIT
"""OpSpecs as JSON."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from cunorm._core.dtypes import DTYPES, DType


def spec_to_json(spec: Any) -> str:
    """Return the fields of an OpSpec as JSON."""
    return json.dumps({one.name: getattr(spec, one.name) for one in fields(spec)}, default=_encode)


def spec_from_json(spec_type: type, text: str) -> Any:
    """Return the OpSpec of a class from its fields as JSON."""
    return spec_type(**{name: _decode(value) for name, value in json.loads(text).items()})


def _encode(value: Any) -> dict[str, str]:
    assert isinstance(value, DType)
    return {"dtype": value.name}


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return DTYPES[value["dtype"]]
    return tuple(value) if isinstance(value, list) else value
