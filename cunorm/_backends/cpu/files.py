# SPDX-License-Identifier: MIT
"""Where compiled kernels are kept, and whether a file there is still as it was made."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path

TEMPORARY = "compiling-"  # how the names of folders begin that are removed after their use
_DIGEST_BYTES = hashlib.sha256().digest_size


def digest(*parts: object) -> str:
    """Return a name for all that a file depends on."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def seal(path: Path) -> None:
    """Put a digest of a file at its end, which no loader of libraries reads."""
    with path.open("r+b") as file:
        file.write(hashlib.sha256(file.read()).digest())


def is_whole(path: Path) -> bool:
    """Whether a file is there as it was sealed: a loader may crash on what is left of another."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]


def temporary(beside: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a folder to make a file in, from which it is moved to its place when it is whole."""
    return tempfile.TemporaryDirectory(
        prefix=TEMPORARY,
        dir=beside.parent,
        ignore_cleanup_errors=True,  # what a killed compiler's own children still write
    )


@cache
def cache_folder() -> Path:
    """Return where compiled kernels are kept: a folder that is this user's alone."""
    chosen = os.environ.get("CUNORM_CACHE_DIR")
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        folder = (Path(chosen) if chosen else Path(base, "cunorm")).expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owned = not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
        private = owned and not folder.stat().st_mode & 0o022
        if private and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    warnings.warn(
        "cunorm keeps compiled kernels for this process only: its cache folder must be writable, "
        "and by its user alone; CUNORM_CACHE_DIR names another",
        RuntimeWarning,
        stacklevel=2,
    )
    folder = Path(tempfile.mkdtemp(prefix="cunorm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
