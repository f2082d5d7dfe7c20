# SPDX-License-Identifier: MIT
"""The size of the CPU's last cache."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_UNKNOWN = 32 << 20
_UNITS = {"K": 1 << 10, "M": 1 << 20}


@cache
def last_cache_bytes() -> int:
    """Return the size of the first core's last cache; 32 MiB where the system does not say."""
    try:
        text = _SIZE.read_text(encoding="utf-8").strip()
    except OSError:
        return _UNKNOWN
    digits, unit = text[:-1], text[-1:]
    return int(digits) * _UNITS[unit] if digits.isdecimal() and unit in _UNITS else _UNKNOWN
