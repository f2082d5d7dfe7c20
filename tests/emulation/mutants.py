# SPDX-License-Identifier: MIT
"""Mutants of a kernel: its text less one barrier, or one guard of an access to memory."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Between threads of a block, of a warp, of a cluster, and of a thread for its own copies.
_BARRIER = re.compile(
    r"__sync(?:threads|warp)\([^()]*\);|\bcluster_barrier\(\);|\basync_wait<[^;{}]*>\(\);"
)
_GUARD = re.compile(r"(?<!bool )\binside\(")  # a use of it, not its definition
_FUNCTION = re.compile(r"__(?:device|global)__[^;{}]*?(\w+)\([^()]*\)[^;{}()]*\{")

_MOST = 256
_SWITCH = f"""
extern "C" {{
__attribute__((visibility("default"))) int mutant = -1;
__attribute__((visibility("default"))) bool mutant_reached[{_MOST}];
}}
inline bool without(int number) {{
  mutant_reached[number] = true;
  return mutant == number;
}}
"""


def switched(text: str) -> tuple[str, list[str]]:
    """Return a text that is all mutants of a kernel's text, and their names: "function: line".

    The text has its local includes in place. Once compiled, the int `mutant` says which one it is,
    -1 for the kernel itself; where what is missing in mutant i is met, `mutant_reached[i]` becomes
    true: a `Switch` sets the one and reads the other.
    """
    code = re.sub(r"//.*", lambda comment: " " * len(comment[0]), text)
    places = [(b.start(), b.end(), "{{ if (!without({})) {} }}") for b in _BARRIER.finditer(code)]
    for guard in _GUARD.finditer(code):
        end = _closing(code, guard.end())
        places.append((guard.start(), end, "(without({}) || {})"))
    if len(places) > _MOST:
        raise ValueError(f"{len(places)} mutants, expected at most {_MOST}")
    names = [_name(text, begin, end) for begin, end, _ in places]
    numbered = sorted(enumerate(places), key=lambda place: -place[1][0])
    for number, (begin, end, change) in numbered:
        text = text[:begin] + change.format(number, text[begin:end]) + text[end:]
    return _SWITCH + text, names


class Switch:
    """Says in all libraries of a switched text which mutant they are."""

    def __init__(self, libraries: Iterable[ctypes.CDLL]) -> None:
        self._libraries = list(libraries)

    def reached(self, number: int) -> bool:
        """Return whether a run met what the mutant lacks."""
        flags = ctypes.c_bool * _MOST
        return any(flags.in_dll(one, "mutant_reached")[number] for one in self._libraries)

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Be this mutant for a while."""
        self._set(number)
        try:
            yield
        finally:
            self._set(-1)

    def _set(self, number: int) -> None:
        for library in self._libraries:
            ctypes.c_int.in_dll(library, "mutant").value = number


def _name(text: str, begin: int, end: int) -> str:
    """Return the function that a part is in, and its line."""
    *_, function = _FUNCTION.finditer(text, 0, begin)
    line = text[text.rfind("\n", 0, begin) + 1 : text.index("\n", end)]
    return f"{function[1]}: {line.strip()}"


def _closing(code: str, begin: int) -> int:
    """Return where the parenthesis that is open at `begin` has been closed."""
    depth = 1
    for place in range(begin, len(code)):
        depth += {"(": 1, ")": -1}.get(code[place], 0)
        if depth == 0:
            return place + 1
    raise ValueError("a parenthesis is never closed")
