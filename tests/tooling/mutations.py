# SPDX-License-Identifier: MIT
"""Mutants of a C++ text: one token, condition or statement is replaced.

The text is formatted by clang-format: only binary operators have spaces on both sides, not the
brackets of a template, the * of a pointer or the & of a reference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple


class Mutant(NamedTuple):
    """A change of a file: the replacement of text[begin:end]."""

    file: str
    begin: int
    end: int
    replacement: str
    line: int
    change: str  # the old and the new text

    def applied(self, text: str) -> str:
        """Return the file's text with the change."""
        return text[: self.begin] + self.replacement + text[self.end :]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.change}"


Change = tuple[int, int, str]  # begin and end in the code, and the replacement
Rule = Callable[[str], Iterable[Change]]

_NOT_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|'(?:\\.|[^'\\\n])'|\"(?:\\.|[^\"\\\n])*\""  # comments and texts
    r"|^[ \t]*#(?!define \w+ \S+$)(?:[^\n]*\\\n)*[^\n]*",  # preprocessor lines, except constants
    re.DOTALL | re.MULTILINE,
)


def code_of(text: str) -> str:
    """Return a text with spaces in place of comments, strings and most preprocessor lines."""
    return _NOT_CODE.sub(lambda found: re.sub(r"\S", " ", found[0]), text)


def closing(code: str, begin: int) -> int:
    """Return where the bracket that opens before `begin` is closed, or else the code's end."""
    depth = 1
    for index in range(begin, len(code)):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(code[index], 0)
        if depth == 0:
            return index
    return len(code)


_BINARY = {
    **{"+": "-", "-": "+", "*": "/", "/": "*", "%": "*"},
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    **{"&&": "||", "||": "&&", "&": "|", "|": "&", "^": "&", "<<": ">>", ">>": "<<"},
    **{"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=", "|=": "&=", "&=": "|=", "%=": "*="},
}
_NAMES = {
    **{"min": "max", "max": "min", "fmin": "fmax", "fmax": "fmin", "true": "false"},
    **{"false": "true", "at_least": "at_most", "at_most": "at_least"},
}
_OPERATOR = re.compile(r"(?<=[\w)\]}>]) ([-+*/%<>=!&|^]{1,2})(?=\s)")
_NAME = re.compile(rf"(?<!using std::)\b({'|'.join(_NAMES)})(?=\(|[^\w<(]|<\w+>\()")
_INTEGER = re.compile(r"(?<![\w.'])(\d+)(?=(?:u|LL)?(?![\w.]))")
_FLOAT = re.compile(r"(?<![\w.])(\d+\.\d*)(?=f?\b)")
_HEX_FLOAT = re.compile(r"(0x\d\.?[\da-f]*p)([+-]?\d+)")
_NOT = re.compile(r"(?<=[\s(,])!(?=[\w(])")
_COUNT = re.compile(r"(\+\+|--)(?=\w)|(?<=[\w\]])(\+\+|--)")
_FACTOR = re.compile(r"(?<=[\w)\]]) \* (?:[\w.:]+(?:<B>)?(?:::\w+)?)(?=[\s);,\]])")
_INDEX = re.compile(r"(?<=[\w)\]])\[(?=[^\]&=])")
_FMA = re.compile(r"(?<![\w:])(?:std::)?fma\((-?)")
_CONDITION = re.compile(r"\bif (?:constexpr )?\((?:const \w+ \w+ = [^;]*; )?")
_INSIDE = re.compile(r"\binside\(")
_BARRIER = re.compile(
    r"(?:\b__sync(?:threads|warp)\(\)|\bcluster_begun\(\)|\bwait_for_cluster\(\)|\basync_(?:wait<[^;{}]*>|commit)\(\)"
    r"|\bwait_for_arrivals\([^;{}]*\)|\bwait_for_prerequisites\(\)|\bgang\.wait\(\)"
    r"|(?<=\) )wait\(\));"
)
_STATEMENT = re.compile(
    r"(?<=[;{}\n)])\n +(?!return\b|using\b|__sync|cluster_b|async_|wait)"
    r"([\w.:\[\]>*-]+(?:<[\w:<>, ]*>)?(?:\(.*\)| [-+*/|&]?= .*|\+\+));(?= *\n)"
)


