# SPDX-License-Identifier: MIT
"""The system's headers, compiled once for all kernels: reading them is up to half of a compile.

Compiling them takes as long as a kernel or two, so it is done beside the ninth compile of a
process, as a training step needs fewer. A process that exits before ends it, too; what a killed one
leaves is removed by the next `clear_cache`. Only GCC takes headers in this form.
"""

import atexit
import os
import re
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path

from cunorm._backends.cpu.compiler import Compiler, Options, cpu_identity, environment
from cunorm._backends.cpu.files import cache_folder, digest, temporary
from cunorm._core.memo import on_clear

_INCLUDE = Path(__file__).parent / "include"
_SYSTEM_INCLUDE = re.compile(r"^#include <([^>]+)>$", re.MULTILINE)
_WORTH_IT = 9  # which compile of a process begins to compile headers, too

_compiles: dict[Path, "count[int]"] = {}
on_clear(_compiles.clear)
_threads: list[threading.Thread] = []
_running: dict[subprocess.Popen[bytes], int] = {}  # and their parents, as this one may fork
_has_ended = False


def options_for(cxx: Compiler, options: Options) -> Options:
    """Return the options with which GCC takes compiled headers, none before there are any.

    Where it cannot take them it does so silently, as there is no other file of that name.
    """
    if not cxx.is_gcc:
        return ()
    name = f"headers-{digest(*cxx, *options, cpu_identity(), _text())}.h"
    compiled = cache_folder() / f"{name}.gch"
    try:
        return ("-include", str(cache_folder() / name)) if compiled.stat().st_size else ()
    except OSError:
        _compile_in_time(compiled, [*cxx.command, *options])
        return ()


def give_up(headers: Options) -> None:
    """Replace headers with which GCC failed by an empty file, which is not used."""
    compiled = Path(f"{headers[-1]}.gch")
    with temporary(compiled) as folder:
        empty = Path(folder, "empty")
        empty.touch()
        empty.replace(compiled)


def _compile_in_time(path: Path, command: Sequence[str]) -> None:
    """Begin to compile headers, once in a process, when enough kernels use them."""
    if next(_compiles.setdefault(path, count(1))) == _WORTH_IT:
        atexit.register(_end)  # now, so that it runs before a removal of the folder
        thread = threading.Thread(target=_make, args=(path, command), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started, as when the interpreter ends
            return
        _threads.append(thread)


def _make(path: Path, command: Sequence[str]) -> None:
    try:
        with temporary(path) as folder:
            source, made = Path(folder, "headers.h"), Path(folder, "headers.h.gch")
            source.write_text(_text(), encoding="utf-8")
            process = subprocess.Popen(
                [*command, "-x", "c++-header", str(source), "-o", str(made)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment(Path(folder)),
                start_new_session=True,
            )
            _running[process] = os.getpid()
            with suppress(AttributeError, OSError):  # calls wait for others, not for this
                os.setpriority(os.PRIO_PGRP, process.pid, 19)
            if _has_ended:
                _kill(process)
            failed = process.wait()
            del _running[process]
            if not failed:
                made.replace(path)
    except OSError:  # kernels compile without them
        return


def _end() -> None:
    """End the compilers of this process, and remove their files."""
    global _has_ended
    _has_ended = True
    for process, owner in tuple(_running.items()):
        if owner == os.getpid():
            _kill(process)
    for thread in _threads:
        thread.join(timeout=5)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()


@cache
def _text() -> str:
    """Return a text that includes each system header that our headers include."""
    intrinsics = _INCLUDE / "host" / "intrinsics.h"
    files = [path for path in _INCLUDE.rglob("*") if path.suffix in (".h", ".cuh")]
    texts = [path.read_text("utf-8") for path in files if path != intrinsics]
    names = {name for text in texts for name in _SYSTEM_INCLUDE.findall(text)}
    lines = "#if __has_include(<{0}>)\n#include <{0}>\n#endif\n"
    included = map(lines.format, sorted(names - {path.name for path in files}))
    return "".join((intrinsics.read_text("utf-8"), *included))
