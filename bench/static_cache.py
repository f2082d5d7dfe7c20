# SPDX-License-Identifier: MIT
"""What `python -m bench static` compiled before, in the folder $CUNORM_STATIC_CACHE if that is set.

So a table after a change of the planner, of the model or of some kernels takes seconds, not
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
    new = path.with_name(f"{path.name}.{os.getpid()}")  # other processes see whole files alone
    new.write_bytes(zlib.compress(json.dumps(found).encode(), 1))
    new.replace(path)
    return found
