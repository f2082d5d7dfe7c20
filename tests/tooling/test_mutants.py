# SPDX-License-Identifier: MIT
"""Each rule makes its mutants, and mutants.toml matches the source."""

from __future__ import annotations

import subprocess

import pytest

from tests.tooling import mutants as tool
from tests.tooling.mutations import CPP_RULES, code_of, mutants, skipped

CPP = """
#include "row.cuh"  // a + b
#define KEPT 0
#if defined(A) && !defined(B)
// if (a < b) c = 1;
static_assert(a == b, "a && b");
#elif defined(__AVX2__)
int only_there = 1;
#endif
template <int first = 0, class V>
__device__ inline V at(const V* row, int i) {
  __shared__ V parts[3];
  if (const int lane = i % 32; !live || lane >= row.count)
    for (int k = 0; k < i; ++k) parts[k] += fma(-row[i], 0.5f, 0x1.8p-3f);
  __syncthreads();
  rows += i * stride;
  return std::min(inside(i, f(1)) ? count++ : i, true);
}
"""
PYTHON = """
def at(rows: int | None = 3, *, is_held=False):
    if not rows and is_held:
        raise ValueError(f"{rows + 1} rows")
    rows += 2 * (rows
        - 1)
    note(rows, held=is_held)
    return rows is not None
"""
# Some mutants of each rule: a text that occurs once, and what replaces it.
EXPECTED_CPP = {
    "operator": [("rows += i * stride;", "rows -= i * stride;"), ("i * stride", "i / stride")],
    "integer": [("#define KEPT 0", "#define KEPT 1")],
    "float": [("0.5f", "1.5f")],
    "coefficient": [("0x1.8p-3f", "0x1.8p-2f")],
    "name": [("std::min(", "std::max("), (": i, true)", ": i, false)")],
    "not": [("; !live", "; live")],
    "count": [("? count++ :", "? count :")],
    "factor": [("rows += i * stride;", "rows += i;")],
    "index": [("parts[k] +=", "parts[(k) + 1] +="), ("-row[i]", "-row[(i) + 1]")],
    "fma": [("fma(-row", "fma(row")],
    "condition": [("!live || lane >= row.count)", f"{value})") for value in ("true", "false")],
    "guard": [("inside(i, f(1)) ?", "true ?")],
    "barrier": [("__syncthreads();", ";")],
    "statement": [("rows += i * stride;", ";")],
}
EXPECTED_PYTHON = {
    "operator": [(" and ", " or "), (" is not ", " is "), ("- 1)", "+ 1)"), ("+=", "-=")],
    "integer": [("= 3", "= 4"), ("=False", "=True")],
    "not": [("not rows and", "rows and")],
    "condition": [("if not rows and is_held", f"if {value}") for value in ("True", "False")],
    "statement": [('raise ValueError(f"{rows + 1} rows")', "pass")],
    "argument": [(", held=is_held", ", ")],
}
TEXTS = [("a.cuh", CPP, EXPECTED_CPP), ("a.py", PYTHON, EXPECTED_PYTHON)]
PARAMETERS = [(file, text, rule, some[rule]) for file, text, some in TEXTS for rule in some]


@pytest.mark.parametrize(("file", "text", "rule", "expected"), PARAMETERS)
def test_each_rule_makes_its_mutants(file, text, rule, expected):
    made = [one.applied(text) for one in mutants(file, text) if one.rule == rule]
    for before, after in expected:
        assert text.count(before) == 1
        assert text.replace(before, after) in made


def lines_with_mutants(text, **kwargs):
    return {text.splitlines()[one.line - 1] for one in mutants("a.cuh", text, **kwargs)}


def test_comments_texts_includes_annotations_and_skipped_blocks_have_no_mutants():
    assert set(EXPECTED_CPP) == set(CPP_RULES)
    first = {"#define KEPT 0", 'static_assert(a == b, "a && b");', "int only_there = 1;"}
    first.add("template <int first = 0, class V>")
    assert lines_with_mutants(CPP, skips={"": {r"at\(const V\* row, int i\) \{": "why"}}) == first
    assert not any("[&& ->" in one.change for one in mutants("a.cuh", CPP))
    changes = [one.change for one in mutants("a.py", PYTHON)]
    assert not [one for one in changes if "[| ->" in one or "[+ ->" in one]


def test_lines_for_other_machines_have_no_mutants():
    there = {"int only_there = 1;"}
    assert lines_with_mutants(CPP, macros={"__AVX2__"}) == lines_with_mutants(CPP)
    assert lines_with_mutants(CPP, macros=set()) == lines_with_mutants(CPP) - there


def test_the_list_matches_the_source():
    known = tool.settings()
    texts = {name: (tool.ROOT / name).read_text("utf-8") for name in tool.files()}
    code = {name: code_of(text) for name, text in texts.items() if not name.endswith(".py")}
    found = {pattern for name in code for pattern in skipped(name, code[name], known["skip"])}
    assert found == {pattern for some in known["skip"].values() for pattern in some}
    for name, changes in known["equivalent"].items():
        assert changes.keys() <= {one.change for one in mutants(name, texts[name], known["skip"])}
    words = {word for name in texts for runs in tool.tests_of(name, known) for word in runs.split()}
    assert all((tool.ROOT / word).exists() for word in words if word.startswith("tests/"))


def test_a_run_that_does_not_pass_names_the_failed_test():
    failed = "FAILED tests/a.py::test_b[c] - "
    hangs = 'Timeout (0:02:30)!\n  File "/x/tests/a.py", line 3 in test_b\n'
    for out, err, *expected in (
        (failed + "assert 1 == 2\n", "", "killed", "tests/a.py::test_b[c]"),
        (failed + "NVRTC does not compile a build\n", "", "does not compile", ""),
        ("", hangs, "killed", "tests/a.py::test_b does not end"),
        ("", "not done in 1 s", "killed", "status 1: not done in 1 s"),
    ):
        assert tool.verdict(subprocess.CompletedProcess([], 1, out, err)) == tuple(expected)
