# SPDX-License-Identifier: MIT
"""The folder of compiled kernels, and digests of its files."""

import atexit
import hashlib
import os
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path

TEMPORARY = "compiling-"  # the prefix of temporary folders
_DIGEST_BYTES = hashlib.sha256().digest_size


def digest(*parts: object) -> str:
    """Return a digest of all that a file depends on, for its name."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def seal(path: Path) -> None:
    """Append a digest to a file: loaders of libraries do not read its end."""
    with path.open("r+b") as file:
        file.write(hashlib.sha256(file.read()).digest())


def is_whole(path: Path) -> bool:
    """Whether a file is there as it was sealed: a loader may crash on a damaged one."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]


def temporary(beside: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a folder to make a file in, from which it is moved to its place."""
    # Children of a killed compiler may still write there when it is removed.
    return tempfile.TemporaryDirectory(
        prefix=TEMPORARY, dir=beside.parent, ignore_cleanup_errors=True
    )


@cache
def cache_folder() -> Path:
    """Return the folder of compiled kernels, which only this user can write to."""
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
