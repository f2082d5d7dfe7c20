# SPDX-License-Identifier: MIT
"""OpSpecs as JSON."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from cunorm._core.dtypes import DTYPES


def spec_to_json(spec: Any) -> str:
    """Return the fields of an OpSpec as JSON."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return json.dumps(values, default=lambda dtype: {"dtype": dtype.name})


def spec_from_json(spec_type: type, text: str) -> Any:
    """Return the OpSpec of a class from its fields as JSON."""
    return spec_type(**{name: _decode(value) for name, value in json.loads(text).items()})


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return DTYPES[value["dtype"]]
    return tuple(value) if isinstance(value, list) else value
