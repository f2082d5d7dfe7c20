# SPDX-License-Identifier: MIT
"""The caches: `cache_info` counts what is in them, `clear_cache` empties them."""

import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cunorm._backends import cuda
from cunorm._backends.cpu import compile as cpu_compile
from cunorm._backends.cpu.files import TEMPORARY, cache_folder, planned_folder
from cunorm._core import memo

# Names of files: libraries, and options that a compiler refused. A name has a digest of all that
# its file depends on.
_DIGEST = "[0-9a-f]{32}"
_OURS = re.compile(rf"[a-z]\w*-{_DIGEST}\.so|refused-{_DIGEST}\.txt")
_LONGER_THAN_ANY_COMPILE = 24 * 60 * 60  # seconds; a machine may sleep during a compile


class CacheInfo(NamedTuple):
    """What `cache_info` returns.

    `folder` has the CPU's builds of all processes; the first build makes the folder. `libraries` is
    the number of builds, `bytes` the size of cunorm's files. `loaded` and `cuda_kernels` count the
    CPU's builds and the CUDA kernels (on all devices) that this process has loaded. `cupy_folder`
    has all that CuPy compiled, also for other programs; it is None until CuPy is imported.
    """

    folder: Path
    libraries: int
    bytes: int
    loaded: int
    cuda_kernels: int
    cupy_folder: Path | None


class Cleared(NamedTuple):
    """What `clear_cache` removed: how many files, also of killed compiles, and their bytes."""

    files: int
    bytes: int


def cache_info() -> CacheInfo:
    """Return how many compiled kernels are kept, on disk and in this process.

    The folder of the CPU's builds is ``CUNORM_CACHE_DIR``, by default one in the user's caches.

    Examples
    --------
    >>> import cunorm
    >>> cunorm.cache_info()
    CacheInfo(folder=..., libraries=..., bytes=..., loaded=..., cuda_kernels=..., cupy_folder=...)
    """
    folder = planned_folder() or cache_folder()
    files = dict(_our_files(folder))
    return CacheInfo(
        folder,
        sum(path.suffix == ".so" for path in files),
        sum(status.st_size for status in files.values()),
        len(cpu_compile.loaded.values),
        len(cuda.loaded.values),
        cupy_cache_folder() if "cupy" in sys.modules else None,
    )


def clear_cache() -> Cleared:
    """Remove the CPU's builds from disk, and forget all calls and kernels in this process.

    The next call compiles what it needs from the current sources of the kernels. Other threads and
    processes may call and compile meanwhile, and keep what they have loaded. The files of a killed
    compile are removed only after a day, because a younger compile may still run. CuPy's cache is
    not touched, because other programs share it, so CUDA kernels are loaded from it again.

    Examples
    --------
    >>> import cunorm
    >>> cunorm.clear_cache()  # doctest: +SKIP
    Cleared(files=12, bytes=1310720)
    """
    begun = time.time() - _LONGER_THAN_ANY_COMPILE
    cache = planned_folder() or cache_folder()
    folders = _existing(cache.glob(f"{TEMPORARY}*"), stat.S_ISDIR)
    killed = [folder for folder, status in folders if status.st_mtime < begun]
    left = _existing((path for folder in killed for path in folder.glob("*")), stat.S_ISREG)
    removed = []
    for path, status in (*_our_files(cache), *left):
        with suppress(FileNotFoundError):  # another process may clear the cache
            path.unlink()
            removed.append(status.st_size)
    for folder in killed:
        shutil.rmtree(folder, ignore_errors=True)
    memo.clear_all()
    return Cleared(len(removed), sum(removed))


def cupy_cache_folder() -> Path:
    chosen, usual = os.environ.get("CUPY_CACHE_DIR"), Path("~/.cupy/kernel_cache")
    try:
        return Path(chosen) if chosen else usual.expanduser()
    except RuntimeError:  # neither this process nor CuPy finds a home
        return usual


def _our_files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    paths = folder.glob("*-*")
    return _existing((path for path in paths if _OURS.fullmatch(path.name)), stat.S_ISREG)


def _existing(
    paths: Iterable[Path], is_kind: Callable[[int], bool]
) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the paths of a kind of file, with their status."""
    for path in paths:
        with suppress(FileNotFoundError):  # another process may clear the cache
            status = path.lstat()
            if is_kind(status.st_mode):
                yield path, status
