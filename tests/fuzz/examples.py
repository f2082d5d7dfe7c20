# SPDX-License-Identifier: MIT
"""Checks of drawn cases; a case that fails, or crashes the process, is kept as a script."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

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


def run(kernel: str, case: Case, relation: str | None, seed: int, *, at_end: bool) -> set[str]:
    """Check an example, and keep it as a script until it passes; return the checked relations."""
    kept = Path(tempfile.gettempdir(), f"cunorm-example-{os.getpid()}.py")
    script = _SCRIPT.format(kernel=kernel, case=case, relation=relation, seed=seed, at_end=at_end)
    kept.write_text(script, "utf-8")
    note(f"As a script, for the root of the repository:\n{script}")
    found = check(kernel, case, relation, seed, at_end=at_end)
    kept.unlink()
    return found


def check(kernel: str, case: Case, relation: str | None, seed: int, *, at_end: bool) -> set[str]:
    """Check a case against the oracle, and its relations to other calls of the function.

    Checks the given relation or, if it does not apply, the next that applies; with None, all
    that apply. Returns the names of the checked relations.
    """
    case, names, found = DEFAULTS | case, [*RELATIONS[kernel]], set[str]()
    first = names.index(relation) if relation else 0
    with compiled_for(case["machine"]):
        result = call_of(kernel, case, OnGuarded(at_end)).check()
        for name in (*names[first:], *names[:first]):
            call = call_of(kernel, case, OnGuarded(at_end))  # a relation may change the inputs
            with at(name, seed):
                found |= (
                    {name} if RELATIONS[kernel][name](kernel, case, call, result, seed) else set()
                )
            if found and relation:
                break
    return found
