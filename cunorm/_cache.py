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

# Names of files, with a digest of all that they depend on: libraries, the compiled headers of the
# system, and the options that a compiler refused.
_DIGEST = "[0-9a-f]{32}"
_OURS = re.compile(rf"[a-z]\w*-{_DIGEST}\.so|headers-{_DIGEST}\.h\.gch|refused-{_DIGEST}\.json")
_LONGER_THAN_ANY_COMPILE = 24 * 60 * 60  # seconds; a machine may sleep in the middle of one


class CacheInfo(NamedTuple):
    """What `cache_info` returns.

    `folder` has the CPU's builds: so many `libraries`, from any process; the first of them makes
    it. `bytes` are those of all its files: of GCC's compiled system headers, too, which are as
    large as hundreds of builds. `loaded` of these builds, and `cuda_kernels` on all devices, are
    loaded in this process. `cupy_folder` is where CuPy keeps what NVRTC compiled, ours and all
    other; None until CuPy is imported.
    """

    folder: Path
    libraries: int
    bytes: int
    loaded: int
    cuda_kernels: int
    cupy_folder: Path | None


class Cleared(NamedTuple):
    """What `clear_cache` removed: how many files, of killed compiles too, and their bytes."""

    files: int
    bytes: int


def cache_info() -> CacheInfo:
    """Return the compiled kernels that are kept, on disk and in this process.

    The CPU's builds are in the folder ``CUNORM_CACHE_DIR``, by default in the user's cache folder.

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

    The next call compiles what it needs from the kernels' sources as they are then. Other threads
    and processes may call and compile meanwhile, and keep what they have loaded. Files of a killed
    compile are removed only after a day, as until then it may still run. CuPy's cache, which other
    programs share, is left alone: CUDA kernels are taken from there again.

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
        with suppress(FileNotFoundError):  # another process clears the cache
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
    except RuntimeError:  # there is no home; nor does CuPy find one
        return usual


def _our_files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    paths = folder.glob("*-*")
    return _existing((path for path in paths if _OURS.fullmatch(path.name)), stat.S_ISREG)


def _existing(
    paths: Iterable[Path], is_kind: Callable[[int], bool]
) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield those of the paths that have a mode of a kind, with their status."""
    for path in paths:
        with suppress(FileNotFoundError):  # as above
            status = path.lstat()
            if is_kind(status.st_mode):
                yield path, status
