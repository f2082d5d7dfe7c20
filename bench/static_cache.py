# SPDX-License-Identifier: MIT
"""A cache of what `python -m bench static` compiled, in the folder $CUNORM_STATIC_CACHE if set.

With it, a table after a change of the planner, the model or some kernels takes seconds instead of
minutes: only new builds are compiled.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

Texts = tuple[str, str, str]


def kept(key: tuple[object, ...], make: Callable[[], Texts]) -> Texts:
    """Return what was made for a key, from the folder if it is there."""
    folder = os.environ.get("CUNORM_STATIC_CACHE")
    if not folder:
        return make()
    path = Path(folder, sha256(repr(key).encode()).hexdigest())
    if path.is_file():
        log, ptx, sass = json.loads(zlib.decompress(path.read_bytes()))
        return log, ptx, sass
    found = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")  # other processes see only complete files
    new.write_bytes(zlib.compress(json.dumps(found).encode(), 1))
    new.replace(path)
    return found
