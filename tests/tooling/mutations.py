# SPDX-License-Identifier: MIT
"""Mutants of a text in C++ or Python: one token, condition, argument or statement is replaced.

clang-format has formatted the C++ texts: only binary operators have spaces on both sides, not the
brackets of a template, the * of a pointer or the & of a reference.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Set
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import NamedTuple


class Mutant(NamedTuple):
    """A change of a file: the replacement of text[begin:end]."""

    file: str
    rule: str
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


Change = tuple[str, int, int, str]  # rule, begin and end in the text, and the replacement
Rule = Callable[[str], Iterator[tuple[int, int, str]]]

_OTHER = {
    **{"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "not in": "in"},
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "and": "or"},
    **{"&&": "||", "||": "&&", "&": "|", "|": "&", "^": "&", "<<": ">>", ">>": "<<", "or": "and"},
    **{"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=", "|=": "&=", "&=": "|=", "%=": "*="},
    **{"is not": "is", "is": "is not", "in": "not in"},
    **{"min": "max", "max": "min", "fmin": "fmax", "fmax": "fmin", "true": "false"},
    **{"false": "true", "at_least": "at_most", "at_most": "at_least"},
}

# ---- C++ -----------------------------------------------------------------------------------------

_NOT_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|'(?:\\.|[^'\\\n])'|\"(?:\\.|[^\"\\\n])*\""  # comments and texts
    r"|^[ \t]*#(?!define \w+ \S+$)(?:[^\n]*\\\n)*[^\n]*",  # preprocessor lines, except constants
    re.DOTALL | re.MULTILINE,
)
_DIRECTIVE = re.compile(r" *# *(if|el|endif)(.*)")
_BARRIER = (
    r"(?:\b__sync(?:threads|warp)\(\)|\bcluster_begun\(\)|\bwait_for_cluster\(\)|\bgang\.wait\(\)"
    r"|\basync_(?:wait<[^;{}]*>|commit)\(\)|\bwait_for_arrivals\([^;{}]*\)"
    r"|\bwait_for_prerequisites\(\)|(?<=\) )wait\(\));"
)
_STATEMENT = (
    r"(?<=[;{}\n)])\n +(?!return\b|using\b|__sync|cluster_b|async_|wait)"
    r"([\w.:\[\]>*-]+(?:<[\w:<>, ]*>)?(?:\(.*\)| [-+*/|&]?= .*|\+\+));(?= *\n)"
)
_NAME = "f?min|f?max|true|false|at_least|at_most"


def code_of(text: str, macros: Set[str] | None = None) -> str:
    """Return a text with spaces in place of comments, strings and most preprocessor lines.

    With `macros`, the compiler's own, parts for other machines also become spaces.
    """
    lines, parts = text.splitlines(keepends=True), []
    for number, line in enumerate(lines if macros is not None else ()):
        if found := _DIRECTIVE.match(line):
            if found[1] != "if":
                parts.pop()
            if found[1] != "endif":
                needed = re.findall(r"(?<!!)defined\((__\w+)\)", found[2])
                parts.append("||" in found[2] or macros.issuperset(needed))
        elif not all(parts):
            lines[number] = re.sub(r"\S", " ", line)
    return _NOT_CODE.sub(lambda found: re.sub(r"\S", " ", found[0]), "".join(lines))


def closing(code: str, begin: int) -> int:
    """Return where the bracket that opens before `begin` is closed, or else the code's end."""
    depth = 1
    for index in range(begin, len(code)):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(code[index], 0)
        if depth == 0:
            return index
    return len(code)


def _replaced(pattern: str, other: Callable[[str], str | None]) -> Rule:
    """Return a rule that replaces the group that matched or, without groups, the whole match."""

    def rule(code: str) -> Iterator[tuple[int, int, str]]:
        for found in re.finditer(pattern, code):
            group = found.lastindex or 0
            if (replacement := other(found[group])) is not None:
                yield *found.span(group), replacement

    return rule


def _bracketed(pattern: str, *others: Callable[[str], str], whole: bool = False) -> Rule:
    """Return a rule that replaces what is in the bracket that a match opens, or the whole call."""

    def rule(code: str) -> Iterator[tuple[int, int, str]]:
        for found in re.finditer(pattern, code):
            end = closing(code, found.end())
            for other in others:
                begin, last = (found.start(), end + 1) if whole else (found.end(), end)
                yield begin, last, other(code[found.end() : end])

    return rule


