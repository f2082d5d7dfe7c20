# SPDX-License-Identifier: MIT
"""Checks of drawn cases; a case that fails, or crashes the process, is a script."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import note

from tests.fuzz.relations import RELATIONS
from tests.support.cases import call_of
from tests.support.covers import Case
from tests.support.guarded import OnGuarded
from tests.support.operands import at

_SCRIPT = """from tests.fuzz.examples import check
from tests.fuzz.views import View
from tests.support.placed import Samples

check({kernel!r}, {case!r}, {relation!r}, {seed!r}, at_end={at_end!r})
"""


def run(kernel: str, case: Case, *rest: Any, **more: Any) -> None:
    """Check an example, which is a script until it has passed."""
    kept = Path(tempfile.gettempdir(), f"cunorm-example-{os.getpid()}.py")
    script = _script(kernel, case, *rest, **more)
    kept.write_text(script, "utf-8")
    note(f"As a script, for the root of the repository:\n{script}")
    check(kernel, case, *rest, **more)
    kept.unlink()


def check(kernel: str, case: Case, relation: str, seed: int, *, at_end: bool = True) -> None:
    """Check a case against the oracle, and its relation to another call of the function."""
    call = call_of(kernel, case, OnGuarded(at_end))
    result = call.check()
    with at(relation, seed):
        RELATIONS[relation](kernel, case, call, result, seed)


def _script(kernel: str, case: Case, relation: str, seed: int, *, at_end: bool) -> str:
    return _SCRIPT.format(kernel=kernel, case=case, relation=relation, seed=seed, at_end=at_end)
