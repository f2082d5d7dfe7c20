# SPDX-License-Identifier: MIT
"""The number of threads of the CPU kernels, and the size of the CPU's last cache."""

import numbers
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Event

_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
_UNITS = {"K": 1 << 10, "M": 1 << 20}

# Unless the user has set one of these variables, cunorm lets a waiting thread of GCC's OpenMP look
# for work 1000 times (25 to 50 µs) before it sleeps. OpenMP's own default is several milliseconds,
# which takes the core away from other processes and from NumPy's BLAS.
_SPIN_COUNT, _CHOSEN_BY = "1000", ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")

_is_loaded = Event()  # set when the first library, and OpenMP with it, is loaded
_is_forked = Event()  # set in a forked child
_chosen: int | None = None


def set_num_threads(n: int | None) -> None:
    """Set how many threads the CPU kernels use; None restores the default.

    The default is ``OMP_NUM_THREADS`` if it is set, else the number of cores that this process may
    use (by its affinity and the quotas of its control groups, version 2). Results do not depend on
    the number. A forked child uses one thread, because the OpenMP runtime does not survive a fork.
    There are fewer threads if the system refuses to start that many.

    Parameters
    ----------
    n : int or None
        At least 1; the number may exceed that of the cores. Anything else is a ValueError.

    Examples
    --------
    >>> import cunorm
    >>> cunorm.set_num_threads(1)
    >>> cunorm.set_num_threads(None)
    """
    global _chosen
    is_int = isinstance(n, numbers.Integral) and not isinstance(n, bool)
    if n is not None and not (is_int and n >= 1):
        raise ValueError(f"set_num_threads: n is {n!r}, expected a positive int or None")
    _chosen = None if n is None else int(n)


@contextmanager
def short_waits() -> Iterator[None]:
    """Let an OpenMP runtime that is loaded in this context wait only briefly.

    `os.environ` does not change, because other threads may read it.
    """
    if _is_loaded.is_set() or any(name in os.environ for name in _CHOSEN_BY):
        yield
        return
    os.putenv(_CHOSEN_BY[0], _SPIN_COUNT)
    try:
        yield
        _is_loaded.set()
    finally:
        os.unsetenv(_CHOSEN_BY[0])


def thread_count() -> int:
    if _is_forked.is_set():
        return 1
    if _chosen is not None:
        return _chosen
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else available_cores()


@cache
def available_cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min(cores, _cgroup_cores() or cores))


def _cgroup_cores() -> int | None:
    """Return the smallest quota of the control group and its parents, in cores, or None."""
    group, cores = _CGROUPS, []
    with suppress(OSError):  # a container may lack this file
        lines = _OWN_CGROUPS.read_text().splitlines()
        group /= next((line[4:] for line in lines if line.startswith("0::/")), "")
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError):  # no quota, or "max"
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            cores.append(max(1, quota // period))
    return min(cores, default=None)


@cache
def last_cache_bytes() -> int:
    """Return the bytes of the last-level cache; 32 MiB if the system does not tell."""
    with suppress(OSError, ValueError, LookupError):
        text = _SIZE.read_text(encoding="utf-8").strip()
        return int(text[:-1]) * _UNITS[text[-1]]
    return 32 << 20


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_is_forked.set)