def _binary(code: str) -> Iterator[Change]:
    for found in _OPERATOR.finditer(code):
        if other := _BINARY.get(found[1]):
            yield *found.span(1), other


def _replaced(pattern: re.Pattern[str], other: Callable[[str], str]) -> Rule:
    """Return a rule that replaces the group that matched or, without groups, the whole match."""

    def rule(code: str) -> Iterator[Change]:
        for found in pattern.finditer(code):
            group = found.lastindex or 0
            yield *found.span(group), other(found[group])

    return rule


def _conditions(code: str) -> Iterator[Change]:
    for found in _CONDITION.finditer(code):
        end = closing(code, found.end())
        yield found.end(), end, "true"
        yield found.end(), end, "false"


def _guards(code: str) -> Iterator[Change]:
    for found in _INSIDE.finditer(code):
        if not code[: found.start()].endswith("bool "):  # the definition of `inside`
            yield found.start(), closing(code, found.end()) + 1, "true"


def _indices(code: str) -> Iterator[Change]:
    for found in _INDEX.finditer(code):
        end = closing(code, found.end())
        index = code[found.end() : end]
        if not index.isdigit():  # another rule changes integers
            yield found.end(), end, f"({index}) + 1" if " ? " in index else f"{index} + 1"


def _signs(code: str) -> Iterator[Change]:
    for found in _FMA.finditer(code):
        yield *found.span(1), "" if found[1] else "-"


RULES: dict[str, Rule] = {
    "operator": _binary,
    "integer": _replaced(_INTEGER, lambda number: str(int(number) + 1)),
    "float": _replaced(_FLOAT, lambda number: repr(float(number) + 1)),
    "coefficient": _replaced(_HEX_FLOAT, lambda power: f"{int(power) + 1:+d}"),
    "name": _replaced(_NAME, _NAMES.__getitem__),
    "not": _replaced(_NOT, lambda _: ""),
    "count": _replaced(_COUNT, lambda _: ""),
    "factor": _replaced(_FACTOR, lambda _: ""),
    "index": _indices,
    "fma": _signs,
    "condition": _conditions,
    "guard": _guards,
    "barrier": _replaced(_BARRIER, lambda _: ";"),
    "statement": _replaced(_STATEMENT, lambda _: ""),
}


class Skip(NamedTuple):
    """Code without mutants: all that a pattern finds and, if a match ends with {, its block."""

    find: str
    why: str
    file: str = ""  # empty: any file

    def spans(self, file: str, code: str) -> Iterator[tuple[int, int]]:
        """Yield the spans of a file's code that have no mutants."""
        if self.file in ("", file):
            for found in re.finditer(self.find, code, re.MULTILINE):
                is_block = found[0].endswith("{")
                yield found.start(), closing(code, found.end()) if is_block else found.end()


def mutants(file: str, text: str, skips: Iterable[Skip] = ()) -> list[Mutant]:
    """Return all mutants of a text, in the order of their places."""
    code = code_of(text)
    spans = [span for skip in skips for span in skip.spans(file, code)]
    found = []
    for rule in RULES.values():
        for begin, end, replacement in rule(code):
            if not any(first < end and begin < last for first, last in spans):
                found.append(_mutant(file, text, begin, end, replacement))
    return sorted(set(found), key=lambda one: (one.begin, one.end, one.replacement))


def _mutant(file: str, text: str, begin: int, end: int, replacement: str) -> Mutant:
    """Return a mutant; its description includes some text around the change."""
    first, last = text.rfind("\n", 0, begin) + 1, text.find("\n", end)
    before, after = text[first:begin].lstrip()[-30:], text[end:last][:30]
    what = f"{before}[{text[begin:end]} -> {replacement}]{after}"
    return Mutant(file, begin, end, replacement, text.count("\n", 0, begin) + 1, _spaced(what))


def _spaced(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
