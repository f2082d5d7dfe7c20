# SPDX-License-Identifier: MIT
"""Each rule makes its mutants, and the list of mutants that no test sees matches the source."""

from __future__ import annotations

import subprocess

import pytest

from tests.tooling import mutants as tool
from tests.tooling.copies import NOT_DONE
from tests.tooling.mutations import RULES, Skip, code_of, mutants
from tests.tooling.regions import compiled_lines

TEXT = """
#include "row.cuh"  // a + b
#define KEPT 0
#if defined(A) && !defined(B)
// if (a < b) c = 1;
static_assert(a == b, "a && b");
#endif
template <int first = 0, class V>
__device__ inline V at(const V* row, int i) {
  __shared__ V parts[3];
  if (const int lane = i % 32; !live || lane >= row.count)
    for (int k = 0; k < i; ++k) parts[k] += fma(-row[i], 0.5f, 0x1.8p-3f);
  __syncthreads();
  async_wait<B::stages - 1>();
  rows += i * stride;
  return std::min(inside(i, f(1)) ? count++ : i, true);
}
"""
# Some mutants of each rule: a text that occurs once in TEXT, and what replaces it.
EXPECTED = {
    "operator": [
        ("rows += i * stride;", "rows -= i * stride;"),
        ("rows += i * stride;", "rows += i / stride;"),
        ("async_wait<B::stages - 1>();", "async_wait<B::stages + 1>();"),
    ],
    "integer": [("#define KEPT 0", "#define KEPT 1")],
    "float": [("parts[k] += fma(-row[i], 0.5f", "parts[k] += fma(-row[i], 1.5f")],
    "coefficient": [("0x1.8p-3f", "0x1.8p-2f")],
    "name": [("std::min(", "std::max("), (": i, true)", ": i, false)")],
    "not": [("; !live", "; live")],
    "count": [("? count++ :", "? count :")],
    "factor": [("rows += i * stride;", "rows += i;")],
    "index": [("parts[k] +=", "parts[k + 1] +="), ("-row[i]", "-row[i + 1]")],
    "fma": [("fma(-row", "fma(row")],
    "condition": [
        ("!live || lane >= row.count)", "true)"),
        ("!live || lane >= row.count)", "false)"),
    ],
    "guard": [("inside(i, f(1)) ?", "true ?")],
    "barrier": [("__syncthreads();", ";"), ("async_wait<B::stages - 1>();", ";")],
    "statement": [("rows += i * stride;", ";")],
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_makes_its_mutants(rule):
    changes = RULES[rule](code_of(TEXT))
    made = [TEXT[:begin] + replacement + TEXT[end:] for begin, end, replacement in changes]
    for before, after in EXPECTED[rule]:
        assert TEXT.count(before) == 1
        assert TEXT.replace(before, after) in made


def test_comments_texts_includes_and_brackets_of_templates_have_no_mutants():
    found = mutants("a.cuh", TEXT)
    assert len(found) == len(set(found))
    assert not {2, 4, 5, 7} & {one.line for one in found}
    first, assertion, template = (TEXT.splitlines()[line - 1] for line in (10, 6, 8))
    lines = {line: [] for line in (first, assertion, template)}
    for one in found:
        before, after = TEXT.splitlines()[one.line - 1], one.applied(TEXT).splitlines()
        lines.setdefault(before, []).append(after[one.line - 1])
    assert lines[template] == ["template <int first = 1, class V>"]
    assert 'static_assert(a != b, "a && b");' in lines[assertion]
    assert all(one.endswith('"a && b");') or one == ";" for one in lines[assertion])


def test_skipped_code_and_its_block_have_no_mutants():
    everywhere = mutants("a.cuh", TEXT)
    block = Skip(r"at\(const V\* row, int i\) \{", "why")
    assert {one.line for one in mutants("a.cuh", TEXT, [block])} == {3, 6, 8}
    assert mutants("a.cuh", TEXT, [block._replace(file="b.cuh")]) == everywhere


def test_lines_for_other_machines_are_not_compiled():
    text = """1
#if defined(__AVX512F__) && !defined(__clang__)  // 2
3
#elif defined(__AVX2__)
5
#else
7
#endif
#ifdef SHARED
10
#else
12
#endif
"""
    v3, basic = frozenset({"__AVX2__"}), frozenset({"__SSE2__"})
    assert compiled_lines(text, [v3]) == {1, 5, 10, 12}
    assert compiled_lines(text, [basic]) == {1, 7, 10, 12}
    assert compiled_lines(text, [v3 | {"__AVX512F__"}, basic]) == {1, 3, 7, 10, 12}


def test_mutants_are_drawn_in_proportion_and_at_least_two_of_each_file():
    assert tool.shares({"a": 100, "b": 300, "c": 1}, 105) == {"a": 26, "b": 78, "c": 1}
    assert tool.shares({"a": 3, "b": 3}, 100) == {"a": 3, "b": 3}
    assert tool.shares({"a": 3, "b": 3}, 0) == {"a": 2, "b": 2}


def test_the_list_matches_the_source():
    known = tool.settings()
    texts = {name: (tool.ROOT / name).read_text("utf-8") for name in tool.files()}
    for skip in known.skips:
        spans = [s for name, text in texts.items() for s in skip.spans(name, code_of(text))]
        assert spans, f"nothing is skipped by {skip.find}"
    for name, text in texts.items():
        known.tests_of(name)
        listed = {change for file, change in known.equivalents if file == name}
        assert listed <= {one.change for one in mutants(name, text, known.skips)}
    assert {file for file, _ in known.equivalents} <= texts.keys()


FAILED_TEST = "FAILED tests/a.py::test_b[c] - assert 1 == 2\n"
FAILED_BUILD = "FAILED tests/a.py::test_b[c] - the C++ compiler does not compile a build\n"
HANGS = 'Timeout (0:02:30)!\n  File "/x/tests/a.py", line 3 in test_b\n'
CRASHES = 'Fatal Python error: Segmentation fault\n  File "/x/tests/a.py", line 3 in test_b\n'


@pytest.mark.parametrize(
    ("status", "out", "err", "expected"),
    [
        (1, FAILED_TEST, "", ("killed", "tests/a.py::test_b[c]")),
        (1, FAILED_BUILD, "", ("does not compile", "")),
        (1, "", HANGS, ("killed", "tests/a.py::test_b does not end")),
        (-11, "", CRASHES, ("killed", "tests/a.py::test_b crashes")),
        (NOT_DONE, "", "not done in 1 s", ("killed", f"status {NOT_DONE}: not done in 1 s")),
    ],
)
def test_a_run_that_does_not_pass_names_the_failed_test(status, out, err, expected):
    assert tool.verdict(subprocess.CompletedProcess([], status, out, err)) == expected
