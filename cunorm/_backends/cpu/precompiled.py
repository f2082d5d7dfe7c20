# SPDX-License-Identifier: MIT
"""The system's headers, compiled once for all kernels: 0.4 s of a kernel's compile are 0.7 without.

Compiling them takes as long as one or two kernels. So it starts with the ninth compile of a process
(a training step needs fewer), or by `prepare`. A process that exits earlier ends it. The next
`clear_cache` removes what a killed process leaves. Only GCC accepts headers in this form.
"""

import re
from collections.abc import Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path

from cunorm._backends.cpu import processes
from cunorm._backends.cpu.compiler import Compiler, Options, cpu_identity, environment
from cunorm._backends.cpu.files import cache_folder, digest, temporary
from cunorm._backends.cpu.processes import Task
from cunorm._core.memo import on_clear

_INCLUDE = Path(__file__).parent / "include"
_SYSTEM_INCLUDE = re.compile(r"^#include <([^>]+)>$", re.MULTILINE)
_PCH_AFTER = 9  # the compile of a process that starts compiling headers
_NICE = 19  # the lowest priority: no call waits for the headers

_compiles: dict[Path, "count[int]"] = {}
on_clear(_compiles.clear)


def options_for(cxx: Compiler, options: Options) -> Options:
    """Return the options that make GCC use compiled headers; none before there are any.

    If GCC cannot use them, it ignores them silently, as there is no other file of that name.
    """
    if not cxx.is_gcc:
        return ()
    compiled = _path(cxx, options)
    try:
        return ("-include", str(compiled.with_suffix(""))) if compiled.stat().st_size else ()
    except OSError:
        _compile_in_time(compiled, [*cxx.command, *options])
        return ()


def prepare(cxx: Compiler, options: Options) -> None:
    """Compile headers now, unless they exist: the caller has many builds to compile."""
    if cxx.is_gcc and not (compiled := _path(cxx, options)).exists():
        _compiles[compiled] = count(_PCH_AFTER + 1)  # so that nobody else starts
        _make(compiled, [*cxx.command, *options], priority=0)


def give_up(headers: Options) -> None:
    """Replace compiled headers that made GCC fail by an empty file, which is not used."""
    compiled = Path(f"{headers[-1]}.gch")
    with temporary(compiled) as folder:
        empty = folder / "empty"
        empty.touch()
        empty.replace(compiled)


def _path(cxx: Compiler, options: Options) -> Path:
    name = f"headers-{digest(*cxx, *options, cpu_identity(), _text())}.h"
    return cache_folder() / f"{name}.gch"


def _compile_in_time(path: Path, command: Sequence[str]) -> None:
    """Start to compile headers, once in a process, when enough kernels have been compiled."""
    if next(_compiles.setdefault(path, count(1))) == _PCH_AFTER:
        Task(partial(_make, path, command)).begin()  # if it fails, kernels compile without headers


def _make(path: Path, command: Sequence[str], priority: int = _NICE) -> None:
    with temporary(path) as folder:
        source, made = folder / "headers.h", folder / "headers.h.gch"
        source.write_text(_text(), encoding="utf-8")
        create = [*command, "-x", "c++-header", str(source), "-o", str(made)]
        if processes.run(create, environment(folder), priority=priority).returncode == 0:
            made.replace(path)


@cache
def _text() -> str:
    """Return source text that includes every system header that cunorm's headers include."""
    intrinsics = _INCLUDE / "host" / "intrinsics.h"
    files = [path for path in _INCLUDE.rglob("*") if path.suffix in (".h", ".cuh")]
    texts = [path.read_text("utf-8") for path in files if path != intrinsics]
    names = {name for text in texts for name in _SYSTEM_INCLUDE.findall(text)}
    lines = "#if __has_include(<{0}>)\n#include <{0}>\n#endif\n"
    included = map(lines.format, sorted(names - {path.name for path in files}))
    return "".join((intrinsics.read_text("utf-8"), *included))