CPP_RULES: dict[str, Rule] = {
    "operator": _replaced(r"(?<=[\w)\]}>]) ([-+*/%<>=!&|^]{1,2})(?=\s)", _OTHER.get),
    "integer": _replaced(r"(?<![\w.'])(\d+)(?=(?:u|LL)?(?![\w.]))", lambda n: str(int(n) + 1)),
    "float": _replaced(r"(?<![\w.])(\d+\.\d*)(?=f?\b)", lambda number: repr(float(number) + 1)),
    "coefficient": _replaced(r"0x\d\.?[\da-f]*p([+-]?\d+)", lambda n: f"{int(n) + 1:+d}"),
    "name": _replaced(rf"(?<!using std::)\b({_NAME})(?=\(|[^\w<(]|<\w+>\()", _OTHER.get),
    "not": _replaced(r"(?<=[\s(,])!(?=[\w(])", lambda _: ""),
    "count": _replaced(r"(\+\+|--)(?=\w)|(?<=[\w\]])(\+\+|--)", lambda _: ""),
    "factor": _replaced(
        r"(?<=[\w)\]]) \* (?:[\w.:]+(?:<B>)?(?:::\w+)?)(?=[\s);,\]])", lambda _: ""
    ),
    "index": _bracketed(r"(?<=[\w)\]])\[(?=[^\]&=])(?!\d+\])", lambda index: f"({index}) + 1"),
    "fma": _replaced(r"(?<![\w:])(?:std::)?fma\((-?)", lambda sign: "" if sign else "-"),
    "guard": _bracketed(r"(?<!bool )\binside\(", lambda _: "true", whole=True),
    "condition": _bracketed(
        r"\bif (?:constexpr )?\((?:const \w+ \w+ = [^;]*; )?", lambda _: "true", lambda _: "false"
    ),
    "barrier": _replaced(_BARRIER, lambda _: ";"),
    "statement": _replaced(_STATEMENT, lambda _: ""),
}

# ---- Python --------------------------------------------------------------------------------------


def python_changes(text: str) -> Iterator[Change]:
    """Yield the changes of a Python text; annotations and checks for type checkers have none."""
    lines = text.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]

    def span(node: ast.AST) -> tuple[int, int]:
        places = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        return tuple(starts[n - 1] + len(lines[n - 1].encode()[:c].decode()) for n, c in places)

    def operators(*operands: ast.AST) -> Iterator[Change]:
        for left, right in pairwise(map(span, operands)):
            found = re.search(r"[^\s()\\]+(?: not| in)?(?=[\s(])", text[left[1] : right[0]])
            if found and found[0] in _OTHER:
                begin = left[1] + found.start()
                yield "operator", begin, begin + len(found[0]), _OTHER[found[0]]

    def changes(node: ast.AST) -> Iterator[Change]:
        match node:
            case ast.BinOp():
                yield from operators(node.left, node.right)
            case ast.AugAssign():
                yield from operators(node.target, node.value)
                yield "statement", *span(node), "pass"
            case ast.Compare():
                yield from operators(node.left, *node.comparators)
            case ast.BoolOp():
                yield from operators(*node.values)
            case ast.UnaryOp(op=ast.Not()):
                yield "not", span(node)[0], span(node.operand)[0], ""
            case ast.Constant(value=int()):
                other = not node.value if isinstance(node.value, bool) else node.value + 1
                yield "integer", *span(node), str(other)
            case ast.If() | ast.IfExp():
                yield "condition", *span(node.test), "True"
                yield "condition", *span(node.test), "False"
            case ast.Raise() | ast.Continue() | ast.Break() | ast.Expr(value=ast.Call()):
                yield "statement", *span(node), "pass"
            case ast.Call():  # without another argument, most calls raise TypeError
                for begin, end in map(span, node.keywords):
                    comma = re.compile(r"\s*,\s*").match(text, end)
                    yield "argument", begin, comma.end() if comma else end, ""

    def walk(node: ast.AST) -> Iterator[Change]:
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if for_types or isinstance(node, ast.JoinedStr):  # Python 3.11 gives no places in f-strings
            return
        yield from changes(node)
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                    yield from walk(child)

    yield from walk(ast.parse(text))


# ---- Both ----------------------------------------------------------------------------------------


def skipped(file: str, code: str, skips: Mapping[str, Mapping[str, str]]) -> dict[str, list]:
    """Return the spans without mutants that each pattern finds; a last { includes its block."""
    found: dict[str, list[tuple[int, int]]] = {}
    for name in ("", file):
        for pattern in skips.get(name, ()):
            for one in re.finditer(pattern, code, re.MULTILINE):
                end = closing(code, one.end()) if one[0].endswith("{") else one.end()
                found.setdefault(pattern, []).append((one.start(), end))
    return found


def mutants(
    file: str,
    text: str,
    skips: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    macros: Set[str] | None = None,
) -> list[Mutant]:
    """Return all mutants of a text, in the order of their places."""
    if file.endswith(".py"):
        code, changes = text, python_changes(text)
    else:
        code = code_of(text, macros)
        changes = ((name, *one) for name, rule in CPP_RULES.items() for one in rule(code))
    spans = [span for some in skipped(file, code, skips).values() for span in some]
    made: dict[tuple[int, int, str], Mutant] = {}
    for rule, begin, end, new in changes:
        if not any(first < end and begin < last for first, last in spans):
            what = (
                f"{text[:begin].rpartition(chr(10))[2].lstrip()[-30:]}[{text[begin:end]} -> {new}]"
            )
            what += text[end:].partition("\n")[0][:30]
            number = text.count("\n", 0, begin) + 1
            change = re.sub(r"\s+", " ", what).strip()
            made.setdefault((begin, end, new), Mutant(file, rule, begin, end, new, number, change))
    return [made[place] for place in sorted(made)]
