# SPDX-License-Identifier: MIT
"""Mutants of a kernel: its text less one barrier, or one guard of an access to memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_BARRIER = re.compile(r"__sync(?:threads|warp)\([^()]*\);")
_GUARD = re.compile(r"(?<!bool )\binside\(")  # a use of it, not its definition
_FUNCTION = re.compile(r"__(?:device|global)__[^;{}]*?(\w+)\([^()]*\)[^;{}()]*\{")


class Mutant(NamedTuple):
    """A text and what is missing in it: "function: line"."""

    name: str
    text: str


def mutants(text: str) -> Iterator[Mutant]:
    """Yield each mutant of a kernel's text, its local includes in place."""
    code = re.sub(r"//.*", lambda comment: " " * len(comment[0]), text)
    for barrier in _BARRIER.finditer(code):
        yield _mutant(text, barrier.start(), barrier.end(), ";")
    for guard in _GUARD.finditer(code):
        yield _mutant(text, guard.start(), _closing(code, guard.end()), "true")


_SWITCH = """
extern "C" {
__attribute__((visibility("default"))) int mutant = -1;
__attribute__((visibility("default"))) bool mutant_reached[256];
}
inline bool without(int number) {
  mutant_reached[number] = true;
  return mutant == number;
}
"""


def switched(text: str) -> tuple[str, list[str]]:
    """Return a text that is all mutants of a kernel's text, and their names.

    Once compiled, the int `mutant` says which one it is, -1 for the kernel itself; where what is
    missing in mutant i is met, `mutant_reached[i]` becomes true.
    """
    code = re.sub(r"//.*", lambda comment: " " * len(comment[0]), text)
    places = [(b.start(), b.end(), "{{ if (!without({})) {} }}") for b in _BARRIER.finditer(code)]
    for guard in _GUARD.finditer(code):
        end = _closing(code, guard.end())
        places.append((guard.start(), end, "(without({}) || {})"))
    names = [_mutant(text, begin, end, "").name for begin, end, _ in places]
    numbered = sorted(enumerate(places), key=lambda place: -place[1][0])
    for number, (begin, end, change) in numbered:
        text = text[:begin] + change.format(number, text[begin:end]) + text[end:]
    return _SWITCH + text, names


def _mutant(text: str, begin: int, end: int, replacement: str) -> Mutant:
    """Replace a part; name it by the function that it is in, and by its line."""
    *_, function = _FUNCTION.finditer(text, 0, begin)
    line = text[text.rfind("\n", 0, begin) + 1 : text.index("\n", end)]
    return Mutant(f"{function[1]}: {line.strip()}", text[:begin] + replacement + text[end:])


def _closing(code: str, begin: int) -> int:
    """Return where the parenthesis that is open at `begin` has been closed."""
    depth = 1
    for place in range(begin, len(code)):
        depth += {"(": 1, ")": -1}.get(code[place], 0)
        if depth == 0:
            return place + 1
    raise ValueError("a parenthesis is never closed")
