# SPDX-License-Identifier: MIT
"""Checks of drawn cases; a case that fails, or crashes the process, is kept as a script."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import note

from tests.fuzz.relations import RELATIONS
from tests.support.cases import DEFAULTS, call_of
from tests.support.covers import Case
from tests.support.guarded import OnGuarded
from tests.support.machines import compiled_for
from tests.support.operands import at

_SCRIPT = """from tests.fuzz.examples import check
from tests.fuzz.views import View
from tests.support.placed import Samples

check({kernel!r}, {case!r}, {relation!r}, {seed!r}, at_end={at_end!r})
"""


def run(kernel: str, case: Case, *rest: Any, **more: Any) -> set[str]:
    """Check an example, and keep it as a script until it passes; return the checked relations."""
    kept = Path(tempfile.gettempdir(), f"cunorm-example-{os.getpid()}.py")
    script = _script(kernel, case, *rest, **more)
    kept.write_text(script, "utf-8")
    note(f"As a script, for the root of the repository:\n{script}")
    found = check(kernel, case, *rest, **more)
    kept.unlink()
    return found


def check(
    kernel: str, case: Case, relation: str | None, seed: int, *, at_end: bool = True
) -> set[str]:
    """Check a case against the oracle, and its relations to other calls of the function.

    Checks the given relation or, if it does not apply, the next that applies; with None, all
    that apply. Returns the names of the checked relations.
    """
    with compiled_for(case["machine"]):
        return _check(kernel, DEFAULTS | case, relation, seed, at_end)


def _check(kernel: str, case: Case, relation: str | None, seed: int, at_end: bool) -> set[str]:
    result = call_of(kernel, case, OnGuarded(at_end)).check()
    names = [*RELATIONS[kernel]]
    first = names.index(relation) if relation else 0
    found: set[str] = set()
    for name in (*names[first:], *names[:first]):
        call = call_of(kernel, case, OnGuarded(at_end))  # a relation may change the inputs
        with at(name, seed):
            if RELATIONS[kernel][name](kernel, case, call, result, seed):
                found.add(name)
        if found and relation:
            break
    return found


def _script(kernel: str, case: Case, relation: str | None, seed: int, *, at_end: bool) -> str:
    return _SCRIPT.format(kernel=kernel, case=case, relation=relation, seed=seed, at_end=at_end)
