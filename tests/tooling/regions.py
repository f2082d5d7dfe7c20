# SPDX-License-Identifier: MIT
"""The lines of a C++ text that some build compiles on this machine."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from tests.support.host_code import MACHINES, runs_here
from tests.support.internals import compiler

Macros = frozenset[str]

_DIRECTIVE = re.compile(r" *# *(if|ifdef|ifndef|elif|else|endif)\b(.*)")
_DEFINED = re.compile(r"defined\((\w+)\)|__has_include\(<[\w./]+>\)")


def macros_here() -> list[Macros]:
    """Return the compiler's own macros for each machine that tests compile for."""
    found = []
    for machine in filter(runs_here, MACHINES):
        command = [*compiler().command, f"-march={machine}", "-dM", "-E", "-x", "c++", "/dev/null"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found.append(frozenset(re.findall(r"^#define (\w+)", text, re.MULTILINE)))
    return found


def compiled_lines(text: str, machines: Sequence[Macros]) -> set[int]:
    """Return the numbers of the lines that some machine compiles, in some build."""
    return set().union(*(_lines_of(text, macros) for macros in machines))


def _lines_of(text: str, macros: Macros) -> set[int]:
    """Return the lines that one machine compiles, in builds of any macros."""
    found = set()
    open_parts = []  # of each #if: some build has this part; every build has it or an earlier part
    for number, line in enumerate(text.replace("\\\n", "\\ ").splitlines(), start=1):
        if directive := _DIRECTIVE.match(line):
            kind, condition = directive[1], directive[2].partition("//")[0]
            if kind.startswith("if"):
                holds = _holds(kind, condition, macros)
                open_parts.append((holds is not False, holds is True))
            elif kind == "endif":
                open_parts.pop()
            else:
                holds = True if kind == "else" else _holds(kind, condition, macros)
                _, was = open_parts.pop()
                open_parts.append((not was and holds is not False, was or holds is True))
        elif all(is_compiled for is_compiled, _ in open_parts):
            found.add(number)
    return found


def _holds(kind: str, condition: str, macros: Macros) -> bool | None:
    """Return whether a condition holds; None if builds differ."""
    if kind in ("ifdef", "ifndef"):
        condition = f"{'!' * (kind == 'ifndef')}defined({condition.strip()})"
    names = [name for name in _DEFINED.findall(condition) if name]
    if not all(name.startswith("__") for name in names):
        return None
    text = _DEFINED.sub(lambda found: str(not found[1] or found[1] in macros), condition)
    text = text.replace("&&", " and ").replace("||", " or ").replace("!", " not ")
    if not re.fullmatch(r"(?:True|False|and|or|not|[ ()\\])*", text):
        return None
    return bool(eval(text.replace("\\", "").strip(), {"__builtins__": {}}))
