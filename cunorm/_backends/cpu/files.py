# SPDX-License-Identifier: MIT
"""The folder of compiled kernels, and checksums of its files."""

import atexit
import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

TEMPORARY = "compiling-"  # the prefix of temporary folders
_DIGEST_BYTES = hashlib.sha256().digest_size


def digest(*parts: object) -> str:
    """Return a hash of all that a file depends on, for the name of the file."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def append_checksum(path: Path) -> None:
    """Append a checksum to a library; loaders ignore what follows the end of a library."""
    with path.open("r+b") as file:
        file.write(hashlib.sha256(file.read()).digest())


def checksum_matches(path: Path) -> bool:
    """Whether a file exists and has its checksum: loading a damaged library may crash."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]


@contextmanager
def temporary(beside: Path) -> Iterator[Path]:
    """Make a temporary folder for writing a file, beside the place to which the file is moved."""
    # Children of a killed compiler may still write to the folder while it is removed.
    made = partial(tempfile.TemporaryDirectory, ignore_cleanup_errors=True)
    try:
        with made(prefix=TEMPORARY, dir=beside.parent) as folder:
            yield Path(folder)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cunorm cannot write {beside.name} to its cache folder {beside.parent}: "
            f"{error.strerror}; make room there, or let CUNORM_CACHE_DIR name another folder",
        ) from error


def cache_folder() -> Path:
    """Return the folder of compiled kernels, and create it if it is missing."""
    if not _is_chosen():
        _chosen_folder.cache_clear()
    return _chosen_folder()[0]


def planned_folder() -> Path | None:
    """Return the folder that `cache_folder` will use, without creating it.

    Return None if `cache_folder` will make a temporary one, because the named one is unusable.
    """
    if _is_chosen():
        return _chosen_folder()[0]
    with suppress(OSError, RuntimeError):
        folder = _named_folder()
        if _is_usable(folder) or (not os.path.lexists(folder) and _can_make(folder)):
            return folder
    return None


def _is_chosen() -> bool:
    """Whether the folder that was chosen still exists and is as private as before."""
    if not _chosen_folder.cache_info().currsize:
        return False
    folder, was_private = _chosen_folder()
    return folder.is_dir() and _is_private(folder) == was_private


def _can_make(folder: Path) -> bool:
    """Whether a folder can be created: try another one in the nearest parent that exists."""
    above = next(filter(os.path.lexists, folder.parents), folder)
    # Permissions do not tell: even root cannot write to some folders.
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=above) as made:
        return _is_usable(Path(made))


@cache
def _named_folder() -> Path:
    """Return the folder that the environment names, or one in the home folder.

    Raise a RuntimeError if the name begins with ~ and no home folder is known. A relative name is
    resolved once, because the working folder may change.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    chosen = os.environ.get("CUNORM_CACHE_DIR") or Path(base, "cunorm")
    return Path(chosen).expanduser().absolute()


def _is_usable(folder: Path) -> bool:
    return folder.is_dir() and _is_private(folder) and os.access(folder, os.W_OK)


def _is_private(folder: Path) -> bool:
    try:
        status = folder.stat()
    except OSError:
        return False
    owned = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return owned and not status.st_mode & 0o022


@cache
def _chosen_folder() -> tuple[Path, bool]:
    """Choose the folder; return it, and whether it is private: on some disks, no folder is."""
    with suppress(OSError, RuntimeError):
        folder = _named_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_usable(folder):
            return folder, True
    warnings.warn(
        "cunorm keeps compiled kernels for this process only: its cache folder must be writable, "
        "and by its user alone; CUNORM_CACHE_DIR names another",
        RuntimeWarning,
        stacklevel=2,
    )
    try:
        folder = Path(tempfile.mkdtemp(prefix="cunorm-"))
    except OSError as error:
        raise OSError(
            error.errno,
            f"cunorm finds no folder for compiled kernels: {error.strerror}; let CUNORM_CACHE_DIR "
            "name one that is writable, by its user alone",
        ) from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder, _is_private(folder)
