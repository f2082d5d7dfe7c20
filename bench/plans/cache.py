# SPDX-License-Identifier: MIT
"""A cache of the builds of `python -m bench static`, in the folder $CUNORM_STATIC_CACHE if set.

With the cache only new builds are compiled. After a change of the planner, the model or some
kernels, a table takes seconds instead of minutes.
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
    """Return the texts of a key: from the folder if they are there, else from `make`."""
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
